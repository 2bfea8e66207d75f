"""`phalanx port --configs FILE`: entries of an old configs.yml become presets."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.cli.command import ParsedArgs
from phalanx.cli.port_plan import (
    PortedPlan,
    list_flags,
    list_ported_plan,
    plan_ported,
    port_by_data,
    to_facts,
)
from phalanx.cli.port_text import print_answer
from phalanx.config.schema import SPELLINGS
from phalanx.disk import write_atomically
from phalanx.errors import ConfigError
from phalanx.port.config_file import OldEntry, choose_entries, read_config_file
from phalanx.port.config_keys import MatchedFile, match_file
from phalanx.port.new_command import NewCommand
from phalanx.port.ported_command import port_entry

_NOT_WITH_CONFIGS = {  # flags that are about commands: what to do instead
    "--run": "train with a preset: phalanx train --config FILE",
    "--file": "port its commands by themselves",
}


@dataclass(frozen=True)
class _PortedEntry:
    """An entry as a preset."""

    name: str
    plan: PortedPlan
    path: Path  # of the file that it is, or would be, written to

    @property
    def command(self) -> NewCommand:
        """The command that trains with it; variables cannot stand in a preset."""
        return replace(self.plan.answer.command, flags={"config": str(self.path)})

    @property
    def text(self) -> str:
        """The preset as a file."""
        answer = self.plan.answer
        comment = f"{self.name}, an entry of a configs.yml of {answer.title}"
        if answer.command.variables:
            comment += f"\ntrain with it: {self.command.line}"
        return answer.command.dump_yaml(comment)


def port_configs(own: ParsedArgs, names: Sequence[str]) -> int:
    """Port the entries of a file; print the presets, or write them where that is asked for."""
    for flag, way_out in _NOT_WITH_CONFIGS.items():
        if own[flag]:
            raise ConfigError(f"{flag}: is for commands, and --configs for entries; {way_out}")
    source = Path(own["--configs"])
    if not source.exists():
        raise ConfigError(
            f"--configs {source}: no such file; name the configs.yml of the old program"
        )
    entries = read_config_file(source)
    chosen = choose_entries(entries, names, source)
    matched = match_file(entries, own["--dialect"], source)
    folder = Path(own["--save"]) if own["--save"] else None
    with _suggest_fewer_entries(len(chosen)):
        matched.refuse_problems(chosen)
        ported = [_port(entry, matched, own, folder or Path()) for entry in chosen]
    if folder:
        _write(folder, ported)
    if own["--json"]:
        facts = [{"entry": one.name, "preset": one.text, **to_facts(one.plan)} for one in ported]
        print(json.dumps(facts[0] if len(facts) == 1 else facts, indent=2))
        return 0
    for place, one in enumerate(ported):
        print("\n" * bool(place), end="")
        head = "" if folder else one.text.rstrip("\n")
        answer = replace(one.plan.answer, command=one.command)
        print_answer(answer, list_ported_plan(one.plan), one.plan.problem, head)
    parts = [entry.name for entry in entries if entry.is_part and entry not in chosen]
    if parts and not names:
        print(
            f"left out: {', '.join(parts)}: only parts of other entries; name one after the file "
            "to port it, too",
            file=sys.stderr,
        )
    return 0


@contextmanager
def _suggest_fewer_entries(count: int) -> Iterator[None]:
    """A block in which one of several entries may be refused: the others can be ported alone."""
    try:
        yield
    except ConfigError as error:
        if count == 1:
            raise
        way_out = "to leave an entry out, name those to port after the file"
        raise ConfigError(f"{error}\n{way_out}") from None


def _port(entry: OldEntry, matched: MatchedFile, own: ParsedArgs, folder: Path) -> _PortedEntry:
    """An entry with its plan."""
    overrides = {SPELLINGS[name]: text for name, text in own.flags.items()}
    try:
        chosen = matched.choose(entry)
        answer = port_by_data(
            lambda images: port_entry(
                entry.name, chosen, list_flags, overrides=overrides, images=images
            )
        )
    except ConfigError as error:
        raise ConfigError(f"{entry.name}: {error}") from None
    return _PortedEntry(entry.name, plan_ported(answer), folder / _name_file(entry.name))


def _name_file(name: str) -> str:
    """The file of a preset; that of a part shows in a folder, too."""
    if "/" in name or "\0" in name or not name.lstrip("."):
        raise ConfigError(f"{name!r}: cannot be the name of a file; rename the entry")
    return f"{name.lstrip('.')}.yaml"


def _write(folder: Path, ported: Sequence[_PortedEntry]) -> None:
    """Write all presets, or none where one of the files is there."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--save {folder}: is a file; with --configs, name a folder for presets")
    there = next((one.path for one in ported if one.path.exists()), None)
    if there:
        raise ConfigError(f"--save {folder}: {there} exists already; remove it, or name another")
    folder.mkdir(parents=True, exist_ok=True)
    for one in ported:
        write_atomically(one.path, one.text)
        print(f"wrote {one.path}; train with it: {one.command.line}", file=sys.stderr)
