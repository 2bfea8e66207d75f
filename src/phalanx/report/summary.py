"""The results of a run in numbers, for scripts to read.

summary.json   what came out of the run
average.json   what the average of its checkpoints scored, beside the newest of them
"""

from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from phalanx.disk import write_atomically
from phalanx.errors import CheckpointError
from phalanx.report.folder import read_json_object, to_json
from phalanx.report.records import ScoreRow, damage_errors, parse_score, score_entry

_SUMMARY_FILE, AVERAGE_FILE = "summary.json", "average.json"


@dataclass(frozen=True, kw_only=True)
class BestScore:
    """The best-scored checkpoint of a run."""

    step: int
    top1: float


@dataclass(frozen=True, kw_only=True)
class InputNote:
    """Whether the input kept up with the model."""

    verdict: str
    images_per_second_available: float
    images_per_second_needed: float  # by the model, if it never had to wait
    stages: dict[str, float]  # on one core, each alone


@dataclass(frozen=True, kw_only=True)
class MemoryNote:
    """The most bytes a device had in use at once. None stands for what is not known."""

    predicted: int | None  # of a training step
    measured: int | None  # of the process that finished the run; on a CPU, how much it grew


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """What became of numbers that have 16 bits. None stands for what was not counted."""

    updates_lost: float | None  # share of the weight updates that changed nothing
    gradients_zero: float | None  # share of the gradient values that are zero
    gradients_not_finite: int | None
    skipped_steps: int  # whose gradients overflowed
    loss_scales: tuple[tuple[int, float], ...]  # from which step on
    lost_to_rounding: float | None = None  # share of the total change of the weights


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What came out of a run. None stands for what was not measured."""

    steps: int
    epochs: float
    images: int  # training images seen
    scored: int | None  # images of the newest evaluation
    top1: float | None
    top5: float | None  # None too where the model knows five classes or fewer
    interval95: tuple[float, float] | None  # of top1
    images_per_second: float | None
    data_wait: float | None  # share of the time spent waiting for data, 0 to 1
    weights_sha256: str
    best: BestScore | None
    checkpoint: str | None  # relative to the run folder
    bad_images: tuple[str, ...]  # each by name, with what is wrong with it
    finished: bool
    input: InputNote | None = None
    averaged_top1: float | None = None  # of the averaged weights, where there are any
    numerics: Numerics | None = None
    memory: MemoryNote | None = None


def write_summary(folder: Path, summary: Summary) -> None:
    """Write summary.json, whole or not at all."""
    write_atomically(folder / _SUMMARY_FILE, to_json(asdict(summary)))


_PARTS: dict[str, type[Any]] = {
    "best": BestScore,
    "input": InputNote,
    "numerics": Numerics,
    "memory": MemoryNote,
}
_OLD_NAMES = {  # that earlier versions wrote
    "way_lost": "lost_to_rounding",
    "come": "images_per_second_available",
    "eaten": "images_per_second_needed",
}


def read_summary(folder: Path) -> Summary:
    """The summary of a run; a CheckpointError where it is missing or not ours."""
    path = folder / _SUMMARY_FILE
    values = read_json_object(path)
    _refuse_other_keys(path, values, kind=Summary)
    for name, kind in _PARTS.items():
        part = values.get(name)
        if isinstance(part, dict):
            part = {_OLD_NAMES.get(key, key): value for key, value in part.items()}
        if part is not None:
            _refuse_other_keys(path, part, kind=kind)
            values[name] = kind(**part)
    # JSON has lists alone
    if values.get("numerics"):
        scales = tuple((step, scale) for step, scale in values["numerics"].loss_scales)
        values["numerics"] = replace(values["numerics"], loss_scales=scales)
    if values["interval95"] is not None:
        values["interval95"] = tuple(values["interval95"])
    return Summary(**{**values, "bad_images": tuple(values["bad_images"])})


def _refuse_other_keys(path: Path, values: Any, *, kind: type[Any]) -> None:
    """Raise where keys are missing or unknown; older files go without what has a default."""
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: is damaged, {values!r} is no {kind.__name__.lower()}")
    known = {field.name for field in fields(kind)}
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    lists = (("lacks", needed - values.keys()), ("has unknown", values.keys() - known))
    problems = [f"{verb} {', '.join(sorted(names))}" for verb, names in lists if names]
    if problems:
        raise CheckpointError(
            f"{path}: {' and '.join(problems)}; another version of Phalanx wrote it, "
            "or it was edited by hand"
        )


@dataclass(frozen=True, kw_only=True)
class AverageScore:
    """What the average of checkpoints and the newest of them scored on the same images."""

    account: dict[str, Any]  # what was averaged and how
    newest: ScoreRow
    average: ScoreRow


def write_average_score(folder: Path, score: AverageScore) -> None:
    """Write average.json, whole or not at all."""
    rows = {"newest": score_entry(score.newest), "average": score_entry(score.average)}
    write_atomically(folder / AVERAGE_FILE, to_json({"averaged": score.account, **rows}))


def read_average_score(folder: Path) -> AverageScore | None:
    """What the run's average scored; None where none was scored."""
    path = folder / AVERAGE_FILE
    if not path.exists():
        return None
    values = read_json_object(path)
    with damage_errors(path):
        rows = {name: parse_score(values[name]) for name in ("newest", "average")}
        return AverageScore(account=dict(values["averaged"]), **rows)
