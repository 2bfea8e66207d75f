"""summary.json: the result of a run in numbers, for scripts to read."""

from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from phalanx.disk import write_atomically
from phalanx.errors import CheckpointError
from phalanx.report.folder import read_json_object, to_json

_NAME = "summary.json"


@dataclass(frozen=True, kw_only=True)
class BestScore:
    """The best-scored checkpoint of a run."""

    step: int
    top1: float


@dataclass(frozen=True, kw_only=True)
class InputNote:
    """How fast images came and could have been taken, a second."""

    verdict: str
    come: float
    eaten: float
    stages: dict[str, float]  # on one core, each alone


@dataclass(frozen=True, kw_only=True)
class MemoryNote:
    """The most bytes a device had in use at once. None stands for what is not known."""

    predicted: int | None  # of a training step
    measured: int | None  # of the process that finished the run; on a CPU, how much it grew


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """What became of numbers that have 16 bits. None stands for what was not counted."""

    updates_lost: float | None  # share of the weights' updates that moved nothing
    gradients_zero: float | None  # share of the gradients' numbers that are nothing
    gradients_not_finite: int | None
    skipped_steps: int  # whose gradients overflowed
    loss_scales: tuple[tuple[int, float], ...]  # from which step on
    way_lost: float | None = None  # share of the way the weights should have moved


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
    write_atomically(folder / _NAME, to_json(asdict(summary)))


def read_summary(folder: Path) -> Summary:
    """The summary of a run; a CheckpointError where it is missing or not ours."""
    path = folder / _NAME
    values = read_json_object(path)
    _refuse_other_keys(path, values, kind=Summary)
    parts: dict[str, Any] = {}
    for name, kind in _PARTS.items():
        if values.get(name) is not None:
            _refuse_other_keys(path, values[name], kind=kind)
            parts[name] = kind(**values[name])
    if parts.get("numerics"):
        scales = tuple((step, scale) for step, scale in values["numerics"]["loss_scales"])
        parts["numerics"] = replace(parts["numerics"], loss_scales=scales)
    interval = values["interval95"]
    changes = {
        "interval95": None if interval is None else tuple(interval),
        "bad_images": tuple(values["bad_images"]),
    }
    return Summary(**{**values, **changes, **parts})


_PARTS: dict[str, type[Any]] = {
    "best": BestScore,
    "input": InputNote,
    "numerics": Numerics,
    "memory": MemoryNote,
}


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
