"""Every way to train resumes bit for bit, and does what its name says."""

import json
import shutil

import numpy as np
import pytest
import torch
from torch import nn

from phalanx.assemble.scoring_target import read_checkpoint
from phalanx.cli.main import main
from phalanx.engine.dynamic_loss_scale import GROWTH_INTERVAL, DynamicLossScale
from phalanx.engine.state import MetricSums, StepMetrics, TrainState
from phalanx.engine.step import MicroBatch
from phalanx.errors import DivergedError
from phalanx.optim.build import OPTIMIZERS, OptimSettings, build_optimizer
from phalanx.report.compare import compare_runs
from phalanx.report.folder import open_run
from phalanx.report.records import read_averaged_scores, read_logs, read_scores
from small_runs import read_result, small_run
from small_states import take_step

HALF = {"precision": "16.16", "enable_stochastic_rounding": "true"}
EVERYTHING = {**HALF, "half_type": "float16", "auto_loss_scaling": "true", "ema_decay": 0.9}
MODES = {
    **{name: {"optimizer": name, "lr": 0.01} for name in OPTIMIZERS},
    # what each rule remembers, in 16 bits, with an average and a loss scale that finds its size
    **{f"{name}, all": {**EVERYTHING, "optimizer": name, "lr": 0.001} for name in OPTIMIZERS},
    "l2": {"l2_regularization": 1e-3, "weight_decay": 0},
    "average": {"ema_decay": 0.9},
    "doubling": {"precision": "16.32", "initial_loss_scaling": 16, "loss_scaling": 64},
    "automatic": {"precision": "16.32", "auto_loss_scaling": "true"},
    "half": {**HALF, "ema_decay": 0.9},
    "half doubling": {**HALF, "initial_loss_scaling": 16, "loss_scaling": 64},
    "combined doubling": {
        "optimizer": "sgd_combined", "precision": "16.32",
        "initial_loss_scaling": 16, "loss_scaling": 64, "loss_velocity_scaling_ratio": 4,
    },
    "step": {"lr_schedule": "step", "lr_epoch_decay": "1,2", "lr_decay": 0.5},
    "clipped": {"clip_grad_norm": 0.5, "clip_grad_value": 0.01, "loss": "bce"},
}  # fmt: skip


def cut_after_first_checkpoint(run, copy):
    """The run as a kill right after its first checkpoint would leave it."""
    shutil.copytree(run, copy, symlinks=True)
    (copy / "summary.json").unlink()
    (copy / "checkpoints" / "best").unlink(missing_ok=True)
    for checkpoint in sorted((copy / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(checkpoint)


@pytest.mark.parametrize("mode", MODES)
def test_a_resume_ends_with_the_same_bits(digits, tmp_path, mode):
    check_resume(digits, tmp_path, **MODES[mode])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", MODES)
def test_a_strict_resume_on_a_gpu_ends_with_the_same_bits(digits, tmp_path, mode):
    strict = {"device": "cuda", "determinism": "strict"}
    check_resume(digits, tmp_path, **{"precision": "32.32", **MODES[mode], **strict})


def check_resume(digits, tmp_path, **options):
    """Train once, and once more from the first checkpoint of that."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(small_run(digits, whole, keep=9, seed=3, **options)) == 0
    cut_after_first_checkpoint(whole, cut)
    assert main(["train", "--resume", str(cut)]) == 0
    ours, theirs = read_result(cut), read_result(whole)
    for name in ("weights_sha256", "top1", "averaged_top1", "numerics"):
        assert ours[name] == theirs[name], name
    assert (cut / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    last = sorted((whole / "checkpoints").glob("step-*"))[-1].name
    for file in ("optimizer.safetensors", "average.safetensors"):
        pair = [run / "checkpoints" / last / file for run in (whole, cut)]
        assert pair[0].exists() == pair[1].exists()
        assert not pair[0].exists() or pair[0].read_bytes() == pair[1].read_bytes(), file


def test_modes_differ_in_what_they_learn(digits, tmp_path):
    hashes = set()
    for number, mode in enumerate(("sgd", "nesterov", "adamw", "l2", "clipped", "step")):
        run = tmp_path / str(number)
        assert main(small_run(digits, run, steps=4, **MODES[mode])) == 0
        hashes.add(read_result(run)["weights_sha256"])
    assert len(hashes) == 6


def test_averaged_weights_are_scored_beside_the_raw_ones(digits, tmp_path):
    run = tmp_path / "run"
    assert main(small_run(digits, run, ema_decay=0.5)) == 0
    averaged = read_averaged_scores(run)
    assert list(averaged) == [row.step for row in read_scores(run)] == [6, 12, 18]
    assert read_result(run)["averaged_top1"] == averaged[18].top1
    assert "averaged top-1" in (run / "report.html").read_text()


def test_16_bit_weights_are_16_bits_and_the_panel_tells_what_is_lost(digits, tmp_path):
    for name, options in (("by-chance", HALF), ("nearest", {"precision": "16.16"})):
        assert main(small_run(digits, tmp_path / name, steps=6, **options)) == 0
    chance, nearest = (read_result(tmp_path / n)["numerics"] for n in ("by-chance", "nearest"))
    assert 0 < chance["updates_lost"] < nearest["updates_lost"] < 1
    assert abs(chance["lost_to_rounding"]) < 0.01 and 0.05 < nearest["lost_to_rounding"] < 1
    page = (tmp_path / "nearest" / "report.html").read_text()
    assert f"{nearest['lost_to_rounding']:.2%} of the total change of the weights" in page
    checkpoint = next((tmp_path / "nearest" / "checkpoints").glob("step-*"))
    assert (checkpoint / "weights.safetensors").read_bytes().count(b'"BF16"') >= 8


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"auto_loss_scaling": "true", "precision": "32.32"}, "--auto-loss-scaling: 32-bit"),
        ({"lr_schedule": "step"}, "--lr-schedule step: nothing says where the rate falls"),
        ({"warmup_epoch": "9ep"}, "--warmup-epoch: 9ep is 54 steps, longer than the run of 18"),
        ({"lr_schedule": "step", "lr_epoch_decay": "2,1"}, "1ep follows 2ep but is not later"),
        (
            {"enable_recompute": "true", "recompute_checkpoints": "layer9/.*"},
            "--recompute-checkpoints",
        ),
        ({"lr": 0.1, "lr_per_image": 0.1}, "give only one of --lr, --lr-per-image, "),
        ({"validation_mode": "after", "ckpts_per_epoch": 0}, "no checkpoint to score"),
        ({"initial_loss_scaling": 128, "loss_scaling": 16}, "only grows; swap them"),
        ({"logs_per_epoch": "1/2"}, "--logs-per-epoch 1/2: cannot log 2 epochs at a time"),
        ({"optimizer": "rmsprop_tf", "optimizer_eps": 0, "rmsprop_start": 0}, "divides by zero"),
    ],
)
def test_impossible_pairs_are_refused_with_the_way_out(digits, tmp_path, capsys, options, told):
    assert main(small_run(digits, tmp_path / "run", **options)) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("patterns", [None, ".*conv.*", "layer1/0,layer2"])
def test_recomputing_changes_no_bit(digits, tmp_path, patterns):
    plain, spare = tmp_path / "plain", tmp_path / "spare"
    chosen = {} if patterns is None else {"recompute_checkpoints": patterns}
    assert main(small_run(digits, plain, steps=8)) == 0
    assert main(small_run(digits, spare, steps=8, enable_recompute="true", **chosen)) == 0
    assert read_result(plain)["weights_sha256"] == read_result(spare)["weights_sha256"]


def test_what_has_no_effect_is_said(digits, tmp_path, capsys):
    words = small_run(digits, tmp_path / "run", steps=2, enable_stochastic_rounding="true")
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "note: --enable-stochastic-rounding has no effect with --precision 32.32" in told


def test_validation_after_training_scores_every_checkpoint_and_then_prunes(digits, tmp_path):
    during, after = tmp_path / "during", tmp_path / "after"
    assert main(small_run(digits, during, keep=9, ckpts_per_epoch=1)) == 0
    assert main(small_run(digits, after, keep=1, ckpts_per_epoch=1, validation_mode="after")) == 0
    ours, theirs = read_scores(after), read_scores(during)
    assert [(row.step, row.top1) for row in ours] == [(row.step, row.top1) for row in theirs]
    assert read_result(after)["weights_sha256"] == read_result(during)["weights_sha256"]
    kept = {path.name for path in (after / "checkpoints").glob("step-*")}
    best = read_result(after)["best"]["step"]
    assert kept == {"step-00000018", f"step-{best:08}"}


def test_averaged_weights_are_scored_after_training_as_they_are_during_it(digits, tmp_path, capsys):
    during, after = tmp_path / "during", tmp_path / "after"
    options = {"keep": 9, "ckpts_per_epoch": 1, "ema_decay": 0.5}
    assert main(small_run(digits, during, **options)) == 0
    capsys.readouterr()
    assert main(small_run(digits, after, **options, validation_mode="after")) == 0
    assert capsys.readouterr().out.count("averaged weights: top-1") == 3
    assert (after / "averaged.csv").read_text() == (during / "averaged.csv").read_text()
    assert read_result(after)["averaged_top1"] == read_result(during)["averaged_top1"]
    assert read_result(after)["weights_sha256"] == read_result(during)["weights_sha256"]
    assert "averaged top-1" in (after / "report.html").read_text()
    # killed between the two scores of its first checkpoint
    lines = (after / "averaged.csv").read_text().splitlines(keepends=True)
    (after / "averaged.csv").write_text(lines[0])
    (after / "summary.json").unlink()
    assert main(["train", "--resume", str(after)]) == 0
    assert (after / "averaged.csv").read_text() == "".join(lines)


@pytest.mark.parametrize("options", [{"validation_mode": "none"}, {"validation": "false"}])
def test_nothing_is_scored_where_nothing_is_asked(digits, tmp_path, capsys, options):
    assert main(small_run(digits, tmp_path / "run", steps=6, **options)) == 0
    assert "nothing was scored" in capsys.readouterr().out
    assert read_scores(tmp_path / "run") == [] and read_result(tmp_path / "run")["top1"] is None


def test_without_training_what_is_there_is_scored(digits, tmp_path, capsys):
    run = tmp_path / "run"
    assert main([*small_run(digits, run, training="false"), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["step"] == 0 and not run.exists()
    assert "note: --run-dir has no effect with --training false, only with true\n" in printed.err
    assert main(small_run(digits, run, keep=9, ckpts_per_epoch=1)) == 0
    capsys.readouterr()
    assert main(["train", "--resume", str(run), "--training", "False", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["step"], one["top1"]) for one in found] == [
        (row.step, row.top1) for row in read_scores(run)
    ]


def test_validation_comes_as_often_as_told(digits, tmp_path):
    assert main(small_run(digits, tmp_path / "run", validation_frequency=2, epochs=4)) == 0
    assert [row.step for row in read_scores(tmp_path / "run")] == [12, 24]


@pytest.mark.draws
def test_metrics_can_be_left_out(digits, tmp_path):
    plain, bare = tmp_path / "plain", tmp_path / "bare"
    assert main(small_run(digits, plain)) == 0
    assert main(small_run(digits, bare, disable_metrics="true", device_iterations=4)) == 0
    assert read_result(plain)["weights_sha256"] == read_result(bare)["weights_sha256"]
    rows = [json.loads(line) for line in (bare / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert len(steps) == 18 and all(row["loss"] > 0 for row in steps)
    assert {(row["grad_norm"], row["top1"]) for row in steps} == {(None, None)}
    logs = read_logs(bare)
    assert logs and {(row.grad_norm, row.top1) for row in logs} == {(None, None)}
    said = [line for line in (bare / "log.txt").read_text().splitlines() if " lr " in line]
    assert said and not any("top-1" in line or "grad" in line for line in said)
    assert compare_runs(open_run(plain), open_run(bare)).divergence is None
    page = [(run / "report.html").read_text() for run in (plain, bare)]
    assert [text.count(">training</text>") for text in page] == [2, 1]


def test_without_metrics_a_divergence_is_seen_in_the_same_step(digits, tmp_path, capsys):
    told = []
    for name, switch in (("with", "false"), ("without", "true")):
        words = small_run(digits, tmp_path / name, lr=1e8, ckpts_per_epoch=0)
        assert main([*words, f"--disable-metrics={switch}"]) == DivergedError.exit_code
        told.append(capsys.readouterr().err.split("; its images")[0])
    assert told[0] == told[1] and "gradient norm nan" in told[0] and "loss nan" not in told[0]
    assert main(["replay", str(tmp_path / "without"), "--json"]) == DivergedError.exit_code
    again = json.loads(capsys.readouterr().out)
    assert f"step {again['step']}:" in told[0] and again["as_recorded"]


def test_a_log_point_with_unmeasured_steps_among_its_own_tells_no_mean():
    sums, found = MetricSums(), []
    for row in (StepMetrics(1.0, 2.0, 0.5), StepMetrics(3.0, 2.0, None)):
        sums.add(row)
        found.append((sums.loss, sums.mean(sums.grad_norm), sums.mean(sums.top1)))
    assert found == [(1.0, 2.0, 0.5), (4.0, None, None)]


def test_a_checkpoint_of_16_bits_is_scored_as_it_was(digits, tmp_path, capsys):
    assert main(small_run(digits, tmp_path / "run", **HALF)) == 0
    capsys.readouterr()
    assert main(["validate", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["top1"] == read_result(tmp_path / "run")["top1"]
    assert read_checkpoint(tmp_path / "run", {}).start.facts["config"]["precision"] == "16.16"


# --- one step ---


def tiny_state(**values) -> TrainState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).double()
    return TrainState(model, build_optimizer(model, OptimSettings(momentum=0.0)), **values)


def tiny_passes(scale=1.0):
    images = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(1)).double() * scale
    return [MicroBatch(images, torch.tensor([0, 1, 2, 0]), 0)]


def moved(state, **values) -> torch.Tensor:
    """How far a step of rate 1 moves the weights, all in one row."""
    before = torch.cat([w.detach().clone().flatten() for w in state.model.parameters()])
    take_step(state, tiny_passes(), **values)
    return torch.cat([w.detach().flatten() for w in state.model.parameters()]) - before


def test_a_loss_scale_changes_nothing_but_the_numbers_in_between():
    plain, scaled = (
        moved(tiny_state()),
        moved(tiny_state(), loss_scale=512),
    )
    assert torch.allclose(plain, scaled, rtol=1e-12)


def test_gradients_are_clipped_by_length_and_by_value():
    free = moved(tiny_state())
    short = moved(tiny_state(), clip_norm=0.1)
    assert short.norm() == pytest.approx(0.1, rel=1e-4)
    assert torch.allclose(short / short.norm(), free / free.norm())
    assert torch.allclose(moved(tiny_state(), clip_norm=1e6), free)
    cut = moved(tiny_state(), clip_value=0.05)
    assert torch.allclose(cut, free.clamp(-0.05, 0.05))
    assert cut.abs().max() == pytest.approx(0.05) and (cut != free).any()


def test_a_step_that_overflows_is_skipped_and_halves_the_scale():
    state = tiny_state(scaler=DynamicLossScale(scale=2.0**20))
    weights = [w.detach().clone() for w in state.model.parameters()]
    numbers = take_step(state, tiny_passes(1e305))
    assert all(torch.equal(w, b) for w, b in zip(state.model.parameters(), weights, strict=True))
    assert numbers[1] == 0 and state.step == 1
    assert state.scaler.scale == 2.0**19 and state.scaler.history == [(1, 2.0**19)]
    take_step(state, tiny_passes())
    assert state.scaler.finite_steps == 1 and state.scaler.skipped == 1
    assert not torch.equal(next(state.model.parameters()), weights[0])


def test_a_scale_grows_after_long_peace():
    scaler = DynamicLossScale(scale=4.0)
    for step in range(GROWTH_INTERVAL):
        scaler.record_finite_step(step)
    assert scaler.scale == 8.0 and scaler.history == [(GROWTH_INTERVAL - 1, 8.0)]


def test_the_tallies_of_a_state_survive_a_save():
    state = tiny_state(scaler=DynamicLossScale(scale=4.0))
    state.scaler.record_overflow(3)
    state.rounding_counts = torch.tensor([1, 2, 3, 4, 5, 0.1, 0.3], dtype=torch.float64)
    other = tiny_state(scaler=DynamicLossScale())
    other.load_dict(json.loads(json.dumps(state.to_dict())))
    assert other.scaler == state.scaler and np.array_equal(
        other.rounding_counts, state.rounding_counts
    )


def test_older_counts_went_without_the_ways():
    other = tiny_state()
    other.load_dict({**tiny_state().to_dict(), "counts": [1, 2, 3, 4, 5]})
    assert other.rounding_counts.tolist() == [1, 2, 3, 4, 5, 0, 0]


def test_a_fork_counts_its_own_skipped_steps_and_rounding(digits, tmp_path):
    run, fork = tmp_path / "run", tmp_path / "fork"
    options = {**HALF, "half_type": "float16", "auto_loss_scaling": "true"}
    assert main(small_run(digits, run, **options, loss_scaling=2**24)) == 0
    parent = read_result(run)
    assert parent["numerics"]["skipped_steps"] > 0
    assert main(["train", "--fork", str(run), "--run-dir", str(fork), "--epochs", "4"]) == 0
    numerics = read_result(fork)["numerics"]
    assert numerics["skipped_steps"] == 0
    scale = parent["numerics"]["loss_scales"][-1][1]
    assert numerics["loss_scales"] == [[parent["steps"], scale]]
    assert numerics != parent["numerics"]
