"""`phalanx plan --measure`: runs a plan for some seconds, and predicts the whole run."""

from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.command import Argument, ParsedArgs
from phalanx.cli.progress import REWRITE_S, ProgressLine
from phalanx.config.read import Settings
from phalanx.config.schema import Config
from phalanx.errors import ConfigError
from phalanx.units import format_bytes, format_plural, format_seconds

if TYPE_CHECKING:
    from phalanx.assemble.dataset_summary import DatasetSummary
    from phalanx.bench.run_prediction import RunPrediction
    from phalanx.plan.plan import Plan

_SECONDS = 30.0
_MOST_SECONDS = 86400.0

MEASURE_ARGS = (
    Argument(
        "--measure",
        "Train, score and save for half a minute, keep nothing of it, and predict time, memory "
        "and energy of the whole run.",
        switch=True,
    ),
    Argument("--seconds", f"With --measure: for how long.  [{_SECONDS:g}]"),
)


def read_seconds(args: ParsedArgs) -> float | None:
    """How many seconds to measure; None if not asked for."""
    if args["--seconds"] is not None and not args["--measure"]:
        raise ConfigError("--seconds: belongs to --measure, which is not given")
    if not args["--measure"]:
        return None
    if args["--seconds"] is None:
        return _SECONDS
    return args.read_positive("--seconds", "seconds above 0, such as 30", high=_MOST_SECONDS)


def refuse_unmeasurable(settings: Settings, plan: "Plan", dataset: "DatasetSummary") -> None:
    """Raise ConfigError for a plan that cannot be tried here."""
    data, ranks = settings.config.data.data, plan.layout.ranks
    if settings.missing:
        raise ConfigError(settings.missing)
    if dataset.source == "published":
        raise ConfigError(
            f"--measure: trains on real images, and there are none of {data} yet; give --data-dir, "
            "or leave --measure out"
        )
    if ranks > 1:
        raise ConfigError(
            f"--measure: measures one process, and this plan has {ranks} ranks; give --devices 1, "
            "which runs the same replicas one after the other"
        )


def measure_run(config: Config, plan: "Plan", seconds: float) -> "RunPrediction":
    """Run the plan for some seconds."""
    from phalanx.bench.run_prediction import predict_run

    folder = Path(config.run.run_dir or "runs").absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    progress = ProgressLine(REWRITE_S)
    measured = predict_run(config, plan, seconds=seconds, folder=there, done=progress.show)
    progress.end()
    return measured


def describe_run_prediction(prediction: "RunPrediction") -> list[tuple[str, str]]:
    """The prediction in words, by name."""
    steps, scoring, saving = prediction.steps, prediction.scoring, prediction.saving
    shares = ", ".join(
        f"{name} {_format_long(part)}" for name, part in prediction.parts_s.items() if part >= 0.5
    )
    whole = _format_long(prediction.total_s) + f": {shares}" * bool(shares)
    rows = [
        ("measured on", _describe_machine(prediction)),
        (
            "a step",
            f"{1000 * steps.step_s:,.1f} ms, {steps.wait_share:.1%} of it waiting for data "
            f"({steps.steps:,} timed; quarters {1000 * steps.quick_s:,.1f} to "
            f"{1000 * steps.slow_s:,.1f})",
        ),
    ]
    if scoring is not None:
        rows.append(("an evaluation", f"{scoring.score_s:,.2f} s"))
    if saving is not None:
        size = format_bytes(saving.size_bytes)
        rows.append(
            (
                "a checkpoint",
                f"{size}, {1000 * saving.blocked_s:,.0f} ms in which training waits, on disk "
                f"after {saving.written_s:,.2f} s",
            )
        )
    rows.append(("predicted", f"{whole}; {_describe_range(prediction)}"))
    rows.append(("memory used", _describe_peak(prediction)))
    rows.append(("energy", _describe_energy(prediction)))
    return [*rows, *(("extrapolated", note) for note in prediction.notes)]


def _describe_machine(prediction: "RunPrediction") -> str:
    """The machine and its versions."""
    facts = prediction.measured_on
    processor = f"{facts['processor']}, {format_plural(int(facts['cores']), 'core')}"
    where = processor if facts["device"] == "cpu" else f"{facts['device']}, {processor}"
    return f"{where}, torch {facts['torch version']}"


def _describe_range(prediction: "RunPrediction") -> str:
    low, high = _format_long(prediction.quick_s), _format_long(prediction.slow_s)
    return f"{low} to {high} if every step were like the quicker or the slower quarter of them"


def _describe_peak(prediction: "RunPrediction") -> str:
    if prediction.peak_bytes is None:
        return "not known on this device"
    size = format_bytes(prediction.peak_bytes)
    if prediction.measured_on["device"] == "cpu":
        return f"{size} at most, the process with its libraries; worker processes come on top"
    return f"{size} of the GPU at most"


def _describe_energy(prediction: "RunPrediction") -> str:
    """The energy of the device alone, in kWh."""
    if prediction.joules is None:
        return "not known: the device does not report what it uses"
    what = "processor" if prediction.measured_on["device"] == "cpu" else "GPU"
    return f"{prediction.joules / 3.6e6:,.3g} kWh, of the {what} alone"


def _format_long(seconds: float) -> str:
    """A duration in hours and minutes, or in days if there are many hours."""
    days, hours = divmod(round(seconds / 3600), 24)
    if days >= 2:
        return f"{days}d{hours:02}h"
    return format_seconds(seconds) if seconds >= 10 else f"{seconds:.1f}s"
