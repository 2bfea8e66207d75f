"""average.json: what the average of a run's checkpoints scored, beside the newest of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.disk import write_atomically
from phalanx.report.folder import read_json_object, to_json
from phalanx.report.records import ScoreRow, damaged, parse_score, score_entry

NAME = "average.json"


@dataclass(frozen=True, kw_only=True)
class AverageScore:
    """Two scores of one sitting."""

    account: dict[str, Any]  # what was averaged and how
    newest: ScoreRow
    average: ScoreRow


def write_average_score(folder: Path, score: AverageScore) -> None:
    """Write average.json, whole or not at all."""
    rows = {"newest": score_entry(score.newest), "average": score_entry(score.average)}
    write_atomically(folder / NAME, to_json({"averaged": score.account, **rows}))


def read_average_score(folder: Path) -> AverageScore | None:
    """What the run's average scored; None where none was scored."""
    path = folder / NAME
    if not path.exists():
        return None
    values = read_json_object(path)
    try:
        rows = {name: parse_score(values[name]) for name in ("newest", "average")}
        return AverageScore(account=dict(values["averaged"]), **rows)
    except (KeyError, TypeError, ValueError) as cause:
        raise damaged(path, cause) from cause
