"""Sweeps for tests: files in a folder, and states that no training was needed for."""

import math
from pathlib import Path

from phalanx.sweep.check import read_sweep
from phalanx.sweep.proposals import propose_values
from phalanx.sweep.schema import SweepFile
from phalanx.sweep.state import SweepState, Trial, TrialScore

WIDE = """\
# rates and choices of the demo
preset: demo
options: {epochs: 4}
search:
  lr: {low: 0.02, high: 0.6, log: true}
  momentum: {low: 0.8, high: 0.95, step: 0.05}
  weight-decay: [1e-4, 5e-4, 1e-3]
trials: 12
"""


def write_sweep(folder: Path, text: str = WIDE, *, name: str = "rates") -> Path:
    """A file with that text."""
    path = folder / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def read_text(folder: Path, text: str = WIDE) -> SweepFile:
    """The sweep that a text describes."""
    return read_sweep(write_sweep(folder, text))


def top1_of(trial: Trial) -> float:
    """A made-up score: best near a rate of 0.15, a little better with a small decay."""
    lr = float(trial.values["lr"])
    decay = float(trial.values.get("weight-decay", 5e-4))
    return 0.87 - 0.2 * abs(math.log10(lr / 0.15)) - 20 * abs(decay - 5e-4)


def play(sweep: SweepFile, folder: Path, *, count: int | None = None) -> SweepState:
    """A state whose trials were proposed in turn and got made-up scores."""
    trials: list[Trial] = []
    for number in range(sweep.trials if count is None else count):
        trial = Trial(number=number, values=propose_values(sweep, trials), seconds=31.5 + number)
        trials.append(ended(trial))
    return SweepState(folder=folder, sweep=sweep, trials=tuple(trials))


def ended(trial: Trial) -> Trial:
    """What became of it: every fifth was pruned and every seventh diverged."""
    changes = {"state": "done", "exit_code": 0}
    length = 4
    if trial.number % 7 == 6:
        changes = {"state": "failed", "exit_code": 5, "reason": "diverged: step 5: loss nan"}
        length = 0
    elif trial.number % 5 == 4:
        changes = {"state": "pruned", "exit_code": 75}
        length = 2
    points = [point_of(trial, epoch) for epoch in range(1, length + 1)]
    return Trial(**{**vars(trial), **changes, "points": tuple(points)})


def point_of(trial: Trial, epoch: int) -> TrialScore:
    """One made-up validation."""
    score = top1_of(trial) - 0.1 / epoch
    bounds = (score - 0.02, score + 0.02)
    return TrialScore(step=100 * epoch, epoch=float(epoch), score=score, interval95=bounds)
