"""Short runs, forks and folders as a newcomer types them: what is trained, and what is said."""

import json

import pytest
import torch
from safetensors.torch import load_file

import phalanx
from phalanx.assemble.fork import describe_discarded_state, describe_fork, prepare_fork
from phalanx.assemble.prepare import StartingPoint, prepare_new_run, prepare_resume
from phalanx.cli.main import main
from phalanx.config.read import read_settings
from phalanx.errors import ConfigError
from phalanx.optim.build import OPTIMIZERS
from phalanx.report.summary import read_summary
from small_photos import write_photos
from small_runs import make_digits

pytestmark = pytest.mark.usefixtures("empty_folder")

SMALL = {"data": "mnist", "image-size": "12", "batch-size": "16", "device": "cpu"}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return make_digits(tmp_path_factory.mktemp("digits"), train=96, valid=20)


def prepare(digits, run_dir, **flags):
    """A run of mnist-resnet8 on disk: 5 epochs of 6 steps with a warm-up of 3, if not told else."""
    options = {**SMALL, "data-dir": str(digits), "run-dir": str(run_dir)}
    options |= {name.replace("_", "-"): str(value) for name, value in flags.items()}
    return prepare_new_run(read_settings(None, options), line="")


def test_a_run_finds_its_data_from_any_folder(digits, tmp_path, monkeypatch):
    monkeypatch.chdir(digits.parent)
    begun = prepare(digits.name, tmp_path / "run", steps=3)
    assert f"data-dir: {digits}\n" in begun.run.config_text
    resumed = prepare_resume(tmp_path / "run", {"data-dir": digits.name})
    assert resumed.config.data.data_dir == str(digits)
    text = begun.run.config_text.replace(f"data-dir: {digits}\n", f"data-dir: {digits.name}\n")
    begun.run.config.write_text(text)
    resumed = prepare_resume(tmp_path / "run", {})
    assert resumed.config.data.data_dir == str(digits), (
        "of a run that was begun by an older release"
    )
    assert resumed.settings.origins["data-dir"] == begun.settings.origins["data-dir"]
    monkeypatch.chdir(tmp_path)
    assert prepare(digits, tmp_path / "other", steps=3).dataset == begun.dataset


# --- a warm-up that was shortened ---


def test_a_resume_derives_the_same_schedule_from_what_was_stored(digits, tmp_path):
    begun = prepare(digits, tmp_path / "run", steps=3)
    assert (begun.plan.schedule.warmup, begun.plan.schedule.total) == (0, 3)
    assert "warmup-epoch: 0st\n" in begun.run.config_text
    resumed = prepare_resume(tmp_path / "run", {})
    assert resumed.plan.schedule == begun.plan.schedule
    assert resumed.settings.origins["warmup-epoch"] == "preset mnist-resnet8, shortened"


def test_an_older_run_keeps_the_warm_up_it_has(digits, tmp_path):
    begun = prepare(digits, tmp_path / "run", steps=6)
    text = begun.run.config_text.replace("warmup-epoch: 0.5ep", "warmup-epoch: 1ep")
    lines = [line for line in text.splitlines() if not line.startswith("lr-schedule-start")]
    assert "warmup-epoch: 1ep" in lines
    begun.run.config.write_text("\n".join(lines) + "\n")
    schedule = prepare_resume(tmp_path / "run", {}).plan.schedule
    assert (schedule.warmup, schedule.total, schedule.start) == (6, 6, 0), "all of the run"


# --- forks ---


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    run = tmp_path_factory.mktemp("trained") / "run"
    words = [f"--{name}={value}" for name, value in SMALL.items()]
    words += [f"--data-dir={digits}", f"--run-dir={run}", "--epochs=2", "--validation-mode=none"]
    assert main(["train", *words]) == 0
    return run


def test_a_fork_goes_on_with_its_schedule_or_starts_it_anew(trained, tmp_path):
    plans = {}
    for restarts, schedule in ((False, None), (True, "restart")):
        folder = tmp_path / f"{restarts}"
        flags = {"run-dir": str(folder), "epochs": "5"}
        prepared = prepare_fork(trained, flags, line="", schedule=schedule)
        plan = plans[restarts] = prepared.plan
        assert plan.total_steps == 30 and prepared.start.first_step(plan) == 12
        assert prepare_resume(folder, {}).plan.schedule == plan.schedule, "a resume has the same"
        said = describe_fork(plan, prepared.start)
        assert said.startswith("forked from run at step 12: the schedule ")
        anew = "restarts (--fork-schedule continue would continue it), 30 steps instead of 12, "
        on = "continues (--fork-schedule restart would restart it), 30 steps instead of 12, "
        assert (anew if restarts else on) in said
    on, anew = plans[False].schedule, plans[True].schedule
    assert on.lr(12) == pytest.approx(0.05 * 1.3090169943749475), "12 of 30 steps into a cosine"
    assert [anew.lr(12), anew.lr(13)] == [0.0, pytest.approx(0.1 * 0.9924 / 3, rel=1e-3)]
    assert anew.lr(29) < 1e-3 and (anew.start, anew.total, anew.warmup) == (12, 18, 3)


def test_a_schedule_that_starts_anew_fits_what_is_left(trained, tmp_path):
    flags = {"run-dir": str(tmp_path / "fork"), "steps": "14"}
    prepared = prepare_fork(trained, flags, line="", schedule="restart")
    assert prepared.plan.schedule.warmup == 0
    assert prepared.plan.warnings[0].startswith("the run's --warmup-epoch 0.5ep does not fit a run")


@pytest.mark.parametrize(
    "flags, schedule, said",
    [({}, "anew", "got 'anew'"), ({"lr-schedule-start": "1ep"}, "Restart", "given as well")],
)
def test_a_schedule_that_starts_neither_way_is_refused(trained, flags, schedule, said):
    with pytest.raises(ConfigError, match=f"--fork-schedule.* {said}"):
        phalanx.train(fork=trained, fork_schedule=schedule, epochs=5, **flags)
    with pytest.raises(ConfigError, match="--fork-schedule: goes with --fork"):
        phalanx.train(fork_schedule="restart")


def test_a_fork_of_other_steps_starts_anew_at_the_same_image(trained, tmp_path):
    flags = {"run-dir": str(tmp_path / "a"), "epochs": "5", "batch-size": "8"}
    first = prepare_fork(trained, flags, line="", schedule="restart")
    assert first.plan.schedule.start == first.start.first_step(first.plan) == 24


def test_a_fork_too_short_for_its_average_is_refused_before_it_trains(trained, tmp_path, capsys):
    flags = ["--epochs", "4", "--weight-avg-strategy", "mean", "--weight-avg-n"]
    fork = ["train", "--fork", str(trained), "--run-dir", str(tmp_path / "fork"), *flags]
    assert main([*fork, "4"]) == 2
    assert (
        "--weight-avg-strategy mean: 4 checkpoints are needed and the run makes 3; give "
        "--weight-avg-n 3, or a larger --ckpts-per-epoch"
    ) in capsys.readouterr().err
    assert not (tmp_path / "fork").exists()
    assert main([*fork, "3"]) == 0
    assert "mean of 3 checkpoints" in capsys.readouterr().out


def test_the_fork_says_which_it_is(trained, tmp_path, capsys):
    fork = ["train", "--fork", str(trained), "--run-dir", str(tmp_path / "fork"), "--steps", "13"]
    assert main([*fork, "--fork-schedule", "Restart"]) == 0
    assert "at step 12: the schedule restarts (" in capsys.readouterr().out
    assert main([*fork, "--fork-schedule", "again"]) == 2
    assert "--fork-schedule: expected continue or restart, got 'again'" in capsys.readouterr().err
    assert main(["train", "demo", "--fork-schedule", "restart"]) == 2
    assert "--fork-schedule: goes with --fork RUN; leave it out" in capsys.readouterr().err


def fork_by_one_step(parent, run, *words):
    """The optimizer's state that a fork begins with, and the one it has a step later."""
    last = int(max(path.name for path in (parent / "checkpoints").glob("step-*"))[-8:])
    new = ["--run-dir", str(run), "--steps", str(last + 1), "--warmup-epoch", "0"]
    assert main(["train", "--fork", str(parent), *new, *words]) == 0
    folders = [run / "checkpoints" / f"step-{step:08}" for step in (last, last + 1)]
    return [load_file(folder / "optimizer.safetensors") for folder in folders]


def find_slots(tensors):
    return {name.rpartition(":")[2] for name in tensors}


@pytest.mark.parametrize(
    "optimizer, slots",
    [
        ("rmsprop_tf", {"square_avg", "momentum_buffer"}),
        ("adamw", {"step", "exp_avg", "exp_avg_sq"}),
        ("sgd_combined", {"velocity", "velocity_scale"}),
    ],
)
def test_a_fork_to_another_optimizer_starts_its_state_afresh(
    trained, tmp_path, capsys, optimizer, slots
):
    words = ["--optimizer", optimizer, "--lr", "1e-6", "--loss-scaling", "1"]
    begun, after = fork_by_one_step(trained, tmp_path / "fork", *words)
    said = f"note: the optimizer's state starts afresh: {optimizer} has no use for that of sgd"
    assert said in capsys.readouterr().out
    assert begun == {} and find_slots(after) == slots
    run = tmp_path / "fork"
    assert said.removeprefix("note: ") in json.loads((run / "run.json").read_text())["notes"]


def test_optimizers_share_their_state_as_their_classes_do(trained):
    facts, config = {"config": {}}, read_settings("demo").config
    for then, before in OPTIMIZERS.items():
        facts["config"]["optimizer"] = then
        start = StartingPoint(checkpoint=trained, facts=facts, use="fork")
        for now, row in OPTIMIZERS.items():
            optim = config.optim.model_copy(update={"optimizer": now})
            said = describe_discarded_state(start, config.model_copy(update={"optim": optim}))
            assert bool(said) == (before.kind is not row.kind), (then, now)


def test_a_fork_with_the_same_velocity_keeps_it(trained, tmp_path, capsys):
    begun, _ = fork_by_one_step(trained, tmp_path / "fork", "--optimizer", "nesterov")
    assert "the optimizer's state" not in capsys.readouterr().out
    before = load_file(trained / "checkpoints" / "step-00000012" / "optimizer.safetensors")
    assert before and {*before} == {*begun}
    assert all(torch.equal(begun[name], tensor) for name, tensor in before.items())


def test_a_fork_can_begin_and_end_16_bits(trained, tmp_path):
    half, full = tmp_path / "half", tmp_path / "full"
    scaled = ["--half-type", "float16", "--auto-loss-scaling"]
    _, after = fork_by_one_step(trained, half, "--precision", "16.16", *scaled)
    assert torch.float16 in {tensor.dtype for tensor in after.values()}
    assert read_summary(half).numerics.loss_scales == ((12, 65536.0),)
    plain = ["--precision", "32.32", "--auto-loss-scaling=false"]
    begun, _ = fork_by_one_step(half, full, *plain)
    assert {tensor.dtype for tensor in begun.values()} == {torch.float32}
    facts = json.loads((full / "checkpoints" / "step-00000014" / "facts.json").read_text())
    assert facts["state"]["scaler"] is None and facts["state"]["counts"] is None


def test_a_schedule_begins_within_the_run():
    with pytest.raises(ConfigError, match=r"100st is step 100, and the run ends at 8; begin"):
        prepare_new_run(
            read_settings("demo", {"steps": "8", "lr-schedule-start": "100st"}), line=""
        )


# --- the end ---


def test_the_end_says_that_no_weights_were_kept(digits, tmp_path, capsys):
    words = [f"--{name}={value}" for name, value in SMALL.items()]
    words += [f"--data-dir={digits}", "--run-dir=run", "--steps=1", "--validation-mode=none"]
    assert main(["train", *words, "--ckpts-per-epoch=0"]) == 0
    first, *_, end, kept, _ = capsys.readouterr().out.splitlines()
    assert ", 1 step of " in first and end == "trained 1 step; nothing was scored"
    assert kept == (
        "no weights were kept, because of --ckpts-per-epoch 0; --ckpts-per-epoch 1 keeps them"
    )


def test_weights_that_were_kept_are_not_told_of(trained, capsys):
    assert main(["train", "--resume", str(trained)]) == 0
    assert "no weights" not in capsys.readouterr().out


def test_finetuning_random_weights_is_refused(tmp_path, capsys):
    write_photos(tmp_path / "photos")
    words = ["finetune-resnet50", "--data-dir", "photos", "--steps", "1", "--device", "cpu"]
    assert main(["train", *words]) == 2
    said = "finetune-resnet50: finetunes weights, and none are named; give --init-weights FILE, or"
    assert said in capsys.readouterr().err and not (tmp_path / "runs").exists()
    assert main(["plan", *words, "--no-memory"]) == 0
    assert f"note          train refuses this: {said}" in capsys.readouterr().out


# --- the plan ---


def test_the_plan_says_why_epochs_are_not_whole_and_how_high_the_rate_is(tmp_path, capsys):
    words = ["--batch-size", "2600", "--epochs", "3", "--device", "cpu", "--no-memory"]
    assert main(["plan", "demo", *words]) == 0
    out = capsys.readouterr().out
    assert (
        "length        9 steps = 2.925 epochs of 3.07692 steps; not 3, because the last 600 images "
        "fill no step of 2,600\n"
    ) in out
    assert "learning rate cosine from 0.15, highest 0.1455, warm-up 1 step\n" in out
    assert main(["plan", "demo", "--device", "cpu", "--no-memory"]) == 0
    out = capsys.readouterr().out
    assert "cosine from 0.15, warm-up 10 steps\n" in out and "not 8" not in out


# --- lists and folders ---


@pytest.mark.parametrize(
    ("words", "option", "value"),
    [
        ("plan demo --lr-schedule step --lr-epoch-decay 2 5 7", "lr-epoch-decay", "2,5,7"),
        ("plan --lr-schedule step --lr-epoch-decay 2 5 demo", "lr-epoch-decay", "2,5"),
        ("plan demo --lr-schedule step --lr-epoch-decay=2 5ep", "lr-epoch-decay", "2,5ep"),
        ("plan demo --lr-schedule step --lr-epoch-decay [2, 5, 7]", "lr-epoch-decay", "[2,5,7]"),
        ("plan demo --enable-recompute --recompute-checkpoints conv1 layer1",
         "recompute-checkpoints", "conv1,layer1"),
        ("plan --enable-recompute --recompute-checkpoints conv1 layer1 demo",
         "recompute-checkpoints", "conv1,layer1"),
        ("plan demo --adam-betas 0.8 0.9 --optimizer AdamW", "adam-betas", "0.8,0.9"),
        ("plan demo --crop-ratio 3/4 4/3", "crop-ratio", "3/4,4/3"),
        ("plan demo --progressive-resolution 16:30% 20:60%", "progressive-resolution",
         "16:30%,20:60%"),
        ("plan demo --at 0 5", "after step", "5: learning rate 0.0749954"),
    ],
)  # fmt: skip
def test_lists_take_the_words_that_follow(words, option, value, capsys):
    assert main([*words.split(), "--no-memory", "--origin", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("config        demo\n")
    assert [line for line in out.splitlines() if line.startswith(option) and value in line]


def test_devices_are_a_list(capsys):
    assert main(["plan", "demo", "--device", "cuda:0", "2", "--no-memory"]) == 0
    assert "device        cuda:0,2, " in capsys.readouterr().out


def test_a_word_that_is_no_module_is_no_plugin(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("phalanx.catalog.plugins._LOADED", {})  # later tests have no plugins
    for name in ("one", "two"):
        (tmp_path / f"{name}_of_mine.py").write_text("")
    assert main(["plan", "--plugin", "one_of_mine", "two_of_mine", "demo", "--no-memory"]) == 0
    assert main(["models", "ls", "--plugin", "one_of_mine", "lite"]) == 0
    assert "efficientnet_lite0" in capsys.readouterr().out


@pytest.mark.parametrize("splits", ["layer2/0,layer3/0", "layer2/0 layer3/0"])
def test_pipeline_splits_take_commas_or_spaces(splits, capsys):
    assert main(["models", "show", "resnet8", "--pipeline-splits", *splits.split()]) == 0
    assert capsys.readouterr().out.count("── stage ") == 3


def test_a_folder_is_looked_into_for_boxes_and_so_is_the_environments(
    tmp_path, monkeypatch, capsys
):
    write_photos(tmp_path / "photos")
    (tmp_path / "empty").mkdir()
    words = ["--steps", "1", "--no-memory", "--origin"]
    boxes = ["--data-dir", "photos", "--use-bbox-info"]
    assert main(["plan", *words, *boxes]) == 0
    assert "note          --use-bbox-info has no effect: no image of" in capsys.readouterr().out
    monkeypatch.setenv("DATA_DIR", "photos")
    assert main(["plan", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith("config        folder-resnet18\n")
    assert "photos         environment DATA_DIR\n" in out
    for preset in ("demo", "generated-resnet50"):
        assert main(["plan", preset, *words]) == 0
        assert "DATA_DIR" not in capsys.readouterr().out, "they have images of their own"
    monkeypatch.setenv("DATA_DIR", "empty")
    assert main(["plan", *words]) == 0
    assert (
        "note          DATA_DIR is empty, where no dataset was recognised: using the embedded one"
        in capsys.readouterr().out
    )
    monkeypatch.setenv("DATA_DIR", "nosuch")
    assert main(["plan", *words]) == 3
    assert "nosuch: no such folder; DATA_DIR names it; correct or" in capsys.readouterr().err
    assert main(["plan", "demo", *words]) == 0
    assert main(["plan", "--data-dir", "photos", *words]) == 0
