"""The state of a sweep: sweep.json, the only file that a resume relies on.

It is written atomically, before and after every event of a trial. Optuna's study is rebuilt from
it for each trial, so that a sweep that was killed and resumed takes the same course as one that
was not.
"""

import csv
import io
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from phalanx.disk import convert_disk_errors, sync_folder, write_atomically
from phalanx.errors import CheckpointError, ConfigError
from phalanx.report.folder import format_json, format_value, read_json_object
from phalanx.report.records import to_json_number
from phalanx.sweep.schema import SweepFile, Values

_FORMAT = 1  # raise it when sweep.json changes, and teach `load_sweep` the older form
_STATE_FILE, _FILE_COPY, _TABLE_FILE = "sweep.json", "sweep.yaml", "sweep.csv"
PAGE_FILE, LOCK_FILE = "sweep.html", "lock"
_FINISHED = ("done", "pruned", "failed")


@dataclass(frozen=True, kw_only=True)
class TrialScore:
    """One validation of a trial."""

    step: int
    epoch: float
    score: float
    interval95: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a sweep and its result."""

    number: int
    values: Values
    state: str = "running"  # or done, pruned, failed
    points: tuple[TrialScore, ...] = ()  # until it ended or was pruned
    seconds: float = 0.0
    exit_code: int | None = None
    reason: str = ""  # why it failed
    rungs: dict[str, float] | None = None  # what the pruner remembers of it
    process: tuple[str, int] | None = None  # host and process id of the one that trains it

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"trial-{self.number:03}"

    @property
    def score(self) -> float | None:
        """The newest score."""
        return self.points[-1].score if self.points else None

    @property
    def epochs(self) -> float:
        """How far it got, by its newest score."""
        return self.points[-1].epoch if self.points else 0.0


@dataclass(frozen=True)
class _StoredSweep:
    """What a resume reads from sweep.json."""

    name: str
    file: dict[str, Any]
    trials: tuple[Trial, ...]


@dataclass(frozen=True, kw_only=True)
class SweepState:
    """A sweep and its trials, in its folder."""

    folder: Path
    sweep: SweepFile
    trials: tuple[Trial, ...] = ()

    @property
    def finished_trials(self) -> tuple[Trial, ...]:
        """The trials that have ended."""
        return tuple(trial for trial in self.trials if trial.state in _FINISHED)

    @property
    def is_finished(self) -> bool:
        """Whether all trials are."""
        return len(self.finished_trials) >= self.sweep.trials

    @property
    def best(self) -> Trial | None:
        """The best of the trials that are done; the first among equals."""
        done = [trial for trial in self.trials if trial.state == "done"]
        return min(done, key=self._rank, default=None)

    def _rank(self, trial: Trial) -> float:
        """A number that is lower for a better score."""
        if trial.score is None or math.isnan(trial.score):
            return math.inf
        return -trial.score if self.sweep.wants_highest else trial.score

    def sort_trials(self) -> list[Trial]:
        """The trials, best first; then those that were pruned, failed or are still running."""
        order = ("done", "pruned", "running", "failed")
        return sorted(self.trials, key=lambda t: (order.index(t.state), self._rank(t), t.number))

    def with_trial(self, trial: Trial) -> "SweepState":
        """The state with a trial added or replaced; also on disk."""
        others = [other for other in self.trials if other.number != trial.number]
        trials = tuple(sorted([*others, trial], key=lambda one: one.number))
        return replace(self, trials=trials).write()

    def without_trials(self, trials: Sequence[Trial]) -> "SweepState":
        """The state without these trials; also on disk."""
        others = tuple(trial for trial in self.trials if trial not in trials)
        return replace(self, trials=others).write()

    def write(self) -> "SweepState":
        """Write the state to disk; returns it."""
        write_atomically(self.folder / _STATE_FILE, format_json(self.to_dict()))
        write_atomically(self.folder / _TABLE_FILE, self.as_csv())
        return self

    def command(self, trial: Trial) -> str:
        """The command line that repeats a single trial."""
        preset = self.sweep.preset_for(trial.values)
        words = ["phalanx", "train", *([preset] if preset else [])]
        for name, text in self.sweep.flags_for(trial.values).items():
            words += [f"--{name}", text]
        return shlex.join(words)

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        best = self.best
        return {
            "format": _FORMAT,
            "name": self.sweep.name,
            "finished": self.is_finished,
            "best": None if best is None else best.number,
            "command": None if best is None else self.command(best),
            "file": self.sweep.to_dict(),
            "trials": [_trial_facts(trial) for trial in self.trials],
        }

    def as_csv(self) -> str:
        """The trials as a table for other programs, best first."""
        file = io.StringIO()
        rows = csv.writer(file, lineterminator="\n")
        goal = self.sweep.goal
        bounds = (f"{goal}_low", f"{goal}_high") if goal == "top1" else ()
        names = ["trial", "state", goal, *bounds, *self.sweep.search, "epochs", "seconds", "reason"]
        rows.writerow(names)
        for trial in self.sort_trials():
            interval = trial.points[-1].interval95 if trial.points else None
            row: list[object] = [trial.number, trial.state, trial.score]  # None is an empty cell
            row += (interval or ("", "")) if bounds else ()
            row += [trial.values.get(name, "") for name in self.sweep.search]
            rows.writerow([*row, trial.epochs, f"{trial.seconds:.1f}", trial.reason])
        return file.getvalue()


def _trial_facts(trial: Trial) -> dict[str, Any]:
    """A trial, for JSON, which cannot represent non-finite numbers."""
    facts = asdict(trial)
    facts["score"] = to_json_number(trial.score)
    facts["epochs"] = trial.epochs
    for point in facts["points"]:
        point["score"] = to_json_number(point["score"])
    facts["rungs"] = trial.rungs and {k: to_json_number(v) for k, v in trial.rungs.items()}
    return facts


def is_sweep_folder(folder: Path) -> bool:
    """Whether a folder holds a sweep."""
    return (folder / _STATE_FILE).is_file()


def create_sweep_folder(folder: Path) -> None:
    """Make a folder durably, unless it holds a sweep; raises if it is used otherwise."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--sweep-dir {folder}: is a file; choose another --sweep-dir")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if names - {_FILE_COPY, LOCK_FILE} and not is_sweep_folder(folder):
        raise ConfigError(
            f"--sweep-dir {folder}: is not empty and holds no sweep; choose another --sweep-dir"
        )
    with convert_disk_errors(folder, "--sweep-dir"):
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)


def create_sweep(folder: Path, sweep: SweepFile) -> SweepState:
    """A new sweep in a free folder."""
    create_sweep_folder(folder)
    write_atomically(folder / _FILE_COPY, sweep.text)
    return SweepState(folder=folder, sweep=sweep).write()


def load_sweep(folder: Path, sweep: SweepFile) -> SweepState:
    """The sweep in a folder, with the current file."""
    path = folder / _STATE_FILE
    facts = read_json_object(path)
    found = facts.get("format")
    if not isinstance(found, int) or found > _FORMAT:
        raise CheckpointError(
            f"{path}: format {found} is not one this version reads ({_FORMAT}); use the version of "
            "Phalanx that wrote it, or a later one"
        )
    try:
        stored = TypeAdapter(_StoredSweep).validate_python(facts)
    except ValidationError as cause:
        first = cause.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{path}: is damaged ({where}: {first['msg']}); restore it from a copy"
        ) from cause
    sweep = sweep.model_copy(update={"name": stored.name})
    _refuse_other_file(stored.file, sweep.to_dict(), folder)
    if sweep.to_dict() != stored.file:
        write_atomically(folder / _FILE_COPY, sweep.text)
    return SweepState(folder=folder, sweep=sweep, trials=stored.trials).write()


def _refuse_other_file(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Refuse a file in which more has changed than the number of trials, which may only grow."""
    changed = [
        f"{name} was {old}, is {new}"
        for key in now
        for name, old, new in _find_differences(key, before.get(key), now[key])
        if key != "trials"
    ]
    if now["trials"] < before["trials"]:
        changed.append(f"trials was {before['trials']}, is {now['trials']}; it may only grow")
    if changed:
        raise ConfigError(
            f"{folder}: was started with a different file: {'; '.join(changed)}. Restore the old "
            f"file ({folder / _FILE_COPY}), or start over with another --sweep-dir"
        )


def _find_differences(name: str, old: Any, new: Any) -> list[tuple[str, str, str]]:
    """Where two facts differ, as (dotted name, old, new)."""
    if old == new:
        return []
    if name in ("options", "search") and isinstance(old, dict):
        keys = dict.fromkeys([*old, *new])
        found = [_find_differences(f"{name} {key}", old.get(key), new.get(key)) for key in keys]
        return [one for some in found for one in some]
    old_text, new_text = ("not given" if v is None else format_value(v) for v in (old, new))
    return [(name, old_text, new_text)]
