"""Whatever the parts of a plan refuse is told together, with where it was said."""

from pathlib import Path

import pytest

from phalanx.config.read import read_settings
from phalanx.errors import ConfigError, DataError, ProblemCollector
from phalanx.plan.machine_choice import MachineChoice
from phalanx.plan.plan import DatasetCounts, make_plan

FACTS = DatasetCounts(train_images=8000, valid_images=1500, classes=10)
CPU = MachineChoice(device="cpu", precision="32.32", threads=1)
WRONG = {
    "warmup-epoch": "20",
    "logs-per-epoch": "1/3",
    "lr-schedule": "step",
    "auto-loss-scaling": "true",
    "initial-loss-scaling": "8",
    "enable-recompute": "true",
    "recompute-checkpoints": "xx",
    "norm-type": "group",
    "norm-num-groups": "7",
    "progressive-resolution": "16:200ep",
}


def refused(preset: str, flags: dict[str, str]) -> list[str]:
    settings = read_settings(preset, flags)
    with pytest.raises(ConfigError) as caught:
        make_plan(settings.config, FACTS, CPU, locations=settings.locations)
    return str(caught.value).splitlines()


def test_every_part_that_cannot_be_is_told():
    first, *lines = refused("demo", WRONG)
    assert first == "8 problems:"
    begins = [
        "--progressive-resolution 16:200ep: lasts",
        "--norm-num-groups 7: ",
        "--warmup-epoch: 20ep is 2500 steps",
        "--lr-schedule step: nothing says",
        "--auto-loss-scaling: 32-bit",
        "--auto-loss-scaling and --initial-loss-scaling",
        "--logs-per-epoch 1/3: ",
        "--recompute-checkpoints: no module",
    ]
    for line, begin in zip(lines, begins, strict=True):
        assert line.startswith(f"  {begin}")


def test_a_scale_that_cannot_be_is_told_with_the_others():
    first, *lines = refused("demo", {"initial-loss-scaling": "8", "warmup-epoch": "20"})
    assert first == "2 problems:" and "--initial-loss-scaling: 8 is more than" in lines[1]


def test_one_problem_stands_alone_and_the_length_comes_first():
    (line,) = refused("demo", {"warmup-epoch": "20"})
    assert line.startswith("--warmup-epoch: 20ep is 2500 steps, longer than the run of 1000; ")
    (line,) = refused("demo", {**WRONG, "epochs": "0.001"})
    assert line.startswith("--epochs: 0.001 epochs of 125 steps are less than one step")


def test_problems_name_the_line_of_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("extends: demo\nwarmup-epoch: 20\nlr_schedule: step\n")
    _, *lines = refused("mine.yaml", {"logs-per-epoch": "1/3"})
    assert lines[0].startswith("  mine.yaml:2: warmup-epoch: 20ep is 2500 steps")
    assert lines[1].startswith("  mine.yaml:3: lr_schedule step: nothing says")
    assert lines[2].startswith("  --logs-per-epoch 1/3: cannot log")


def test_other_errors_are_not_held_back():
    problems = ProblemCollector({})
    with pytest.raises(DataError), problems.collect():
        raise DataError("no such folder")
    problems.refuse()
