"""Replay: a step of a run once more, with an eye on every module. Writes nothing into the run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any

from phalanx.assemble.blackbox import Placed, account_of, images_at, loss_scale_of
from phalanx.assemble.build import build_state, prepare_torch, step_rule
from phalanx.assemble.dataset_summary import preprocessing_of, recipe_of
from phalanx.assemble.feed import Feed, normaliser_of, open_feed
from phalanx.assemble.prepare import Prepared
from phalanx.assemble.train import bring_to_start, step_with
from phalanx.engine.probe import NonFiniteFinding, Probe
from phalanx.engine.state import TrainState
from phalanx.report.records import json_number, read_metrics

_COMPARED = ("loss", "grad_norm", "top1")  # what a step gives, in its order


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a step gave when it was made again."""

    step: int
    began_at: int  # steps that were done where the replay began
    lr: float
    loss: float
    grad_norm: float
    top1: float
    loss_scale: float
    sound: bool
    as_recorded: bool | None  # whether metrics.jsonl has the same bits; None where it has none
    finding: NonFiniteFinding | None
    images: tuple[Placed, ...]  # of the whole step

    @property
    def seen_with(self) -> list[Placed]:
        """The images the finding was seen with."""
        return [self.images[row] for row in self.finding.rows] if self.finding else []

    def as_json(self) -> dict[str, Any]:
        """Plain values; a number that is not finite by its name."""
        numbers = {
            name: json_number(getattr(self, name))
            for name in ("lr", "loss", "grad_norm", "top1", "loss_scale")
        }
        return {
            "step": self.step,
            "began_at": self.began_at,
            **numbers,
            "sound": self.sound,
            "as_recorded": self.as_recorded,
            "finding": self.finding and account_of(self.finding, self.images),
            "images": [asdict(image) for image in self.images],
        }


def replay(prepared: Prepared, step: int) -> Replay:
    """Go from the run's start to a step as training did, and look at what that step gives."""
    plan = prepared.plan
    device = prepare_torch(plan)
    state = build_state(prepared.config, plan, device)
    bring_to_start(state, prepared)
    # whatever the run kept: metrics change no bit of a step
    began_at, rule = state.step, replace(step_rule(prepared.config, plan, device), metrics=True)
    train_step, probe = step_with(rule, plan), Probe(state.model)
    with _feed_of(prepared, state) as feed:
        batches = feed.batches_from(state.step)
        while state.step < step - 1:
            train_step(state, next(batches), plan.lr(state.step))
        numbers = step_with(rule, plan, probe)(state, next(batches), plan.lr(step - 1)).tolist()
        images = tuple(images_at(step, feed, prepared))
    loss, grad_norm, top1 = numbers  # the device was waited for
    finding = probe.find(loss, grad_norm)
    return Replay(
        step=step,
        began_at=began_at,
        lr=plan.lr(step - 1),
        loss=loss,
        grad_norm=grad_norm,
        top1=top1,
        loss_scale=loss_scale_of(step, plan, state.scaler),
        sound=isfinite(loss) and isfinite(grad_norm) and not _spoils_weights(finding, state),
        as_recorded=_compare_with_record(prepared, step, numbers),
        finding=finding,
        images=images,
    )


@contextmanager
def _feed_of(prepared: Prepared, state: TrainState) -> Iterator[Feed]:
    """The run's own source of batches."""
    config, plan = prepared.config, prepared.plan
    device = next(state.model.parameters()).device
    normaliser = normaliser_of(preprocessing_of(config, plan), device, config)
    with open_feed(recipe_of(config, plan), plan, normaliser, config) as feed:
        yield feed


def _spoils_weights(finding: NonFiniteFinding | None, state: TrainState) -> bool:
    """Whether an unsound gradient went into the weights; an automatic loss scale skips it."""
    return finding is not None and finding.what == "gradient" and state.scaler is None


def _compare_with_record(prepared: Prepared, step: int, numbers: list[float]) -> bool | None:
    """Whether the run's metrics hold these very numbers for the step; None if it has no line.

    What a run without metrics left out, or wrote as 0 in earlier releases, is no difference.
    """
    rows = read_metrics(prepared.run.path, scores=False)
    row = next((row for row in rows if row["step"] == step), None)
    if row is None:
        return None
    seen = dict(zip(_COMPARED, map(json_number, numbers), strict=True))
    if prepared.config.train.disable_metrics:
        return bool(row["loss"] == seen["loss"])
    return all(row[name] in (None, number) for name, number in seen.items())
