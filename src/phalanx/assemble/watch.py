"""What the loop tells goes into the run folder and to the person watching."""

from phalanx.assemble.feed import Feed
from phalanx.engine.evaluate import Score
from phalanx.engine.state import StepNumbers, Throughput, TrainState
from phalanx.plan.plan import Plan
from phalanx.report.console import Console
from phalanx.report.predictions import (
    Prediction,
    find_worst_mistakes,
    write_predictions,
    write_worst,
)
from phalanx.report.records import LogRow, Records, ScoreRow, StepRow
from phalanx.report.scores import wilson_interval


class RunWatch:
    """Writes the records of one run and shows them."""

    def __init__(
        self,
        records: Records,
        console: Console,
        plan: Plan,
        *,
        feed: Feed,
    ) -> None:
        self._records, self._console, self._plan = records, console, plan
        self._feed = feed
        self._told: set[str] = set()

    def progress(self, step: int) -> None:
        """A step is done."""
        self._console.progress(step)

    def steps(self, first: int, rows: list[StepNumbers]) -> None:
        """A line of metrics.jsonl for each step."""
        self._records.steps(
            StepRow(
                step=step,
                epoch=self._plan.epoch_at(step),
                lr=self._plan.lr(step - 1),
                loss=row.loss,
                grad_norm=row.told_norm,
                top1=row.top1,
            )
            for step, row in enumerate(rows, start=first)
        )

    def log(self, state: TrainState, stretch: Throughput) -> None:
        """A row of training.csv and a line for the person."""
        sums = state.sums
        row = LogRow(
            step=state.step,
            epoch=self._plan.epoch_at(state.step),
            lr=self._plan.lr(state.step - 1),
            loss=sums.loss / sums.steps,
            grad_norm=sums.mean(sums.grad_norm),
            top1=sums.mean(sums.top1),
            images_per_second=stretch.images_per_second,
            data_wait=stretch.data_wait,
        )
        self._records.log(row)
        self._console.log(row)
        self._tell_of_images()

    def _tell_of_images(self) -> None:
        """Name each image that could not be read, or is odd, once."""
        bad = self._feed.bad_images()
        for text in [*bad.values(), *self._feed.notes()]:
            if text not in self._told:
                self._told.add(text)
                self._console.warn(text)

    def score(self, state: TrainState, score: Score) -> None:
        """The score, every prediction behind it, and the surest mistakes to look at."""
        row = score_row(score, step=state.step, epoch=self._plan.epoch_at(state.step))
        self._records.score(row)
        earlier = [top1 for step, top1 in state.scores.items() if step != state.step]
        self._console.score(row, best=bool(earlier) and score.top1 > max(earlier))
        rows = _predictions_of(score, self._feed.names(score.indices))
        folder = self._records.folder
        write_predictions(folder, rows)
        worst = [rows[place].index for place in find_worst_mistakes(rows)]
        self._tell_of_images()
        if worst:
            write_worst(folder, worst, pixels=self._feed.thumbnails(worst), step=state.step)

    def score_averaged(self, state: TrainState, score: Score) -> None:
        """The score of the averaged weights, beside the raw ones'."""
        row = score_row(score, step=state.step, epoch=self._plan.epoch_at(state.step))
        self._records.averaged_score(row)
        self._console.print(f"averaged weights: top-1 {row.top1:.2%}, loss {row.loss:.4f}")


def score_row(score: Score, *, step: int, epoch: float) -> ScoreRow:
    """A score with its interval, ready to be written down."""
    return ScoreRow(
        step=step,
        epoch=epoch,
        scored=score.scored,
        top1=score.top1,
        top5=score.top5,
        loss=score.loss,
        interval95=wilson_interval(score.hits, score.scored),
    )


def _predictions_of(score: Score, names: list[str]) -> list[Prediction]:
    """One row per scored image."""
    return [
        Prediction(
            index=int(index),
            id=name,
            label=int(label),
            top=tuple(int(guess) for guess in ranked),
            confidence=float(confidence),
        )
        for index, name, label, ranked, confidence in zip(
            score.indices, names, score.labels, score.ranked, score.confidence, strict=True
        )
    ]
