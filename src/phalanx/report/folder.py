"""The run folder, which contains everything about one training run, and how it is written.

config.yaml        every option                     run.json         facts about the run
metrics.jsonl      one line per step                lock             held by the training process
training.csv       one row per log point            validation.csv   one row per evaluation
log.txt            what the console printed         predictions.csv  the newest evaluation
worst.npz          its most confident mistakes      summary.json     the result in numbers
report.html        the result as a page             checkpoints/     what a resume reads
trackers/          ids, states and logs of trackers    tensorboard/, wandb/   their files
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from phalanx.catalog.plugins import format_plugin_flag
from phalanx.disk import (
    convert_disk_errors,
    file_lock,
    quote_path,
    remove_dead_parts,
    remove_quietly,
    sync_folder,
    write_atomically,
)
from phalanx.errors import CheckpointError, ConfigError

_FORMAT = 1  # raise it when run.json changes, and teach `RunFolder.facts` to read the older one


def format_json(value: Any) -> str:
    """Readable JSON: indented, in the order given, ending in a newline."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a run; CheckpointError if it cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="surrogateescape"))
    except OSError as cause:
        raise CheckpointError(f"{path}: cannot be read ({cause.strerror})") from cause
    except (ValueError, RecursionError) as cause:
        raise CheckpointError(
            f"{path}: is damaged: it is not JSON ({cause}); restore it from a copy"
        ) from cause
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: is damaged: it holds no JSON object; restore it from a copy"
        )
    return value


def flatten_facts(values: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested facts of run.json as (dotted name, text) pairs."""
    if not isinstance(values, dict):
        return [(prefix, str(values))]
    pairs: list[tuple[str, str]] = []
    for name, value in values.items():
        pairs += flatten_facts(value, f"{prefix}.{name}" if prefix else str(name))
    return pairs


@dataclass(frozen=True)
class RunFolder:
    """One run on disk."""

    path: Path
    is_new: bool = False  # whether this process created the folder

    @property
    def config(self) -> Path:
        """Every option, as YAML."""
        return self.path / "config.yaml"

    @property
    def run(self) -> Path:
        """Facts about the run, as JSON."""
        return self.path / "run.json"

    @property
    def log(self) -> Path:
        """What the console printed, as text."""
        return self.path / "log.txt"

    @property
    def summary(self) -> Path:
        """The result in numbers, as JSON."""
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        """The result as an HTML page."""
        return self.path / "report.html"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def config_text(self) -> str:
        """The text of config.yaml."""
        try:
            return self.config.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as cause:
            raise CheckpointError(f"{self.config}: cannot be read ({cause})") from cause

    @property
    def options(self) -> dict[str, str]:
        """Every option and its value, as text exactly as in config.yaml."""
        try:
            # the base loader leaves 16.16 and 5e-5 as text
            values = yaml.load(self.config_text, Loader=yaml.BaseLoader)
        except (yaml.YAMLError, RecursionError) as cause:
            raise CheckpointError(
                f"{self.config}: is damaged: it is not YAML; restore it from a copy"
            ) from cause
        if not isinstance(values, dict):
            raise CheckpointError(
                f"{self.config}: is damaged: it holds no options; restore it from a copy"
            )
        return {str(name): format_value(value) for name, value in values.items()}

    @property
    def plugin_flag(self) -> str:
        """The --plugin flag for commands that continue this run, after a space; often empty."""
        try:
            names = self.options.get("plugin", "")
        except CheckpointError:  # used in messages about something else
            names = ""
        return format_plugin_flag(names if names not in ("null", "") else None)

    @property
    def resume_command(self) -> str:
        """The command that continues this run."""
        return f"phalanx train --resume {quote_path(self.path)}{self.plugin_flag}"

    @property
    def fork_command(self) -> str:
        """The command that starts a new run from this one."""
        return f"phalanx train --fork {quote_path(self.path)} --run-dir NEW{self.plugin_flag}"

    @property
    def has_steps(self) -> bool:
        """Whether a step was recorded."""
        try:
            return (self.path / "metrics.jsonl").stat().st_size > 0
        except FileNotFoundError:
            return False

    def discard(self) -> None:
        """Remove the files of a run that has trained nothing, as far as possible."""
        facts = ("config.yaml", "run.json", "lock", "log.txt", "metrics.jsonl", "blackbox.json")
        for name in facts:
            remove_quietly(self.path / name)
        if self.is_new:
            with suppress(OSError):  # there are other files in it
                self.path.rmdir()

    @property
    def facts(self) -> dict[str, Any]:
        """The contents of run.json; CheckpointError if they cannot be read."""
        facts = read_json_object(self.run)
        found = facts.get("format")
        if not isinstance(found, int):
            raise CheckpointError(
                f"{self.run}: is damaged: it has no format number; restore it from a copy"
            )
        if found > _FORMAT:
            raise CheckpointError(
                f"{self.run}: format {found} is newer than this program ({_FORMAT}); "
                "use the version of Phalanx that wrote it, or a later one"
            )
        return facts

    def update_facts(self, **changes: Any) -> None:
        """Change some facts in run.json, atomically."""
        write_atomically(self.run, format_json({**self.facts, **changes}))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Context in which only this process trains the run; the lock ends with the process."""
        with file_lock(self.path / "lock", self._make_lock_error) as handle:
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": _utc_now()}
            with convert_disk_errors(self.path / "lock"):
                os.ftruncate(handle, 0)
                os.write(handle, json.dumps(owner).encode())
            yield

    def _make_lock_error(self) -> CheckpointError:
        """The error to raise if another process has the lock."""
        try:
            owner = json.loads((self.path / "lock").read_text(encoding="utf-8"))
            who = f"process {owner['pid']} on {owner['host']} since {owner['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            who = "another process"  # it has just taken the lock and not yet written who it is
        return CheckpointError(
            f"{self.path}: is being trained by {who}; stop it first, or start a new "
            f"run from it: {self.fork_command}"
        )


def format_value(value: Any) -> str:
    """A value of a YAML or JSON file on one line."""
    if isinstance(value, list):
        return f"[{', '.join(format_value(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {format_value(item)}' for key, item in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _utc_now() -> str:
    """The time in UTC, to the second, as ISO 8601."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def is_run_folder(path: Path) -> bool:
    """Whether this folder contains a run."""
    return (path / "run.json").is_file()


def name_run_folder(name: str) -> Path:
    """runs/NAME-TIME, with a number if two runs start in the same second."""
    stem = f"runs/{name}-{datetime.now():%Y%m%d-%H%M%S}"
    names = (stem, *(f"{stem}-{number}" for number in range(2, 1000)))
    return Path(next(each for each in names if not Path(each).exists()))


def create_run(path: Path, *, config_text: str, facts: dict[str, Any]) -> RunFolder:
    """A new run folder, with config.yaml and run.json."""
    with convert_disk_errors(path, "--run-dir"):  # also if the name is too long
        _refuse_used(path, config_text)
        is_new = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        sync_folder(path.parent)
    run = RunFolder(path, is_new)
    try:
        write_atomically(run.config, config_text)
        # run.json is written last: a folder that has it is complete
        write_atomically(run.run, format_json({"format": _FORMAT, "created": _utc_now(), **facts}))
    except KeyboardInterrupt:
        run.discard()  # the same command can be started again
        raise
    return run


def _refuse_used(path: Path, config_text: str) -> None:
    """Raise unless `path` is free: absent, an empty folder, or this run killed at its start."""
    if is_run_folder(path):
        raise ConfigError(
            f"--run-dir {path}: already holds a run; continue it with --resume {quote_path(path)}"
            f"{RunFolder(path).plugin_flag}, or choose another --run-dir"
        )
    if path.is_dir():
        remove_dead_parts(path)
    if path.is_dir() and any(path.iterdir()) and not _holds_only_config(path, config_text):
        raise ConfigError(f"--run-dir {path}: is not empty; choose another --run-dir")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--run-dir {path}: is a file; choose another --run-dir")


def _holds_only_config(path: Path, config_text: str) -> bool:
    config = RunFolder(path).config
    return list(path.iterdir()) == [config] and config.read_bytes() == config_text.encode()


def open_run(path: Path) -> RunFolder:
    """The run in an existing folder."""
    if is_run_folder(path):
        return RunFolder(path)
    what = "there is no such folder" if not path.exists() else "is not a run folder"
    raise CheckpointError(
        f"{path}: {what}; a run folder holds run.json, config.yaml and checkpoints/"
        f"{_suggest_run(path)}"
    )


def _suggest_run(path: Path) -> str:
    """A run the user may have meant: a parent of this path, or a sibling with a similar name."""
    outer = next((p for p in path.absolute().parents if is_run_folder(p)), None)
    if outer:
        return f"; it is inside the run {outer}"
    folder = path.absolute().parent
    siblings = folder.iterdir() if folder.is_dir() else []
    names = [p.name for p in siblings if is_run_folder(p)]
    similar = get_close_matches(path.name, names, n=3, cutoff=0.4)
    options = " or ".join(str(path.parent / name) for name in similar)
    return f"; did you mean {options}?" if similar else ""
