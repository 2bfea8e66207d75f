"""Steps that CUDA graphs replay are those that torch launches one operation at a time."""

import pytest
import torch

from phalanx.cli.main import main
from small_runs import read_result, small_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RUNS = {
    "plain": {},
    "torch's kernels": {"kernels": "torch"},
    "32 bits": {"precision": "32.32"},
    "accumulation": {"gradient_accumulation": 3, "batch_size": 8},
    "folded replicas": {"replicas": 3, "batch_size": 8, "norm_type": "group", "norm_num_groups": 8},
    "folded batch norms": {"replicas": 2, "batch_size": 8, "norm_type": "batch"},
    "side by side": {"replicas": 2, "batch_size": 8, "norm_type": "batch", "bn_span": 2},
    "mixing": {
        "mixup_alpha": 0.3,
        "cutmix_lambda_low": 0.2,
        "cutmix_lambda_high": 0.9,
        "cutmix_disable_prob": 0.5,
    },
    "drops": {"drop_path": 0.3, "dropout_rate": 0.2},
    "overflow": {"half_type": "float16", "auto_loss_scaling": "true", "loss_scaling": 2**24},
    "16.16": {"precision": "16.16", "enable_stochastic_rounding": "true"},
    "average": {"ema_decay": 0.9, "clip_grad_norm": 1.0, "optimizer": "rmsprop_tf", "lr": 0.001},
    "growing": {"progressive_resolution": "8:1ep", "image_size": 12},
    "recomputed": {"enable_recompute": "true"},
    "offloaded": {"offload_optimizer": "true"},
    "efficientnet": {"model": "efficientnet-b0", "drop_path": 0.2, "image_size": 32},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_graph_gives_the_same_bits(digits, tmp_path, name):
    options = {"model": "resnet8", "norm_type": "batch", "determinism": "strict", **RUNS[name]}
    hashes = []
    for graph in ("true", "false"):
        run = tmp_path / graph
        assert main(small_run(digits, run, device="cuda", graph=graph, epochs=2, **options)) == 0
        hashes.append(read_result(run)["weights_sha256"])
    assert hashes[0] == hashes[1]


def test_a_resume_goes_on_with_the_same_bits_and_kernels(digits, tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    options = {"model": "resnet14", "norm_type": "batch", "determinism": "strict"}
    assert main(small_run(digits, whole, device="cuda", epochs=2, **options)) == 0
    assert main(small_run(digits, halves, device="cuda", epochs=2, **options)) == 0
    last = sorted((halves / "checkpoints").glob("step-*"))[-1]
    for path in sorted(last.rglob("*"), reverse=True):
        path.unlink()
    last.rmdir()
    assert main(["train", "--resume", str(halves)]) == 0
    found = [read_result(run) for run in (whole, halves)]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]
