"""How many checkpoints are averaged, and how fast a live average forgets."""

from pathlib import Path

import pytest

from phalanx.errors import ConfigError
from phalanx.plan.averaging import Averaging, ema_decay_at

SHELF = Path("runs/x/checkpoints")


@pytest.mark.parametrize(
    ("count", "there", "taken"),
    [(None, 3, 3), (None, 9, 5), (2, 9, 2), (9, 9, 9), (-1, 9, 9), (1, 1, 1)],
)
def test_the_last_few_checkpoints_are_taken(count, there, taken):
    assert Averaging(count=count).count_among(there, where=SHELF) == taken


@pytest.mark.parametrize(
    ("count", "there", "told"),
    [
        (
            5,
            3,
            "--weight-avg-n 5: runs/x/checkpoints holds 3 checkpoints to average, 5 are needed; "
            "give --weight-avg-n 3, or train with --keep 5 and a --ckpts-per-epoch that saves as "
            "many",
        ),
        (
            None,
            1,
            "runs/x/checkpoints holds 1 checkpoint to average, 2 are needed; train with --keep 2 "
            "and a --ckpts-per-epoch that saves as many",
        ),
    ],
)
def test_more_checkpoints_than_there_are_is_refused_with_the_way_out(count, there, told):
    with pytest.raises(ConfigError) as refusal:
        Averaging(count=count).count_among(there, where=SHELF)
    assert str(refusal.value) == told


def test_all_of_one_checkpoint_is_no_average():
    with pytest.raises(ConfigError, match="holds 1 checkpoint to average, 2 are needed"):
        Averaging(count=-1).count_among(1, where=SHELF)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"strategy": "means"}, "--weight-avg-strategy means: did you mean 'mean'"),
        ({"decay": 1.0}, "--weight-avg-exp-decay 1: expected a number from 0 to below 1"),
        ({"decay": float("nan")}, "--weight-avg-exp-decay nan: expected"),
        ({"count": 0}, "--weight-avg-n 0: expected 1 or more checkpoints, or -1 for all"),
        ({"norm_steps": -1}, "--reestimate-norms -1: expected 0 or more steps"),
    ],
)
def test_numbers_out_of_range_are_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        Averaging(**options)


def test_a_live_average_forgets_fast_at_first_and_never_faster_than_asked_later():
    assert ema_decay_at(0.999, 1) == 2 / 11
    assert ema_decay_at(0.999, 90) == 91 / 100
    assert ema_decay_at(0.999, 8990) == 8991 / 9000
    assert ema_decay_at(0.999, 10_000) == 0.999
    assert ema_decay_at(0.1, 1) == 0.1
