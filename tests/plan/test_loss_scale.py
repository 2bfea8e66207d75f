"""The loss scale that follows a plan, against the published example and a plain reference."""

import math
from fractions import Fraction

import pytest

from phalanx.config.read import read_settings
from phalanx.config.schema import Config
from phalanx.config.train_options import LossConfig
from phalanx.errors import ConfigError
from phalanx.plan.loss_scale import LossScale, list_doubling_problems, make_loss_scale


def scale(
    initial: float | None,
    final: float,
    epochs: object,
    per_epoch: object = 10,
    *,
    automatic: bool = False,
) -> LossScale:
    loss = LossConfig(initial_loss_scaling=initial, loss_scaling=final, auto_loss_scaling=automatic)
    return make_loss_scale(
        Config(loss=loss),
        precision="16.32",
        epochs=Fraction(str(epochs)),
        steps_per_epoch=Fraction(str(per_epoch)),
    )


def by_epoch(initial: float, final: float, epochs: int) -> dict[int, float]:
    """PyTorch Lightning's rule, for epochs from 1: at i * (E // n) + 1 it becomes ILS * 2^i."""
    stages = int(math.log2(final // initial)) + 1
    starts = {i * (epochs // stages) + 1: initial * 2**i for i in range(stages)}
    found, now = {}, initial
    for epoch in range(1, epochs + 1):
        now = starts.get(epoch, now)
        found[epoch] = now
    return found


def test_the_example_of_a_hundred_epochs():
    # PyTorch Lightning: epochs 1-25 at 16, 26-50 at 32, 51-75 at 64, 76-100 at 128
    planned = scale(16, 128, 100, 781)
    stages = {(1, 25): 16, (26, 50): 32, (51, 75): 64, (76, 100): 128}
    for (first, last), value in stages.items():
        assert planned.at((first - 1) * 781) == planned.at(last * 781 - 1) == value


@pytest.mark.parametrize("epochs", [4, 5, 10, 11, 90, 100])
@pytest.mark.parametrize("final", [16, 32, 128])
def test_every_epoch_has_the_scale_of_the_formula(epochs, final):
    planned = scale(16, final, epochs)
    for epoch, value in by_epoch(16, final, epochs).items():
        steps = range((epoch - 1) * 10, epoch * 10)
        assert {planned.at(step) for step in steps} == {value}, epoch


def test_a_run_of_few_epochs_still_reaches_the_last_scale():
    planned = scale(16, 128, 2, 10)
    assert [planned.at(step) for step in range(20)] == [16] * 5 + [32] * 5 + [64] * 5 + [128] * 5


def test_epochs_that_end_between_steps():
    planned = scale(1, 2, 4, "10/3")  # the second stage begins at step 6 2/3
    assert [planned.at(step) for step in (0, 6, 7, 13)] == [1, 1, 2, 2]


def test_a_length_that_is_no_whole_number_of_epochs():
    planned = scale(1, 2, "5.5", 10)
    assert [planned.at(step) for step in (19, 20, 54, 99)] == [1, 2, 2, 2]


def test_one_scale_stays():
    for planned in (scale(None, 128, 10), scale(128, 128, 10)):
        assert {planned.at(step) for step in range(150)} == {128.0}


@pytest.mark.parametrize(
    ("initial", "final", "said"),
    [
        (
            16,
            100,
            "--loss-scaling: doubling from 16 gives 64 and 128, never 100; "
            "give one of them, or another --initial-loss-scaling",
        ),
        (
            128,
            16,
            "--initial-loss-scaling: 128 is more than --loss-scaling 16, and it only grows; "
            "swap them, or leave the initial one out",
        ),
    ],
)
def test_scales_that_cannot_be(initial, final, said):
    assert list_doubling_problems(initial, final) == [said]
    with pytest.raises(ConfigError) as caught:
        scale(initial, final, 10)
    assert str(caught.value) == said


@pytest.mark.parametrize("option", ["loss-scaling", "initial-loss-scaling"])
@pytest.mark.parametrize("number", ["0", "-1"])
def test_a_scale_that_would_wipe_out_the_loss_is_refused(option, number):
    with pytest.raises(ConfigError, match=f"--{option}: must be at least 5.96.*e-08, got {number}"):
        read_settings("demo", {option: number})


@pytest.mark.parametrize(("initial", "final"), [(None, 1), (3, 96), (0.5, 1024), (7, 7)])
def test_scales_that_can_be(initial, final):
    assert list_doubling_problems(initial, final) == []
    assert scale(initial, final, 100).at(999) == final


@pytest.mark.parametrize(("final", "first"), [(1, 65536), (128, 128), (0.5, 0.5)])
def test_an_automatic_scale_begins_where_told_else_at_65536(final, first):
    planned = scale(None, final, 8, automatic=True)
    assert planned.automatic and {planned.at(step) for step in (0, 79)} == {first}
    assert planned.changes(80) == ((0, first),)
    assert not scale(None, final, 8).automatic
