"""The session: one way to get a model that trains or scores, and the seams for many devices."""

import os
import random
import resource
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import phalanx
from phalanx.assemble import rank_context
from phalanx.assemble import train as training
from phalanx.assemble.dataset_summary import plan_run
from phalanx.assemble.prepare import prepare_new_run
from phalanx.assemble.score import open_checkpoint, score_target
from phalanx.assemble.scoring_target import read_checkpoint
from phalanx.assemble.session import Session
from phalanx.assemble.torch_setup import prepare_torch, preserve_torch_settings
from phalanx.cli.main import main
from phalanx.config.read import read_settings
from phalanx.engine.checkpoint_store import list_checkpoints
from phalanx.engine.consensus import Consensus
from phalanx.engine.state import hash_weights
from phalanx.errors import ConfigError, DiskError, DivergedError, Stopped
from small_runs import read_result, small_run


def settings_of(digits, run, **options):
    """The settings of a small run, as the command line reads them."""
    words = small_run(digits, run, **options)[1:]
    return read_settings(None, dict(word.removeprefix("--").split("=", 1) for word in words))


@pytest.fixture
def prepared(digits, tmp_path):
    return prepare_new_run(settings_of(digits, tmp_path / "run"), line="test")


@pytest.fixture(scope="module")
def finished(digits, tmp_path_factory):
    """A run with its average, trained to its end."""
    run = tmp_path_factory.mktemp("finished") / "run"
    assert main(small_run(digits, run, keep=9, ema_decay=0.5)) == 0
    return run


def test_freed_memory_stays_for_the_next_step(prepared):
    Session(prepared.config, prepared.plan)
    layers = [nn.Conv2d(wide, 16, 3, padding=1) for wide in (3, *[16] * 5)]
    model, images = nn.Sequential(*layers), torch.ones(64, 3, 32, 32)

    def count_faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        model(images).sum().backward()
        model.zero_grad(set_to_none=True)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert [count_faults() for _ in range(12)][-1] < 100, "4 MiB, 1,024 pages, a layer"


@pytest.mark.parametrize(("name", "used"), [("cuda:0", 0), ("cuda:2", 2), ("cuda", 1)])
def test_the_gpu_that_is_named_is_current_until_a_program_goes_on(
    prepared, monkeypatch, name, used
):
    current = [1]  # the program has chosen it
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: current.append(getattr(device, "index", device))
    )
    with preserve_torch_settings():
        prepare_torch(replace(prepared.plan, device=name))
        assert current[-1] == used
    assert current[-1] == 1


@pytest.mark.parametrize(("given", "used"), [(None, "32"), ("1", "1")])
def test_a_gpu_has_32_queues_before_cuda_is_asked_for_anything(prepared, monkeypatch, given, used):
    seen = []

    def is_available():
        seen.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
        return False

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given or "")
    if given is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    with preserve_torch_settings(), pytest.raises(ConfigError, match="finds no CUDA device"):
        prepare_torch(replace(prepared.plan, device="cuda"))
    assert seen == [used]


def test_images_that_a_gpu_decodes_are_scored_without_one(prepared):
    config = prepared.config.replace_options({"gpu-decode": True})
    with Session(config, prepared.plan, classes=prepared.dataset.classes) as session:
        with pytest.raises(ConfigError, match="--gpu-decode: cpu is not a usable CUDA device"):
            _ = session.feed
        assert len(next(session.scoring_feed.validation_batches()).labels)


def torch_settings():
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return (
        *(torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()),
        *(torch.is_deterministic_algorithms_warn_only_enabled(), cudnn.deterministic),
        *(cudnn.benchmark, matmul.allow_fp16_reduced_precision_reduction),
        matmul.allow_bf16_reduced_precision_reduction,
    )


def test_settings_that_change_nothing_do_not_import_torchs_compiler():
    code = (
        "import sys, phalanx\n"
        "from phalanx.assemble import torch_setup as setup\n"
        "with setup.preserve_torch_settings():\n"
        "    setup.apply_torch_settings(phalanx.plan('demo'))\n"
        "sys.exit('torch._inductor' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_functions_leave_random_states_and_torch_as_they_were(digits, tmp_path):
    run = tmp_path / "run"
    words = small_run(digits, run, steps=2, workers=0, threads=1, determinism="strict")[1:]
    options = dict(word.removeprefix("--").replace("-", "_").split("=", 1) for word in words)
    options["data_dir"], options["run_dir"] = digits, run
    torch.manual_seed(7)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    torch.use_deterministic_algorithms(False)
    before = torch_settings()
    try:
        phalanx.train(**options)
        assert torch_settings() == before
        phalanx.validate(run)
        assert torch_settings() == before
        model = phalanx.load(run)
        model(np.zeros((12, 12), np.uint8))
        assert torch_settings() == before
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


def test_what_nobody_asks_for_is_not_built(finished):
    with open_checkpoint(read_checkpoint(finished, {})) as session:
        assert hash_weights(session.model.state_dict()) == read_result(finished)["weights_sha256"]
        assert (
            session.evaluate(session.scoring_feed.validation_batches()).top1
            == read_result(finished)["top1"]
        )
        assert not {"state", "feed"} & vars(session).keys()


def test_a_checkpoint_gives_its_weights_or_their_average(finished):
    newest = list_checkpoints(finished / "checkpoints")[-1]
    plain = score_target(read_checkpoint(newest, {}))
    averaged = score_target(read_checkpoint(newest / "average.safetensors", {}))
    assert plain.row.top1 == read_result(finished)["top1"]
    assert averaged.row.top1 == read_result(finished)["averaged_top1"]
    assert plain.row.loss != averaged.row.loss


def test_a_session_trains_as_the_command_does(digits, tmp_path):
    settings = settings_of(digits, tmp_path / "run", steps=3)
    plan, _ = plan_run(settings)
    with Session(settings.config, plan) as session:
        for passes in session.feed.batches_from(0):
            session.train_step(passes, plan.lr(session.state.step))
        ours = hash_weights(session.model.state_dict())
    assert main(small_run(digits, tmp_path / "run", steps=3)) == 0
    assert ours == read_result(tmp_path / "run")["weights_sha256"]


def test_a_process_that_neither_writes_nor_prints_trains_the_same(
    prepared, finished, capsys, monkeypatch
):
    capsys.readouterr()
    before = {path.name for path in prepared.run.path.iterdir()}
    trained = []
    monkeypatch.setattr(training, "_print_start", trained.append)
    monkeypatch.setattr(rank_context.RankContext, "is_first_rank", False)
    assert training.train(prepared) is None
    left = {path.name for path in prepared.run.path.iterdir()}
    assert left == before and capsys.readouterr().out == ""
    weights = trained[0].session.model.state_dict()
    assert hash_weights(weights) == read_result(finished)["weights_sha256"]


class OtherRank(Consensus):
    """A rank beside ours that says yes at the n-th question, or fails at the n-th save."""

    says_yes_at = fails_at = 10**9

    def __init__(self, ranks=None):
        super().__init__(ranks)
        self.asked = self.saved = 0

    def any(self, mine):
        self.asked += 1
        return mine or self.asked >= self.says_yes_at

    def raise_any(self, mine):
        self.saved += 1
        assert mine is None
        if self.saved >= self.fails_at:
            raise DiskError("rank 1: no space left")


def test_a_stop_of_another_process_is_ours(prepared, monkeypatch):
    monkeypatch.setattr(OtherRank, "says_yes_at", 1)  # the first question: whether to begin at all
    monkeypatch.setattr(rank_context, "Consensus", OtherRank)
    with pytest.raises(Stopped, match="stopped after step 0 of 18"):
        training.train(prepared)


def test_a_divergence_of_another_process_is_ours(digits, tmp_path, monkeypatch):
    settings = settings_of(digits, tmp_path / "run", logs_per_epoch=6)
    monkeypatch.setattr(OtherRank, "says_yes_at", 3)  # begin? stop after step 1? did it diverge?
    monkeypatch.setattr(rank_context, "Consensus", OtherRank)
    with pytest.raises(DivergedError, match="step 1: the loss of another process was not finite"):
        training.train(prepare_new_run(settings, line="test"))


def test_a_stop_is_agreed_on_before_anything_is_saved(prepared, monkeypatch):
    asked = []

    class Counting(Consensus):
        def any(self, mine):
            asked.append(mine)
            return mine

    monkeypatch.setattr(rank_context, "Consensus", Counting)
    training.train(prepared)
    assert len(asked) > 18 and not any(asked)  # a question a step, and one to begin with


def test_a_failed_save_of_another_process_is_ours(prepared, monkeypatch):
    monkeypatch.setattr(OtherRank, "fails_at", 2)
    monkeypatch.setattr(rank_context, "Consensus", OtherRank)
    with pytest.raises(DiskError, match="rank 1: no space left"):
        training.train(prepared)


def test_the_state_holds_the_bare_model(digits, tmp_path):
    settings = settings_of(digits, tmp_path / "run")
    with Session(settings.config, plan_run(settings)[0]) as session:
        assert session.state.model is session.model
        assert all(
            not name.startswith(("module.", "_orig_mod.")) for name in session.model.state_dict()
        )
        assert isinstance(session.model.conv1, torch.nn.Conv2d)


def test_a_first_layer_is_taken_from_the_training_images(digits, tmp_path):
    options = {"model": "airbench94", "image_size": 20, "steps": 2, "ckpts_per_epoch": 6}
    prepared = prepare_new_run(settings_of(digits, tmp_path / "run", **options), line="test")
    with Session(prepared.config, prepared.plan) as session:
        pixels = session.model.whitening.weight.clone()
        state = session.state
        filters = session.model.whitening.weight
        assert filters.shape == pixels.shape and not torch.allclose(filters, pixels)
        rows = session.model.whitening(session.feed.sample_images(500))[:, :4]
        seen = rows.permute(1, 0, 2, 3).flatten(1)
        assert torch.allclose(seen.square().mean(1), torch.ones(4), atol=0.05)
        taken = filters.clone()
        session.train_step(next(session.feed.batches_from(0)), 0.1)
        assert torch.equal(state.model.whitening.weight, taken)


def test_weights_to_start_from_bring_their_first_layer(digits, tmp_path):
    options = {"model": "airbench94", "image_size": 20, "steps": 1}
    assert main(small_run(digits, tmp_path / "run", **options)) == 0
    last = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    weights = load_file(last / "weights.safetensors")
    weights["whitening.weight"][0] = 0.5  # which no images would give
    save_file(weights, tmp_path / "weights.safetensors")
    init = {"init_weights": tmp_path / "weights.safetensors"}
    prepared = prepare_new_run(
        settings_of(digits, tmp_path / "other", **options, **init), line="test"
    )
    with Session(prepared.config, prepared.plan) as session:
        assert session.state.step == 0
        assert torch.equal(session.model.whitening.weight, weights["whitening.weight"])


def test_biases_of_norms_get_the_rate_that_was_asked_for(digits, tmp_path):
    prepared = prepare_new_run(
        settings_of(digits, tmp_path / "run", norm_bias_lr_scale=4, steps=1), line="test"
    )
    with Session(prepared.config, prepared.plan) as session:
        *others, biases = session.state.optimizer.param_groups
        names = {id(weight): name for name, weight in session.model.named_parameters()}
        assert biases["lr_scale"] == 4 and not any("lr_scale" in group for group in others)
        assert {names[id(weight)] for weight in biases["params"]} == {
            name for name in names.values() if ".bn" in f".{name}" and name.endswith("bias")
        }
