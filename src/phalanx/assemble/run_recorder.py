"""Writes the events of the loop to the run folder and the console."""

from collections.abc import Sequence

from phalanx.assemble.feed import Feed
from phalanx.data.loading.trained_images import describe_trained_images, select_kept_checksums
from phalanx.engine.evaluate import Score
from phalanx.engine.state import StepMetrics, Throughput, TrainState
from phalanx.plan.plan import Plan
from phalanx.report.console import Console
from phalanx.report.predictions import (
    Prediction,
    find_worst_mistakes,
    write_predictions,
    write_worst_mistakes,
)
from phalanx.report.records import LogRow, Records, ScoreRow, StepRow
from phalanx.report.scores import wilson_interval
from phalanx.trackers.processes import Trackers


class RunRecorder:
    """Prints the events of a run and, in the process that `writes`, writes them to the records."""

    def __init__(
        self,
        records: Records,
        console: Console,
        *,
        plan: Plan,
        feeds: tuple[Feed, Feed],  # of the training and the validation images; may be the same
        classes: Sequence[str],
        writes: bool,
        trackers: Trackers,
    ) -> None:
        self._trackers = trackers
        self._records, self._console, self._plan = records, console, plan
        (self._feed, self._valid_feed), self._classes, self._writes = feeds, classes, writes
        self._warned: set[str] = set()

    def on_step(self, step: int) -> None:
        """Show progress."""
        self._console.progress(step)

    def on_metrics(self, first: int, rows: list[StepMetrics]) -> None:
        """Write a line of metrics.jsonl for each step."""
        if not self._writes:
            return
        self._records.add_steps(
            StepRow(
                step=step,
                epoch=self._plan.epoch_at(step),
                lr=self._plan.lr(step - 1),
                loss=row.loss,
                grad_norm=row.reported_grad_norm,
                top1=row.top1,
            )
            for step, row in enumerate(rows, start=first)
        )

    def on_log(self, state: TrainState, interval: Throughput) -> None:
        """Write a row of training.csv and print a line."""
        sums = state.sums
        row = LogRow(
            step=state.step,
            epoch=self._plan.epoch_at(state.step),
            lr=self._plan.lr(state.step - 1),
            loss=sums.loss / sums.steps,
            grad_norm=sums.mean(sums.grad_norm),
            top1=sums.mean(sums.top1),
            images_per_second=interval.images_per_second,
            data_wait=interval.data_wait,
        )
        if self._writes:
            self._records.add_log(row)
            self._trackers.notify(state.step)
        self._console.log(row)
        self._warn_of_images()

    def _warn_of_images(self) -> None:
        """Print new notes, and once a warning for each image that is bad or unusual."""
        self._feed.exchange_problems()
        while self._feed.new_notes:
            self._console.print(f"note: {self._feed.new_notes.pop(0)}")
        texts = {text: text for text in self._feed.bad_images().values()} | self._feed.notes()
        for key, text in texts.items():
            if key not in self._warned:
                self._warned.add(key)
                self._console.warn(text)

    def on_score(self, state: TrainState, score: Score) -> None:
        """Print and write the score, all predictions, and the most confident mistakes."""
        row = make_score_row(score, self._plan, step=state.step)
        earlier = [top1 for step, top1 in state.scores.items() if step != state.step]
        self._console.score(row, best=bool(earlier) and score.top1 > max(earlier))
        self._warn_of_images()
        self._warn_of_trained_images(state)
        if not self._writes:
            return
        self._records.add_score(row)
        self._trackers.notify(state.step)
        predictions = _list_predictions(score, self._feed.names(score.indices))
        write_predictions(self._records.folder, predictions, classes=self._classes)
        worst = [predictions[place].index for place in find_worst_mistakes(predictions)]
        if worst:
            pixels = self._feed.thumbnails(worst)
            write_worst_mistakes(self._records.folder, worst, pixels=pixels, step=state.step)

    def _warn_of_trained_images(self, state: TrainState) -> None:
        """Print, once, how many scored images were trained on before a fork or a change of data."""
        kept = select_kept_checksums(state.image_checksums)
        if not kept or "trained on" in self._warned:
            return
        note = describe_trained_images(kept, self._valid_feed.gather_scored_checksums())
        if note:
            self._warned.add("trained on")
            self._console.print(f"note: {note}")

    def on_averaged_score(self, state: TrainState, score: Score) -> None:
        """Print and write the score of the averaged weights."""
        row = make_score_row(score, self._plan, step=state.step)
        if self._writes:
            self._records.add_averaged_score(row)
            self._trackers.notify(state.step)
        self._console.print(f"averaged weights: top-1 {row.top1:.2%}, loss {row.loss:.4f}")


def make_score_row(score: Score, plan: Plan, *, step: int) -> ScoreRow:
    """A score with its 95 % interval, as a row of the records."""
    return ScoreRow(
        step=step,
        epoch=plan.epoch_at(step),
        scored=score.scored,
        top1=score.top1,
        top5=score.top5,
        loss=score.loss,
        interval95=wilson_interval(score.hits, score.scored),
    )


def _list_predictions(score: Score, names: list[str]) -> list[Prediction]:
    """One row per scored image."""
    columns = (score.indices, score.labels, score.ranked, score.confidence)
    return [
        Prediction(index=index, id=name, label=label, top=tuple(top), confidence=confidence)
        for name, index, label, top, confidence in zip(
            names, *(column.tolist() for column in columns), strict=True
        )
    ]
