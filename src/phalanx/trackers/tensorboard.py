"""TensorBoard: event files in the folder `tensorboard` of the run."""

import time
from collections.abc import Mapping
from typing import Any

from phalanx.trackers.event_file import (
    EventFile,
    build_hyperparameter_end,
    build_hyperparameter_start,
    build_scalar_summary,
    build_text_summary,
)
from phalanx.trackers.tracker import END, RunFacts, TrackerState

# results by which runs are compared: columns of the hyperparameters page; the others are a text
_COMPARED = ("result/best/top1", "result/top1", "result/images_per_second")


class TensorBoard:
    """Numbers, options and hyperparameters for TensorBoard's pages."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._events: EventFile | None = None

    @property
    def events(self) -> EventFile:
        """The file, once it is open."""
        assert self._events is not None
        return self._events

    def open(self, facts: RunFacts, state: TrackerState) -> str:
        """Create the run's event file, or continue it."""
        self._events = EventFile(facts.folder / "tensorboard")
        # the file itself is the authority on what it holds
        state.last_steps = {}
        for tag, step in self.events.newest.items():
            table = tag.partition("/")[0]
            state.last_steps[table] = max(step, state.last_steps.get(table, 0))
        if self.events.is_new:
            self.events.add_summary(build_text_summary("options", _write_table(facts.options)))
            self.events.add_summary(build_text_summary("run", _write_table(facts.describe())))
            start = build_hyperparameter_start(facts.chosen, group=facts.name, begin=time.time())
            self.events.add_summary(start)
        self.flush()
        return f"tensorboard --logdir {facts.folder}"

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Add the numbers of a step."""
        self.events.add_summary(build_scalar_summary(values), step=step)

    def flush(self) -> None:
        """Make them visible to TensorBoard."""
        self.events.flush()

    def close(self, end: END, results: Mapping[str, float]) -> None:
        """Add the results, and how the run ended."""
        if results and "results" not in self.events.newest:
            shown = {name: value for name, value in results.items() if name in _COMPARED}
            self.events.add_summary(build_scalar_summary(shown), step=int(results["result/steps"]))
            self.events.add_summary(build_text_summary("results", _write_table(results)))
        if end != "stopped":  # a stopped run will be continued
            ended = build_hyperparameter_end(is_finished=end == "finished", end=time.time())
            self.events.add_summary(ended)
        self.events.close()


def _write_table(values: Mapping[str, Any]) -> str:
    """A Markdown table."""
    rows = "\n".join(f"| {name} | `{value}` |" for name, value in values.items())
    return f"| name | value |\n|---|---|\n{rows}"
