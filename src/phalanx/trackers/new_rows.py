"""The tables of a run as they grow: training.csv, validation.csv and averaged.csv."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.report.records import AVERAGED_FILE, TRAINING_FILE, VALIDATION_FILE

_TABLES = {TRAINING_FILE: "train", VALIDATION_FILE: "valid", AVERAGED_FILE: "averaged"}


@dataclass(frozen=True)
class NewRow:
    """One row, with its numbers by the names that trackers show."""

    table: str
    step: int
    values: dict[str, float]


@dataclass
class _GrowingTable:
    """A CSV file that is read as it grows, complete lines only."""

    path: Path
    read_bytes: int = 0
    columns: list[str] = field(default_factory=list)

    def read(self) -> Iterator[dict[str, str]]:
        """The rows since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.read_bytes)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self.read_bytes += len(whole)
        for line in whole.decode().splitlines():
            cells = line.split(",")
            if not self.columns:
                self.columns = cells
            else:
                yield dict(zip(self.columns, cells, strict=True))


class NewRows:
    """All rows of a run's tables, each returned once."""

    def __init__(self, folder: Path) -> None:
        self._tables = {
            name: _GrowingTable(folder / file_name) for file_name, name in _TABLES.items()
        }
        self._best = float("-inf")

    def read(self) -> list[NewRow]:
        """The rows since the last call, in order of their steps."""
        rows = [
            self._build_row(name, cells)
            for name, table in self._tables.items()
            for cells in table.read()
        ]
        return sorted(rows, key=lambda row: row.step)

    def _build_row(self, table: str, cells: dict[str, str]) -> NewRow:
        """A row with its tracker names; a score row also contains the best score."""
        values = {
            f"{table}/{name}": float(text)
            for name, text in cells.items()
            if text and name != "step"
        }
        if table == "valid":
            self._best = max(self._best, values["valid/top1"])
            values["valid/best_top1"] = self._best
        return NewRow(table, int(cells["step"]), values)
