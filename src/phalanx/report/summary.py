"""The results of a run in numbers, for scripts.

summary.json   the result of the run
average.json   the scores of the average of its checkpoints and of the newest one
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from phalanx.disk import write_atomically
from phalanx.errors import CheckpointError
from phalanx.report.folder import format_json, read_json_object
from phalanx.report.records import ScoreRow, convert_damage_errors, parse_score, score_entry

_SUMMARY_FILE, AVERAGE_FILE = "summary.json", "average.json"


class _NoOtherKeys:
    """A part of summary.json; an unknown key is an error."""

    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True)
class BestScore(_NoOtherKeys):
    """The best-scored checkpoint of a run."""

    step: int
    top1: float


@dataclass(frozen=True, kw_only=True)
class InputNote(_NoOtherKeys):
    """Whether the input kept up with the model."""

    verdict: str
    images_per_second_available: float
    images_per_second_needed: float  # by the model, if it never waited
    stages: dict[str, float]  # images/s of each stage alone, on one core


@dataclass(frozen=True, kw_only=True)
class MemoryNote(_NoOtherKeys):
    """The peak memory of a device in bytes; None if not known."""

    predicted: int | None  # of a training step
    measured: int | None  # of the process that finished the run; on a CPU, how much it grew


@dataclass(frozen=True, kw_only=True)
class Numerics(_NoOtherKeys):
    """The effects of 16-bit numbers; None for values that were not counted."""

    updates_lost: float | None  # share of the weight updates that changed nothing
    gradients_zero: float | None  # share of the gradient values that are zero
    gradients_not_finite: int | None
    skipped_steps: int  # because their gradients overflowed
    loss_scales: tuple[tuple[int, float], ...]  # each with its first step
    lost_to_rounding: float | None = None  # share of the total change of the weights


@dataclass(frozen=True, kw_only=True)
class Summary(_NoOtherKeys):
    """The result of a run; None for values that were not measured."""

    steps: int
    epochs: float
    images: int  # training images seen
    scored: int | None  # images of the newest evaluation
    top1: float | None
    top5: float | None  # also None if the model has five classes or fewer
    interval95: tuple[float, float] | None  # of top1
    images_per_second: float | None
    data_wait: float | None  # share of the time spent waiting for data, 0 to 1
    weights_sha256: str
    best: BestScore | None
    checkpoint: str | None  # relative to the run folder
    bad_images: tuple[str, ...]  # names, with what is wrong
    finished: bool
    input: InputNote | None = None
    averaged_top1: float | None = None  # of the averaged weights, if there are any
    numerics: Numerics | None = None
    memory: MemoryNote | None = None  # of rank 0
    memory_by_stage: tuple[MemoryNote, ...] = ()  # if stages have their own devices


def write_summary(folder: Path, summary: Summary) -> None:
    """Write summary.json atomically."""
    write_atomically(folder / _SUMMARY_FILE, format_json(asdict(summary)))


_OLD_NAMES = {  # written by earlier versions
    "way_lost": "lost_to_rounding",
    "come": "images_per_second_available",
    "eaten": "images_per_second_needed",
}


def read_summary(folder: Path) -> Summary:
    """The summary of a run; CheckpointError if it is missing or damaged."""
    path = folder / _SUMMARY_FILE
    values = read_json_object(path)
    for name in ("input", "numerics"):
        if isinstance(values.get(name), dict):
            values[name] = {_OLD_NAMES.get(key, key): v for key, v in values[name].items()}
    try:
        return TypeAdapter(Summary).validate_python(values)
    except ValidationError as cause:
        raise _explain_damage(path, cause.errors()) from cause


def _explain_damage(path: Path, errors: list[ErrorDetails]) -> CheckpointError:
    """The error for missing or unknown keys, else for the first invalid value."""
    problems = []
    for verb, kind in (("lacks", "missing"), ("has unknown", "unexpected_keyword_argument")):
        places = [error["loc"][-1] for error in errors if error["type"] == kind]
        keys = sorted(place for place in places if isinstance(place, str))
        problems += [f"{verb} {', '.join(keys)}"] if keys else []
    if problems:
        return CheckpointError(
            f"{path}: {' and '.join(problems)}; another version of Phalanx wrote it, "
            "or it was edited by hand"
        )
    key, value = ".".join(map(str, errors[0]["loc"])), errors[0]["input"]
    return CheckpointError(f"{path}: is damaged: {key} cannot be {value!r}; restore it from a copy")


@dataclass(frozen=True, kw_only=True)
class AverageScore:
    """The scores of the average of checkpoints and of the newest one, on the same images."""

    account: dict[str, Any]  # what was averaged and how
    newest: ScoreRow
    average: ScoreRow


def write_average_score(folder: Path, score: AverageScore) -> None:
    """Write average.json atomically."""
    rows = {"newest": score_entry(score.newest), "average": score_entry(score.average)}
    write_atomically(folder / AVERAGE_FILE, format_json({"averaged": score.account, **rows}))


def read_average_score(folder: Path) -> AverageScore | None:
    """The scores in average.json; None if there is none."""
    path = folder / AVERAGE_FILE
    if not path.exists():
        return None
    values = read_json_object(path)
    with convert_damage_errors(path):
        rows = {name: parse_score(values[name]) for name in ("newest", "average")}
        return AverageScore(account=dict(values["averaged"]), **rows)
