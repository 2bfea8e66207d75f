"""Everything report.html shows, read from the run folder alone."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.report.average import AverageScore, read_average_score
from phalanx.report.folder import RunFolder
from phalanx.report.predictions import Prediction, Worst, read_predictions, read_worst
from phalanx.report.records import LogRow, ScoreRow, read_logs, read_scores, read_steps
from phalanx.report.summary import BestScore, Summary, read_summary


@dataclass(frozen=True, kw_only=True)
class Material:
    """What a run folder says about its run; what is not there yet is empty or None."""

    run: RunFolder
    facts: dict[str, Any]
    options: dict[str, str]
    steps: dict[str, list[float]]
    logs: list[LogRow]
    scores: list[ScoreRow]
    predictions: list[Prediction]
    worst: Worst | None
    summary: Summary | None
    average: AverageScore | None  # of checkpoints/average, while that is there

    @property
    def name(self) -> str:
        """What the run is called."""
        return str(self.facts.get("name") or self.run.path.name)

    @property
    def is_finished(self) -> bool:
        """Whether training reached its end."""
        return self.summary is not None and self.summary.finished

    @property
    def score(self) -> ScoreRow | None:
        """The newest evaluation."""
        return self.scores[-1] if self.scores else None

    @property
    def best(self) -> BestScore | None:
        """The best evaluation; of equals the first."""
        if self.summary and self.summary.best:
            return self.summary.best
        row = max(self.scores, key=lambda row: row.top1, default=None)
        return BestScore(step=row.step, top1=row.top1) if row else None

    @property
    def images_per_second(self) -> float | None:
        """The speed of the run: the summary's, or the median of the log points."""
        if self.summary and self.summary.images_per_second is not None:
            return self.summary.images_per_second
        return _middle([row.images_per_second for row in self.logs])

    @property
    def data_wait(self) -> float | None:
        """The share of time spent waiting for data: the summary's, or the median."""
        if self.summary and self.summary.data_wait is not None:
            return self.summary.data_wait
        return _middle([row.data_wait for row in self.logs])

    def class_name(self, number: int) -> str:
        """The name of a class, or its number where the run knows no name."""
        names = self.facts.get("classes") or []
        return str(names[number]) if 0 <= number < len(names) else f"class {number}"


def _middle(values: list[float | None]) -> float | None:
    """The median of what was measured; None where nothing was."""
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def gather(run: RunFolder) -> Material:
    """Read everything the page needs from the run folder."""
    folder = run.path
    averaged = (run.checkpoints / "average").exists()
    return Material(
        run=run,
        facts=run.facts,
        options=run.options,
        steps=read_steps(folder),
        logs=read_logs(folder),
        scores=read_scores(folder),
        predictions=read_predictions(folder),
        worst=read_worst(folder),
        summary=read_summary(folder) if run.summary.exists() else None,
        average=read_average_score(folder) if averaged else None,
    )
