"""summary.json: the result of a run in numbers, for scripts to read."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from phalanx.disk import write_atomically
from phalanx.errors import CheckpointError
from phalanx.report.folder import read_json_object, to_json

NAME = "summary.json"


@dataclass(frozen=True, kw_only=True)
class Best:
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
    best: Best | None
    checkpoint: str | None  # relative to the run folder
    bad_images: tuple[str, ...]  # each by name, with what is wrong with it
    finished: bool
    input: InputNote | None = None


def write_summary(folder: Path, summary: Summary) -> None:
    """Write summary.json, whole or not at all."""
    write_atomically(folder / NAME, to_json(asdict(summary)))


def read_summary(folder: Path) -> Summary:
    """The summary of a run; a CheckpointError where it is missing or not ours."""
    path = folder / NAME
    values = {"input": None, **read_json_object(path)}  # written without it until November 2026
    refuse_other_keys(path, values, kind=Summary)
    best, interval, note = values["best"], values["interval95"], values["input"]
    if best is not None:
        refuse_other_keys(path, best, kind=Best)
    if note is not None:
        refuse_other_keys(path, note, kind=InputNote)
    changes = {
        "best": None if best is None else Best(**best),
        "interval95": None if interval is None else tuple(interval),
        "bad_images": tuple(values["bad_images"]),
        "input": None if note is None else InputNote(**note),
    }
    return Summary(**{**values, **changes})


def refuse_other_keys(path: Path, values: Any, *, kind: type[Summary | Best | InputNote]) -> None:
    """Raise where keys are missing or unknown."""
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: is damaged, {values!r} is no {kind.__name__.lower()}")
    wanted = {field.name for field in fields(kind)}
    lists = (("lacks", wanted - values.keys()), ("has unknown", values.keys() - wanted))
    problems = [f"{verb} {', '.join(sorted(names))}" for verb, names in lists if names]
    if problems:
        raise CheckpointError(
            f"{path}: {' and '.join(problems)}; another version of Phalanx wrote it, "
            "or it was edited by hand"
        )
