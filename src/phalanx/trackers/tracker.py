"""What all trackers have in common."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import yaml

from phalanx.config.schema import OPTIONS
from phalanx.disk import write_atomically
from phalanx.report.folder import RunFolder, read_json_object, to_json

END = Literal["finished", "stopped", "failed"]
_NO_HYPERPARAMETERS = {n for n, o in OPTIONS.items() if o.section in ("run", "trackers")}
_SWEEP_FILE = "sweep.json"  # in the folder that a sweep keeps its trials in


@dataclass
class TrackerState:
    """What a tracker remembers from process to process, in trackers/NAME.json of the run."""

    path: Path
    told: dict[str, int] = field(default_factory=dict)  # by table of rows, the newest step
    facts: dict[str, str] = field(default_factory=dict)  # the id of the run there, for one

    def save(self) -> None:
        """Write it, whole or not at all."""
        self.path.parent.mkdir(exist_ok=True)
        write_atomically(self.path, to_json({"told": self.told, **self.facts}))


def load_state(run: RunFolder, tracker: str) -> TrackerState:
    """What the tracker remembers of a run; nothing where it is new, or its file is damaged."""
    state = TrackerState(run.path / "trackers" / f"{tracker}.json")
    with suppress(OSError, ValueError, AttributeError, TypeError, LookupError):
        saved = json.loads(state.path.read_text(encoding="utf-8"))
        state.told = {str(name): int(step) for name, step in saved.pop("told").items()}
        state.facts = {str(name): str(value) for name, value in saved.items()}
    return state


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What is known of a run before its first step."""

    name: str
    folder: Path  # absolute
    command: str
    options: dict[str, Any]  # all, by the names of their flags
    chosen: dict[str, Any]  # hyperparameters that a preset, a file or a flag has set
    group: str | None  # the sweep it is a trial of

    def describe(self) -> dict[str, str]:
        """Where the run lies and what started it, as texts."""
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
    """One tracker; its methods may raise whatever they like, and take as long."""

    def open(self, facts: RunFacts, state: TrackerState) -> str:
        """Begin a run there, or go on with it; where to look, for a person to read."""

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Take numbers of one step."""

    def flush(self) -> None:
        """See that what was logged is there, as far as that goes without waiting."""

    def close(self, end: END, results: Mapping[str, float]) -> None:
        """End the run there."""
