"""Every preset takes real steps: its network, its images' way, its optimizer and its precision."""

import json
from math import isfinite

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.catalog.models import MODELS
from phalanx.cli.main import main
from phalanx.config.presets import builtin_preset_folder
from phalanx.config.read import read_settings
from phalanx.models.build import build_model
from phalanx.plan.pipeline import count_stages

NAMES = sorted(path.stem for path in builtin_preset_folder().glob("*.yaml"))
OLD_NAMES = [  # those of older applications that have what no recipe has
    "resnet50_mk2_pipelined",  # named outputs that are kept, in stages
    "resnet50-16ipu-mk2-recompute",  # all convolutions and norms are
    "resnet50-16ipu-mk1",
    "efficientnet-b0-16ipu-mk2",
    "mk2_efficientnet_b4_g1_16ipus",  # three images to be mixed
    "mk2_efficientnet_b4_g16_64ipus_LARS",
    "mk2_resnet50_base",
    "mk2_resnet8_test",
    "imagenet_config",
    "resnet56_16ipus_8k_bn_pipeline",
    "resnet8_test_lars",  # normalised on the host
    "resnet50_infer_bs16",
]
SMALL = {"image-size": 64, "batch-size": 4, "gradient-accumulation": 2, "steps": 3}
SMALL |= {"warmup-epoch": "1st", "iterations": 8, "device": "cpu", "workers": 0}


def small_options(name: str) -> dict[str, object]:
    """As little work as shows all parts: of many replicas, two groups that share statistics."""
    config = read_settings(name).config
    machine, stages = config.machine, count_stages(config)  # of a pipeline: a micro-batch for each
    if name == "mk2_efficientnet_b4_g1_16ipus":
        return {**SMALL, "batch-size": 3, "gradient-accumulation": stages, "replicas": 1}
    if machine.replicas == 1:
        return {**SMALL, "gradient-accumulation": max(2, stages)}
    fewer = {"replicas": 2 * machine.bn_span, "gradient-accumulation": stages, "image-size": 32}
    return {**SMALL, **fewer}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, *OLD_NAMES])
def test_a_preset_takes_steps(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [f"--{option}={value}" for option, value in small_options(name).items()]
    made = ["--data=generated", "--validation-mode=none", "--run-dir=run"]
    if name.startswith("finetune-"):
        model = MODELS[name.removeprefix("finetune-")]
        save_file(build_model(model, num_classes=7).state_dict(), "pretrained.safetensors")
        made += ["--init-weights=pretrained.safetensors", "--reset-head"]
    assert main(["train", name, *words, *made]) == 0
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)


@pytest.mark.slow
def test_the_16_replicas_of_a_recipe_fold_onto_one_device(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = "--image-size 32 --batch-size 2 --gradient-accumulation 1 --device cpu --workers 0"
    made = "--data generated --steps 2 --validation-mode none --run-dir run"
    assert main(["train", "tf1-resnet50-mlperf-1920", *small.split(), *made.split()]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    plan = json.loads((tmp_path / "run/run.json").read_text())["plan"]
    assert (plan["replicas"], plan["bn_span"], plan["ranks"], plan["global_batch"]) == (
        16,
        2,
        1,
        32,
    )
    folder = tmp_path / "run/checkpoints/step-00000002"
    each, mean = (
        load_file(folder / "replicas.safetensors"),
        load_file(folder / "weights.safetensors"),
    )
    means = torch.stack([each[f"{replica}/bn1.running_mean"] for replica in range(16)])
    assert torch.equal(means[::2], means[1::2]), "two replicas share their statistics"
    assert len(means[::2].unique(dim=0)) == 8, "and no others"
    torch.testing.assert_close(mean["bn1.running_mean"], means.mean(0))


@pytest.mark.slow
def test_the_16_devices_of_a_pipeline_fold_onto_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = "--image-size 32 --batch-size 2 --gradient-accumulation 4 --device cpu --workers 0"
    made = "--data generated --steps 2 --validation-mode none --determinism strict"
    words = ["train", "tf1-resnet50-bn", *small.split(), *made.split()]
    assert main([*words, "--run-dir=folded"]) == 0
    told = capsys.readouterr().out
    assert "4 replicas folded onto 1 device" in told and "4 stages folded into one" in told
    whole = "--pipeline-splits none --enable-recompute false --run-dir=whole"
    assert main([*words, *whole.split()]) == 0
    names = "checkpoints/step-00000002/weights.safetensors"
    folded, kept = (load_file(tmp_path / run / names) for run in ("folded", "whole"))
    assert all(torch.equal(folded[name], kept[name]) for name in kept), "stages change no number"
