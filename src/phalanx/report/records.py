"""The records of a training run: metrics.jsonl, training.csv, validation.csv and averaged.csv.

metrics.jsonl contains no times, so that a run that was killed and resumed ends with the same bytes
as one that never stopped. Numbers keep every bit; those that are not finite are strings, because
JSON cannot represent them.
"""

import csv
import json
import math
import os
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.disk import convert_disk_errors, sync_folder, write_atomically
from phalanx.errors import CheckpointError

_METRICS_FILE, TRAINING_FILE, VALIDATION_FILE = "metrics.jsonl", "training.csv", "validation.csv"
AVERAGED_FILE = "averaged.csv"  # like validation.csv, for averaged weights, if there are any
_SPANS = 3  # ranges of missing steps that a message names


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One optimizer step."""

    step: int
    epoch: float
    lr: float
    loss: float
    grad_norm: float | None  # None without metrics, like top1
    top1: float | None


@dataclass(frozen=True, kw_only=True)
class LogRow(StepRow):
    """Means over the steps since the last log point, with throughput."""

    images_per_second: float | None
    data_wait: float | None  # share of the time, 0 to 1


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """One evaluation."""

    step: int
    epoch: float
    scored: int
    top1: float
    top5: float | None  # None if the model has five classes or fewer
    loss: float
    interval95: tuple[float, float]


STEP_FIELDS = tuple(f.name for f in fields(StepRow))
_LOG_FIELDS = tuple(f.name for f in fields(LogRow))
SCORE_FIELDS = ("step", "epoch", "scored", "top1", "top1_low", "top1_high", "top5", "loss")
_HEADERS = {TRAINING_FILE: _LOG_FIELDS, VALIDATION_FILE: SCORE_FIELDS, AVERAGED_FILE: SCORE_FIELDS}


class Records:
    """The records of one run. Lines are buffered until the next log, score or flush."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._buffered: dict[str, str] = {}
        self._checksums: dict[str, tuple[int, int]] = {}  # as last computed

    def add_steps(self, rows: Iterable[StepRow]) -> None:
        """Add one line of metrics per step."""
        self._add(_METRICS_FILE, "".join(_step_line(row) for row in rows))

    def add_log(self, row: LogRow) -> None:
        """Add a row of training.csv, and flush."""
        self._add(TRAINING_FILE, _csv_line(vars(row).values()))
        self.flush()

    def add_score(self, row: ScoreRow) -> None:
        """Add an evaluation to metrics.jsonl and validation.csv, and flush."""
        self._add(_METRICS_FILE, json.dumps(score_entry(row), allow_nan=False) + "\n")
        self._add(VALIDATION_FILE, _score_line(row))
        self.flush()

    def add_averaged_score(self, row: ScoreRow) -> None:
        """Add an evaluation of the averaged weights to averaged.csv, and flush."""
        self._add(AVERAGED_FILE, _score_line(row))
        self.flush()

    def flush(self, *, sync: bool = False) -> None:
        """Append buffered lines to the files; with `sync`, fsync all of them."""
        names = list(self._buffered)
        if sync:  # also what was appended before: a checkpoint depends on all of it
            has_averages = AVERAGED_FILE in self._buffered or (self.folder / AVERAGED_FILE).exists()
            names = [_METRICS_FILE, TRAINING_FILE, VALIDATION_FILE, *[AVERAGED_FILE] * has_averages]
        for name in names:
            _append(self.folder / name, self._buffered.pop(name, ""), sync=sync)

    def compute_checksums(self, *, last_step: int | None) -> dict[str, tuple[int, int]]:
        """The size and CRC-32 of each existing file, to be stored in a checkpoint.

        Reads only what was added since the last call, because training waits for it. last_step: the
        last step of a finished run, whose score a resume repeats; that score is left out.
        """
        if last_step is not None:
            kept = {
                name: _keep_lines(self.folder / name, keep)
                for name, keep in _keep_until(last_step, scored=False).items()
                if (self.folder / name).exists()
            }
            return {name: (len(content), zlib.crc32(content)) for name, content in kept.items()}
        for name in (_METRICS_FILE, *_HEADERS):
            path, (size, checksum) = self.folder / name, self._checksums.get(name, (0, 0))
            if path.exists():
                with convert_disk_errors(path), path.open("rb") as file:
                    file.seek(size)
                    added = file.read()
                self._checksums[name] = size + len(added), zlib.crc32(added, checksum)
        return dict(self._checksums)

    def truncate(self, step: int, *, scored: bool) -> None:
        """Remove all after `step`, incomplete lines, and unless `scored` the score at `step`."""
        self.flush()
        self._checksums.clear()
        for name, keep in _keep_until(step, scored=scored).items():
            path = self.folder / name
            if path.exists() and (kept := _keep_lines(path, keep)) != path.read_bytes():
                write_atomically(path, kept)

    def _add(self, name: str, text: str) -> None:
        self._buffered[name] = self._buffered.get(name, "") + text


def find_changed_record(folder: Path, checksums: dict[str, tuple[int, int]]) -> str:
    """The first file whose beginning no longer matches its checksum; empty if none."""
    for path, (size, checksum) in ((folder / name, given) for name, given in checksums.items()):
        if path.exists() and zlib.crc32(path.read_bytes()[:size]) != checksum:
            return path.name
    return ""


def _score_line(row: ScoreRow) -> str:
    """An evaluation as a line of CSV."""
    low, high = row.interval95
    return _csv_line((row.step, row.epoch, row.scored, row.top1, low, high, row.top5, row.loss))


def _append(path: Path, text: str, *, sync: bool) -> None:
    """Append text to a file, after the header if the file is a new table."""
    with convert_disk_errors(path), path.open("a", encoding="utf-8", newline="") as file:
        if path.name in _HEADERS and file.tell() == 0:
            file.write(_csv_line(_HEADERS[path.name]))
        file.write(text)
        if sync:
            file.flush()
            os.fsync(file.fileno())
            sync_folder(path.parent)


@contextmanager
def convert_damage_errors(path: Path) -> Iterator[None]:
    """Context that turns errors of parsing a record into a CheckpointError with the file."""
    try:
        yield
    except (KeyError, TypeError, ValueError, csv.Error) as cause:
        raise CheckpointError(
            f"{path}: is damaged ({type(cause).__name__}: {cause}); "
            "remove it, or restore it from a copy"
        ) from cause


def to_json_number(value: float | None) -> float | str | None:
    """The number, or its text if JSON cannot represent it; None stays None."""
    if value is None:
        return None
    value = float(value)
    return value if math.isfinite(value) else repr(value)


def _step_line(row: StepRow) -> str:
    """One step as a line of metrics.jsonl."""
    numbers = {name: to_json_number(value) for name, value in vars(row).items()}
    return json.dumps({**numbers, "step": int(row.step)}, allow_nan=False) + "\n"


def score_entry(row: ScoreRow) -> dict[str, Any]:
    """One evaluation as plain values, for `parse_score`."""
    valid = {
        "scored": int(row.scored),
        "top1": to_json_number(row.top1),
        "top5": to_json_number(row.top5),
        "loss": to_json_number(row.loss),
        "interval95": [to_json_number(bound) for bound in row.interval95],
    }
    return {"step": int(row.step), "epoch": to_json_number(row.epoch), "valid": valid}


def _csv_line(cells: Iterable[object]) -> str:
    """Cells as a line of CSV; numbers keep every bit, None is empty."""
    return ",".join("" if cell is None else str(cell) for cell in cells) + "\n"


def _keep_until(step: int, *, scored: bool) -> dict[str, Callable[[bytes], bool]]:
    """For each file, which lines to keep up to a step; scored: with the score at that step."""
    last_score = step if scored else step - 1

    def keep_metrics(line: bytes) -> bool:
        entry = _parse_metrics(line)
        return bool(entry and entry["step"] <= (last_score if "valid" in entry else step))

    keep: dict[str, Callable[[bytes], bool]] = {_METRICS_FILE: keep_metrics}
    for name, last in {
        TRAINING_FILE: step,
        VALIDATION_FILE: last_score,
        AVERAGED_FILE: last_score,
    }.items():
        keep[name] = partial(_keep_csv, header=_HEADERS[name], last_step=last)
    return keep


def _keep_lines(path: Path, keep: Callable[[bytes], bool]) -> bytes:
    """The complete lines of a file that `keep` accepts, byte for byte."""
    lines = path.read_bytes().splitlines(keepends=True)
    return b"".join(line for line in lines if line.endswith(b"\n") and keep(line))


def _keep_csv(line: bytes, *, header: tuple[str, ...], last_step: int) -> bool:
    """Whether a row, or the header, belongs to the run up to this step."""
    cells = line.decode(errors="replace").rstrip("\r\n").split(",")
    if cells == list(header):
        return True
    return len(cells) == len(header) and cells[0].isdecimal() and int(cells[0]) <= last_step


def _parse_metrics(line: bytes) -> dict[str, Any] | None:
    """The entry on a line, or None if the line is incomplete."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None


def read_metrics(folder: Path, *, scores: bool) -> Iterator[dict[str, Any]]:
    """The complete entries of metrics.jsonl, in order: only evaluations, or only steps."""
    try:
        with (folder / _METRICS_FILE).open("rb") as file:
            # filtered before parsing: a long run has many steps and few evaluations
            wanted = (line for line in file if (b'"valid"' in line) == scores)
            yield from (entry for line in wanted if (entry := _parse_metrics(line)) is not None)
    except FileNotFoundError:
        return


def describe_missing_rows(
    folder: Path, *, first: int | None, last: int, scored: Collection[int], logged: Collection[int]
) -> str:
    """Which rows are missing in the records of a run up to step `last`, by file; "" if none.

    first: its first step; None if not known. scored, logged: the steps after which it was scored,
    and had a log point.
    """
    steps = {entry["step"] for entry in read_metrics(folder, scores=False)}
    scores = {entry["step"] for entry in read_metrics(folder, scores=True)}
    first = min(steps, default=last) if first is None else first
    missing = {
        f"{_METRICS_FILE} lacks": _format_steps(set(range(first, last + 1)) - steps),
        f"{_METRICS_FILE} lacks the evaluation after": _format_steps(set(scored) - scores),
        f"{TRAINING_FILE} lacks": _format_steps(
            set(logged) - _read_csv_steps(folder / TRAINING_FILE)
        ),
        f"{VALIDATION_FILE} lacks": _format_steps(
            set(scored) - _read_csv_steps(folder / VALIDATION_FILE)
        ),
    }
    return ", ".join(f"{what} {which}" for what, which in missing.items() if which)


def _read_csv_steps(path: Path) -> set[int]:
    """The steps of the complete rows of a table."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return set()
    keep = partial(_keep_csv, header=_HEADERS[path.name], last_step=sys.maxsize)
    whole = (line.partition(b",")[0] for line in lines if line.endswith(b"\n") and keep(line))
    return {int(step) for step in whole if step.isdigit()}  # the header has none


def _format_steps(steps: set[int]) -> str:
    """The first few ranges of steps, in words.

    >>> _format_steps({4, 5, 6, 9}), _format_steps({7})
    ('steps 4 to 6, 9', 'step 7')
    """
    starts = sorted(step for step in steps if step - 1 not in steps)
    ends = sorted(step for step in steps if step + 1 not in steps)
    spans = [f"{a:,} to {b:,}" if a < b else f"{a:,}" for a, b in zip(starts, ends, strict=True)]
    more = f" and {len(spans) - _SPANS:,} more ranges" if len(spans) > _SPANS else ""
    words = f"step{'s' * (len(steps) > 1)} {', '.join(spans[:_SPANS])}{more}"
    return words if steps else ""


def read_steps(folder: Path) -> dict[str, list[float]]:
    """The steps of metrics.jsonl as columns: step, epoch, lr, loss, grad_norm and top1.

    NaN stands for values that were not measured; a measured top-1 is never NaN.
    """
    path = folder / _METRICS_FILE
    if not path.exists() and (folder / TRAINING_FILE).exists():  # which is written after it
        raise CheckpointError(f"{path}: is missing; restore it from a copy")
    with convert_damage_errors(path):
        entries = list(read_metrics(folder, scores=False))
        columns = {name: [entry[name] for entry in entries] for name in STEP_FIELDS}
        numbers = {
            name: [math.nan if value is None else float(value) for value in column]
            for name, column in columns.items()
        }
    return {**numbers, "step": columns["step"]}


def read_scores(folder: Path) -> list[ScoreRow]:
    """The evaluations in metrics.jsonl, in order."""
    with convert_damage_errors(folder / _METRICS_FILE):
        return [parse_score(entry) for entry in read_metrics(folder, scores=True)]


def read_averaged_scores(folder: Path) -> dict[int, ScoreRow]:
    """The evaluations of the averaged weights by step; empty if there are none."""
    path = folder / AVERAGED_FILE
    if not path.exists():
        return {}
    with convert_damage_errors(path), path.open(encoding="utf-8", newline="") as file:
        rows = [_parse_score_cells(cells) for cells in csv.DictReader(file)]
    return {row.step: row for row in rows}


def _parse_score_cells(cells: dict[str, str]) -> ScoreRow:
    """One row of averaged.csv."""
    return ScoreRow(
        step=int(cells["step"]),
        epoch=float(cells["epoch"]),
        scored=int(cells["scored"]),
        top1=float(cells["top1"]),
        top5=float(cells["top5"]) if cells["top5"] else None,
        loss=float(cells["loss"]),
        interval95=(float(cells["top1_low"]), float(cells["top1_high"])),
    )


def parse_score(entry: dict[str, Any]) -> ScoreRow:
    """One evaluation from its entry in metrics.jsonl or average.json."""
    valid = entry["valid"]
    low, high = valid["interval95"]
    return ScoreRow(
        step=entry["step"],
        epoch=float(entry["epoch"]),
        scored=int(valid["scored"]),
        top1=float(valid["top1"]),
        top5=None if valid["top5"] is None else float(valid["top5"]),
        loss=float(valid["loss"]),
        interval95=(float(low), float(high)),
    )


def read_logs(folder: Path) -> list[LogRow]:
    """The rows of training.csv, in order; an incomplete last row is left out."""
    path = folder / TRAINING_FILE
    if not path.exists():
        return []
    with convert_damage_errors(path):
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        return [_parse_log(row) for row in csv.DictReader(whole.splitlines())]


def _parse_log(row: dict[str, str]) -> LogRow:
    """One row of training.csv; an empty cell is None."""
    numbers = {name: float(row[name]) if row[name] else None for name in _LOG_FIELDS[1:]}
    return LogRow(step=int(row["step"]), **numbers)  # type: ignore[arg-type]
