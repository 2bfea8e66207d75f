"""Repeats a step of a run and observes every module; writes nothing to the run folder."""

from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from phalanx.assemble.blackbox import find_first_nonfinite, finding_to_json, loss_scale_at
from phalanx.assemble.feed import LoadedFeed, StepImage
from phalanx.assemble.prepare import PreparedRun
from phalanx.assemble.session import Session
from phalanx.engine.checkpoint_store import list_checkpoints, parse_step
from phalanx.engine.probe import NonFiniteFinding, Probe
from phalanx.errors import CheckpointError
from phalanx.report.records import read_metrics, to_json_number

_COMPARED = ("loss", "grad_norm", "top1")  # the metrics of a step, in order


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The result of repeating a step."""

    step: int
    began_at: int  # number of steps done before the replay started
    lr: float
    loss: float
    grad_norm: float
    top1: float
    loss_scale: float
    is_finite: bool
    as_recorded: bool | None  # whether metrics.jsonl has the same bits; None if it has no such line
    finding: NonFiniteFinding | None
    images: tuple[StepImage, ...]  # of the whole step

    @property
    def affected_images(self) -> list[StepImage]:
        """The images affected by the finding."""
        return [self.images[row] for row in self.finding.rows] if self.finding else []

    def to_dict(self) -> dict[str, Any]:
        """Plain values; a number that is not finite as text."""
        numbers = {
            name: to_json_number(getattr(self, name))
            for name in ("lr", "loss", "grad_norm", "top1", "loss_scale")
        }
        return {
            "step": self.step,
            "began_at": self.began_at,
            **numbers,
            "sound": self.is_finite,
            "as_recorded": self.as_recorded,
            "finding": self.finding and finding_to_json(self.finding, self.images),
            "images": [image._asdict() for image in self.images],
        }


def replay(prepared: PreparedRun, step: int) -> Replay:
    """Train from the run's starting point to a step, as before, and observe that step."""
    # a CUDA graph gives the same bits, but its modules cannot be observed
    plain = prepared.plan.acceleration._replace(graph=False)
    plan = replace(prepared.plan, acceleration=plain)
    # even if the run had no metrics: they do not change a bit of the step
    config = prepared.config.replace_options({"disable-metrics": False})
    folder = prepared.run.path  # stores the run's choice of kernels
    start, check = prepared.start, prepared.image_check
    with Session(config, plan, start=start, folder=folder, image_check=check) as session:
        state, probe = session.state, Probe(session.model)
        if isinstance(session.feed, LoadedFeed):  # a GPU would not find out
            session.feed.loader.restore_bad(prepared.findings.get("bad_images", {}))
        began_at, batches = state.step, session.feed.batches_from(state.step)
        while state.step < step - 1:
            session.train_step(next(batches), plan.lr(state.step))
        metrics = session.train_step(next(batches), plan.lr(step - 1), probe=probe).tolist()
        images = tuple(session.feed.list_step_images(step))
    loss, grad_norm, top1 = metrics  # tolist has waited for the device
    finding = find_first_nonfinite(
        probe.find_nonfinite(loss, grad_norm), session.rank_context, plan
    )
    # with an automatic loss scale such a step is skipped
    spoilt = finding is not None and finding.what == "gradient" and state.scaler is None
    return Replay(
        step=step,
        began_at=began_at,
        lr=plan.lr(step - 1),
        loss=loss,
        grad_norm=grad_norm,
        top1=top1,
        loss_scale=loss_scale_at(step, plan, state.scaler),
        is_finite=isfinite(loss) and isfinite(grad_norm) and not spoilt,
        as_recorded=_compare_with_record(prepared, step, metrics),
        finding=finding,
        images=images,
    )


def _compare_with_record(prepared: PreparedRun, step: int, metrics: list[float]) -> bool | None:
    """Whether the run's metrics of the step equal these; None if it has no line.

    Values that a run without metrics left out, or wrote as 0 in earlier releases, are ignored.
    """
    run = prepared.run
    rows = {row["step"]: row for row in read_metrics(run.path, scores=False)}
    saved = [parse_step(path) for path in list_checkpoints(run.checkpoints)]
    presumed = min(step, saved[-1]) if saved else 0
    if presumed and presumed not in rows and run.facts["parent"] is None:
        raise CheckpointError(
            f"{run.path}: metrics.jsonl lacks step {presumed:,}, though a checkpoint was saved "
            "after that; restore the records from a copy"
        )
    row = rows.get(step)
    if row is None:
        return None
    seen = dict(zip(_COMPARED, map(to_json_number, metrics), strict=True))
    if prepared.config.train.disable_metrics:
        return bool(row["loss"] == seen["loss"])
    return all(row[name] in (None, number) for name, number in seen.items())
