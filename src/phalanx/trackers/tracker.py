"""The interface of all trackers, and what they know about a run."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import yaml

from phalanx.config.schema import OPTIONS
from phalanx.disk import write_atomically
from phalanx.report.folder import RunFolder, format_json, read_json_object

END = Literal["finished", "stopped", "failed"]
_NO_HYPERPARAMETERS = {n for n, o in OPTIONS.items() if o.section in ("run", "trackers")}
_SWEEP_FILE = "sweep.json"  # in the folder of a sweep's trials


@dataclass
class TrackerState:
    """The state that a tracker keeps between processes, in trackers/NAME.json of the run."""

    path: Path
    last_steps: dict[str, int] = field(default_factory=dict)  # the newest step logged, by table
    facts: dict[str, str] = field(default_factory=dict)  # such as the id of the tracker's run

    def save(self) -> None:
        """Write it atomically."""
        self.path.parent.mkdir(exist_ok=True)
        write_atomically(self.path, format_json({"told": self.last_steps, **self.facts}))


def load_state(run: RunFolder, tracker: str) -> TrackerState:
    """The tracker's state for a run; empty if it is new or its file is damaged."""
    state = TrackerState(run.path / "trackers" / f"{tracker}.json")
    with suppress(OSError, ValueError, AttributeError, TypeError, LookupError):
        saved = json.loads(state.path.read_text(encoding="utf-8"))
        state.last_steps = {str(name): int(step) for name, step in saved.pop("told").items()}
        state.facts = {str(name): str(value) for name, value in saved.items()}
    return state


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What is known about a run before its first step."""

    name: str
    folder: Path  # absolute
    command: str
    options: dict[str, Any]  # all, by the names of their flags
    chosen: dict[str, Any]  # hyperparameters set by a preset, a file or a flag
    group: str | None  # the sweep of which it is a trial

    def describe(self) -> dict[str, str]:
        """The run's folder and the command that started it, as strings."""
        return {"run_folder": str(self.folder), "command": self.command}


def read_run_facts(run: RunFolder) -> RunFacts:
    """The facts in a run's config.yaml and run.json."""
    options, facts = yaml.safe_load(run.config_text), run.facts
    folder = run.path.absolute()
    origins = facts.get("origins", {})
    return RunFacts(
        name=folder.name,
        folder=folder,
        command=str(facts.get("command", "")),
        options=options,
        chosen={
            name: value
            for name, value in options.items()
            if origins.get(name, "default") != "default" and name not in _NO_HYPERPARAMETERS
        },
        group=folder.parent.name if (folder.parent / _SWEEP_FILE).exists() else None,
    )


def read_results(run: RunFolder) -> dict[str, float]:
    """The numbers of summary.json, by name; empty for a run that is not finished."""
    if not run.summary.exists():
        return {}
    summary = read_json_object(run.summary)
    best = summary.get("best") or {}
    values = {**summary, "best/top1": best.get("top1"), "best/step": best.get("step")}
    return {
        f"result/{name}": float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


class Tracker(Protocol):
    """One tracker; its methods may raise any exception, and take any time."""

    def open(self, facts: RunFacts, state: TrackerState) -> str:
        """Start or continue the tracker's run; returns where the user can look at it."""

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Log the numbers of one step."""

    def flush(self) -> None:
        """Send what was logged, as far as that is possible without waiting."""

    def close(self, end: END, results: Mapping[str, float]) -> None:
        """End the tracker's run."""
