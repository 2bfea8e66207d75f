"""blackbox.json: the last steps of a run that failed, and where a replay of them starts.

It is made when a run fails, from records that are written anyway; a step that succeeds costs
nothing. So is the report of such a run.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.assemble.prepare import PreparedRun, find_starting_point, refuse_other_weights
from phalanx.disk import remove_quietly, write_atomically
from phalanx.engine.checkpoint_store import list_checkpoints, parse_step
from phalanx.engine.dynamic_loss_scale import DynamicLossScale
from phalanx.errors import ConfigError, NetworkError, Stopped, UserError
from phalanx.plan.plan import Plan
from phalanx.report.folder import RunFolder, format_json, read_json_object
from phalanx.report.records import Records, read_metrics
from phalanx.report.report_page import write_report
from phalanx.report.terminal import escape_name
from phalanx.units import format_plural, format_some

if TYPE_CHECKING:
    from phalanx.assemble.feed import StepImage
    from phalanx.assemble.rank_context import RankContext
    from phalanx.assemble.session import Session
    from phalanx.engine.fused_update import DeviceLossScale
    from phalanx.engine.probe import NonFiniteFinding, Probe
    from phalanx.engine.state import StepMetrics

_BLACKBOX, _FORMAT = "blackbox.json", 1
LAST_STEPS = 64  # steps to keep
_SHOWN = 4  # images that are named in a line
_ALWAYS = ("seed", "determinism", "precision", "model", "data")  # others only if they were set


def describe_step_images(images: "Sequence[StepImage]") -> str:
    """The first few images by name, label and position."""
    words = [
        f"{image.name} (label {image.label}, position {image.position:,} of the stream)"
        for image in images
    ]
    return escape_name(format_some(words, _SHOWN))


def finding_to_json(finding: "NonFiniteFinding", images: "Sequence[StepImage]") -> dict[str, Any]:
    """A finding as plain values, with the images it affects."""
    return {
        "what": finding.what,
        "name": finding.name,
        "sound_weights": finding.weights_finite,
        "images": [images[row]._asdict() for row in finding.rows],
    }


def find_first_nonfinite(
    finding: "NonFiniteFinding | None", context: "RankContext", plan: Plan
) -> "NonFiniteFinding | None":
    """The first finding of all ranks: outputs before other kinds, earlier images before later."""
    if finding is not None:
        finding = replace(finding, rows=context.find_step_indices(finding.rows, plan))
    found = [one for one in context.gather(finding) if one is not None]
    return min(found, key=lambda one: (one.what != "output", one.rows), default=None)


def loss_scale_at(
    step: int, plan: Plan, scaler: "DynamicLossScale | DeviceLossScale | None"
) -> float:
    """The loss scale of a step, counted from 1."""
    if scaler is None:
        return plan.loss_scale.at(step - 1)
    earlier = [scale for changed, scale in scaler.history if changed < step]
    return earlier[-1] if earlier else plan.loss_scale.at(0)


def _is_finite(entry: dict[str, Any]) -> bool:
    """Whether the numbers on a line of metrics.jsonl are finite; a missing norm counts as such."""
    return all(isfinite(float(entry[name] or 0)) for name in ("loss", "grad_norm"))


def read_last_steps(folder: Path) -> list[dict[str, Any]]:
    """The last steps in metrics.jsonl, up to the first that is not finite."""
    last: deque[dict[str, Any]] = deque(maxlen=LAST_STEPS)
    for entry in read_metrics(folder, scores=False):
        last.append(entry)
        if not _is_finite(entry):
            break
    return list(last)


@dataclass
class BlackBox:
    """Finds out why a step is not finite, and writes the last steps of a run if it fails."""

    prepared: PreparedRun
    session: "Session"
    records: Records
    probe: "Probe | None"  # observes every module in every step, with --fp-exceptions
    print_line: Callable[[str], None]
    cause: dict[str, Any] | None = None  # of the step that was diagnosed

    def diagnose(self, metrics: "StepMetrics") -> str:
        """Where the last step went wrong, or how to find out, and what to do."""
        run = self.prepared.run
        finding = self.probe and find_first_nonfinite(
            self.probe.find_nonfinite(metrics.loss, metrics.grad_norm),
            self.session.rank_context,
            self.prepared.plan,
        )
        cause = f"phalanx replay {run.path}{run.plugin_flag} names the module and the image"
        if finding:
            images = self.session.feed.list_step_images(self.session.state.step)
            self.cause = finding_to_json(finding, images)
            affected = [images[row] for row in finding.rows]
            names = f", for {describe_step_images(affected)}" if affected else ""
            cause = finding.describe() + names
        # a checkpoint that is still being written has another prefix
        fork = ", or fork the last checkpoint," if any(run.checkpoints.glob("*step-*")) else ""
        return (
            f"{cause}. Nothing of it was saved: start again{fork} with a lower --lr or a longer "
            "--warmup-epoch"
        )

    @contextmanager
    def record_failure(
        self,
        read_metrics: "Callable[[], list[StepMetrics]]",
        write_metrics: "Callable[[int, list[StepMetrics]], None]",
    ) -> Iterator[None]:
        """Context that writes blackbox.json and the report if it fails.

        Those of an earlier failure are removed. A lost rank leaves no report.

        read_metrics: returns the metrics of steps that were not read yet. write_metrics: adds the
        metrics of consecutive steps to the records.
        """
        if not self.session.rank_context.is_first_rank:
            yield
            return
        if (self.prepared.run.path / _BLACKBOX).exists():
            remove_quietly(self.prepared.run.report)  # it says that the run has failed
        remove_quietly(self.prepared.run.path / _BLACKBOX)
        began_at = self.session.state.step
        try:
            yield
        except Stopped:  # everything is saved
            raise
        except Exception as failure:
            with suppress(UserError):  # the first failure is the one to report
                self.records.flush()
                known = read_last_steps(self.records.folder)
                with suppress(RuntimeError):  # a device that failed returns no numbers
                    write_metrics(known[-1]["step"] + 1 if known else began_at + 1, read_metrics())
                self.records.flush()
                self._write(failure, began_at)
            if not self._may_have_lost_a_rank(failure):
                self._write_report()
            raise

    def _may_have_lost_a_rank(self, failure: Exception) -> bool:
        """Whether another rank may be gone, so that the run goes on when ranks are started again.

        A collective call that breaks off raises an error of torch's.
        """
        is_own = isinstance(failure, UserError) and not isinstance(failure, NetworkError)
        return self.session.rank_context.ranks is not None and not is_own

    def _write_report(self) -> None:
        """Write the report of a run that failed after its first step, if that can be done."""
        run = self.prepared.run
        with suppress(Exception):  # whatever it is, the run's own failure is the one to report
            if run.has_steps:
                self.print_line(f"report: {write_report(run)}")

    def _write(self, failure: Exception, began_at: int) -> None:
        run, plan, settings = self.prepared.run, self.prepared.plan, self.prepared.settings
        rows = read_last_steps(run.path)
        diverged = bool(rows) and not _is_finite(rows[-1])
        done = rows[-1]["step"] if rows else began_at
        step = done if diverged else done + 1
        options = settings.config.flat()
        images = self.session.feed.list_step_images(step) if step <= plan.total_steps else []
        box = {
            "format": _FORMAT,
            "step": step if step <= plan.total_steps else None,
            "unsound": diverged,
            "why": f"{type(failure).__name__}: {failure}",
            "cause": self.cause,
            "checkpoint": _find_replay_start(run, step),
            "seed": settings.config.train.seed,
            "device": plan.device,
            "precision": plan.precision,
            "threads": plan.threads,
            "options": {
                name: value
                for name, value in options.items()
                if name in _ALWAYS or settings.origins[name] != "default"
            },
            "images": [image._asdict() for image in images],
            "steps": [
                {**row, "loss_scale": loss_scale_at(row["step"], plan, self.session.state.scaler)}
                for row in rows
            ],
        }
        write_atomically(run.path / _BLACKBOX, format_json(box))


def _find_checkpoint_before(run: RunFolder, step: int) -> Path | None:
    """The run's newest checkpoint from before a step."""
    earlier = [path for path in list_checkpoints(run.checkpoints) if parse_step(path) < step]
    return earlier[-1] if earlier else None


def _find_replay_start(run: RunFolder, step: int) -> str | None:
    """The checkpoint a replay of a step starts from, the run's or its parent's; None: step 0."""
    own, parent = _find_checkpoint_before(run, step), run.facts["parent"]
    if own is not None:
        return str(own.relative_to(run.path))
    return None if parent is None else str(parent["checkpoint"])


def _find_failing_step(run: RunFolder) -> int | None:
    """The step a run failed at, from its black box or its metrics; None if it did not fail."""
    box = run.path / _BLACKBOX
    if box.exists():
        step = read_json_object(box).get("step")
        return int(step) if step is not None else None
    last = read_last_steps(run.path)[-1:]
    return next((int(entry["step"]) for entry in last if not _is_finite(entry)), None)


def prepare_replay(prepared: PreparedRun, step: int | None) -> tuple[PreparedRun, int]:
    """A run with its starting point before a step, and the step; if None, where it failed."""
    run, plan = prepared.run, prepared.plan
    total = plan.total_steps
    wanted = _find_failing_step(run) if step is None else step
    if wanted is None:
        raise ConfigError(
            f"{run.path}: no step failed, so there is none to repeat; name one from 1 to "
            f"{total:,}, as in: phalanx replay {run.path} --step {min(10, total)}{run.plugin_flag}"
        )
    if not 1 <= wanted <= total:
        raise ConfigError(
            f"--step {wanted}: the run has {format_plural(total, 'step')}; give one from 1 to "
            f"{total}"
        )
    start = find_starting_point(_find_checkpoint_before(run, wanted), run)
    if start is None:
        refuse_other_weights(run, prepared.config)
    elif start.use == "fork" and start.first_step(plan) >= wanted:
        begin = start.first_step(plan) + 1
        raise ConfigError(f"--step {wanted}: the run is a fork whose first step is {begin:,}")
    return replace(prepared, start=start, later_check=prepared.image_check), wanted
