"""Options that a run does not look at are told, and only those."""

import pytest

from phalanx.catalog.datasets import DATASETS
from phalanx.config.presets import our_folder
from phalanx.config.read import read_settings
from phalanx.config.schema import OPTIONS
from phalanx.plan.idle_options import USES, warn_of_idle_options
from phalanx.plan.plan import DatasetCounts, MachineChoice, choose_machine, make_plan

FACTS = DatasetCounts(train_images=50_000, valid_images=10_000, classes=10)
IDLE = [
    ("momentum", "0.5", {"optimizer": "adamw"}, {"optimizer": "nesterov"}),
    ("momentum", "0.5", {"optimizer": "lamb"}, {"optimizer": "rmsprop_tf"}),
    ("trust-coefficient", "0.01", {"optimizer": "lamb"}, {"optimizer": "lars"}),
    ("trust-decay", "0.01", {}, {"optimizer": "lamb"}),
    ("rmsprop-decay", "0.9", {}, {"optimizer": "rmsprop"}),
    ("rmsprop-start", "0", {"optimizer": "rmsprop"}, {"optimizer": "rmsprop_tf"}),
    ("adam-betas", "0.8,0.9", {}, {"optimizer": "lamb"}),
    ("loss-velocity-scaling-ratio", "2", {}, {"optimizer": "sgd_combined"}),
    ("smoothing-over", "others", {}, {"label-smoothing": "0.1"}),
    ("lr-batch", "pass", {}, {"lr-per-image": "0.001"}),
    ("half-type", "float16", {"precision": "32.32"}, {"precision": "16.32", "loss-scaling": "2"}),
    ("full-precision-norm", "true", {"precision": "32.32"}, {"precision": "16.32"}),
    ("half-partials", "true", {"precision": "32.32"}, {"precision": "16.16"}),
    ("recompute-checkpoints", "conv", {}, {"enable-recompute": "true"}),
]


def notes(**flags: str) -> tuple[str, ...]:
    config = read_settings("demo", flags).config
    return make_plan(config, FACTS, choose_machine(config)).warnings


@pytest.mark.parametrize(("name", "value", "idle", "used"), IDLE)
def test_what_changes_nothing_is_told_and_what_counts_is_not(name, value, idle, used):
    (note,) = notes(**{name: value}, **idle)
    assert note.startswith(f"--{name} has no effect with")
    assert notes(**{name: value}, **used) == ()
    default = OPTIONS[name].default
    if default is not None:
        assert notes(**{name: str(default)}, **idle) == (), "its own value is not told"


def test_every_row_is_tried():
    assert {use.name for use in USES} | {"lr-batch"} == {name for name, *_ in IDLE}


def test_a_note_says_what_keeps_the_option_from_counting():
    assert notes(**{"trust-decay": "0.1"}) == (
        "--trust-decay has no effect with --optimizer sgd, only with lars and lamb",
    )
    assert notes(**{"smoothing-over": "others"}) == (
        "--smoothing-over has no effect without --label-smoothing",
    )


@pytest.mark.parametrize("name", sorted(path.stem for path in our_folder().glob("*.yaml")))
def test_no_preset_of_ours_has_an_option_that_changes_nothing(name):
    config = read_settings(name).config
    dataset = DATASETS[config.data.data]
    facts = DatasetCounts(
        train_images=dataset.train_images or 1_281_167, valid_images=50_000, classes=1000
    )
    told = make_plan(config, facts, choose_machine(config)).warnings
    assert not [note for note in told if "no effect" in note]
    bits = "16.32" if config.machine.precision == "auto" else config.machine.precision
    gpu = MachineChoice(device="cuda", precision=bits, threads=1)
    told = make_plan(config, facts, gpu).warnings
    assert not [note for note in told if "no effect" in note]
    assert list(warn_of_idle_options(config, precision=bits)) == []
