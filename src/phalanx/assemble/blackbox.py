"""blackbox.json: the last steps of a run that ended badly, and where a replay of them begins.

It is put together when a run fails, from what is written down anyway; a sound step costs nothing.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.assemble.fork import first_step
from phalanx.assemble.prepare import Prepared, Start, read_or_advise, refuse_other_weights
from phalanx.disk import remove_quietly, write_atomically
from phalanx.engine.checkpoint_store import list_checkpoints, read_facts, step_of
from phalanx.engine.dynamic_loss_scale import DynamicLossScale
from phalanx.errors import ConfigError, Stopped, UserError
from phalanx.plan.plan import Plan
from phalanx.report.folder import RunFolder, read_json_object, to_json
from phalanx.report.records import Records, read_metrics

if TYPE_CHECKING:
    from phalanx.assemble.feed import Feed
    from phalanx.engine.probe import NonFiniteFinding, Probe
    from phalanx.engine.state import StepNumbers, TrainState

_BLACKBOX, _FORMAT = "blackbox.json", 1
LAST = 64  # steps that are kept
_SHOWN = 4  # images that a line names
_ALWAYS = ("seed", "determinism", "precision", "model", "data")  # others where somebody set them


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A training image of a step."""

    position: int  # in the training stream
    name: str
    label: str | None  # the class; None for noise


def images_at(step: int, feed: "Feed", prepared: Prepared) -> list[Placed]:
    """The images of a step, counted from 1; for one that could not be read, what stood in."""
    loader = getattr(feed, "loader", None)
    if loader is None:  # noise: the same for every pass
        plan = prepared.plan
        start = (step - 1) * plan.global_batch
        return [
            Placed(position=start + row, name=f"synthetic[{row % plan.micro_batch}]", label=None)
            for row in range(plan.global_batch)
        ]
    order, source = loader.spec.order, loader.source("train")
    positions = order.positions(step - 1)
    found = []
    for position, wanted in zip(positions.tolist(), order.indices(positions).tolist(), strict=True):
        index = _readable_from(wanted, loader.bad["train"], images=len(source))
        label = prepared.view.classes[int(source.labels[index])]
        found.append(Placed(position=position, name=source.name(index), label=label))
    return found


def _readable_from(index: int, bad: Mapping[int, str], *, images: int) -> int:
    """The image that stands in for one that could not be read: the next that can."""
    while index in bad:
        index = (index + 1) % images
    return index


def tell_images(images: Sequence[Placed]) -> str:
    """The first few images by name, label and place."""
    told = [
        f"{image.name} (label {image.label}, place {image.position:,} of the stream)"
        for image in images[:_SHOWN]
    ]
    more = f" and {len(images) - _SHOWN:,} more" if len(images) > _SHOWN else ""
    return ", ".join(told) + more


def account_of(finding: "NonFiniteFinding", images: Sequence[Placed]) -> dict[str, Any]:
    """A finding as plain values, with the images of the step it was seen with."""
    seen = [asdict(images[row]) for row in finding.rows]
    return {
        "what": finding.what,
        "name": finding.name,
        "sound_weights": finding.sound_weights,
        "images": seen,
    }


@dataclass
class DivergenceDiagnosis:
    """Says where an unsound step began, as a probe saw it or how to find out, and what to do."""

    prepared: Prepared
    state: "TrainState"
    feed: "Feed"
    probe: "Probe | None"
    account: dict[str, Any] | None = None  # of the step that was blamed

    def __call__(self, loss: float, grad_norm: float) -> str:
        """Words for a person, on the step that was just made."""
        return f"{self._cause(loss, grad_norm)}. Nothing of it was saved: {self._way_out()}"

    def _way_out(self) -> str:
        # one that is being written has its name only later
        kept = any(self.prepared.run.checkpoints.glob("*step-*"))
        fork = ", or fork the last checkpoint," if kept else ""
        return f"start again{fork} with a lower --lr or a longer --warmup-epoch"

    def _cause(self, loss: float, grad_norm: float) -> str:
        finding = self.probe and self.probe.find(loss, grad_norm)
        if not finding:
            return f"phalanx replay {self.prepared.run.path} names the module and the image"
        images = images_at(self.state.step, self.feed, self.prepared)
        self.account = account_of(finding, images)
        seen = [images[row] for row in finding.rows]
        return finding.describe() + (f", for {tell_images(seen)}" if seen else "")


def loss_scale_of(step: int, plan: Plan, scaler: DynamicLossScale | None) -> float:
    """The loss scale a step was made with, counted from 1."""
    if scaler is None:
        return plan.loss_scale.at(step - 1)
    earlier = [scale for changed, scale in scaler.history if changed < step]
    return earlier[-1] if earlier else plan.loss_scale.at(0)


def _is_sound(entry: dict[str, Any]) -> bool:
    """Whether the numbers of a line of metrics.jsonl are finite; a norm left out was."""
    return all(isfinite(float(entry[name] or 0)) for name in ("loss", "grad_norm"))


def last_steps(folder: Path) -> list[dict[str, Any]]:
    """The last steps in metrics.jsonl; none after the first that is not sound."""
    last: deque[dict[str, Any]] = deque(maxlen=LAST)
    for entry in read_metrics(folder, scores=False):
        last.append(entry)
        if not _is_sound(entry):
            break
    return list(last)


@dataclass(frozen=True, kw_only=True)
class Recorder:
    """Writes the black box of a run, should it need one."""

    prepared: Prepared
    state: "TrainState"
    feed: "Feed"
    records: Records
    unread: "Callable[[], list[StepNumbers]]"  # the numbers of the steps that nobody has read yet
    write_steps: "Callable[[int, list[StepNumbers]], None]"  # puts them into the records
    blame: DivergenceDiagnosis

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A block whose failure leaves a black box; one of an earlier failure is taken away."""
        remove_quietly(self.prepared.run.path / _BLACKBOX)
        begun_at = self.state.step
        try:
            yield
        except Stopped:  # all is saved
            raise
        except Exception as failure:
            with suppress(UserError):  # what went wrong first is what must be told
                self._write(failure, begun_at)
            raise

    def _write(self, failure: Exception, begun_at: int) -> None:
        run, plan = self.prepared.run, self.prepared.plan
        rows = self._catch_up(begun_at)
        unsound = bool(rows) and not _is_sound(rows[-1])
        done = rows[-1]["step"] if rows else begun_at
        step = done if unsound else done + 1
        scaler, settings = self.state.scaler, self.prepared.settings
        options = settings.config.flat()
        chosen = [
            name for name in options if name in _ALWAYS or settings.origins[name] != "default"
        ]
        box = {
            "format": _FORMAT,
            "step": step if step <= plan.total_steps else None,
            "unsound": unsound,
            "why": f"{type(failure).__name__}: {failure}",
            "cause": self.blame.account,
            "checkpoint": _tell_checkpoint(run, step),
            "seed": settings.config.train.seed,
            "device": plan.device,
            "precision": plan.precision,
            "threads": plan.threads,
            "options": {name: options[name] for name in chosen},
            "images": self._images(step),
            "steps": [
                {**row, "loss_scale": loss_scale_of(row["step"], plan, scaler)} for row in rows
            ],
        }
        write_atomically(run.path / _BLACKBOX, to_json(box))

    def _catch_up(self, begun_at: int) -> list[dict[str, Any]]:
        """The last steps, with those that the failure left unread."""
        folder = self.prepared.run.path
        self.records.flush()
        known = last_steps(folder)
        with suppress(RuntimeError):  # a device that broke gives no numbers
            self.write_steps(known[-1]["step"] + 1 if known else begun_at + 1, self.unread())
        self.records.flush()
        return last_steps(folder)

    def _images(self, step: int) -> list[dict[str, Any]]:
        if step > self.prepared.plan.total_steps:
            return []
        return [asdict(image) for image in images_at(step, self.feed, self.prepared)]


def _checkpoint_before(run: RunFolder, step: int) -> Path | None:
    """The run's newest checkpoint that stands before a step."""
    earlier = [path for path in list_checkpoints(run.checkpoints) if step_of(path) < step]
    return earlier[-1] if earlier else None


def _tell_checkpoint(run: RunFolder, step: int) -> str | None:
    """Where a replay of a step begins: within the run, with its parent, or (None) at the start."""
    own, parent = _checkpoint_before(run, step), run.facts["parent"]
    if own is not None:
        return str(own.relative_to(run.path))
    return None if parent is None else str(parent["checkpoint"])


def _start_before(run: RunFolder, step: int) -> Start | None:
    """Where a replay of a step begins, read and checked; None for the first weights."""
    own, parent = _checkpoint_before(run, step), run.facts["parent"]
    if own is not None:
        return Start(checkpoint=own, facts=read_or_advise(own, run), forked=False)
    if parent is None:
        return None
    checkpoint = Path(parent["checkpoint"])
    return Start(checkpoint=checkpoint, facts=read_facts(checkpoint), forked=True)


def _failing_step(run: RunFolder) -> int | None:
    """The step a run failed at: as its black box says, or its metrics; None if it did not."""
    box = run.path / _BLACKBOX
    if box.exists():
        step = read_json_object(box).get("step")
        return int(step) if step is not None else None
    last = last_steps(run.path)[-1:]
    return next((int(entry["step"]) for entry in last if not _is_sound(entry)), None)


def prepare_replay(prepared: Prepared, step: int | None) -> tuple[Prepared, int]:
    """A run as it stood at or before a step, and the step; without one, where it failed."""
    run, total = prepared.run, prepared.plan.total_steps
    wanted = _failing_step(run) if step is None else step
    if wanted is None:
        raise ConfigError(
            f"{run.path}: no step of it failed, so there is none to repeat; name one of its "
            f"{total:,} steps, as in: phalanx replay {run.path} --step {min(10, total)}"
        )
    if not 1 <= wanted <= total:
        raise ConfigError(f"--step {wanted}: the run has {total:,} steps; give one of 1 to {total}")
    start = _start_before(run, wanted)
    if start is None:
        refuse_other_weights(run, prepared.config)
    elif start.forked and first_step(prepared.plan, start) >= wanted:
        begin = first_step(prepared.plan, start) + 1
        raise ConfigError(f"--step {wanted}: the run is a fork whose first step is {begin:,}")
    return replace(prepared, start=start), wanted
