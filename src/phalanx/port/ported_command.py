"""From an old command to the answer: the new command and what became of every option."""

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from phalanx.config.schema import MODEL_SECTIONS, OPTIONS
from phalanx.dialects.table import TARGET, GivenOption, LaunchFacts, OldValues, OutcomeKind
from phalanx.errors import ConfigError, join_problems
from phalanx.port.dialect_choice import ChosenScript, choose_script
from phalanx.port.effects import (
    COMMAND_SOURCES,
    SOURCES,
    PortJob,
    SourcedEffect,
    list_effects,
    merge_flags,
    order_flags,
)
from phalanx.port.launchers import read_launch_facts
from phalanx.port.match import match_words
from phalanx.port.new_command import NewCommand, quote_word
from phalanx.port.old_command import OldCommand, read_old_command
from phalanx.port.preset_values import (
    apply_overrides,
    find_overridden,
    find_same_rate,
    is_same_value,
    name_preset,
    read_preset_values,
)
from phalanx.port.shell_text import OldLine

_COMMANDS = {  # what a script does: our command
    "train": "train",
    "validate": "validate",
    "resume": "train",
    "average": "average",
    "benchmark": "bench",
    "export": "export",
    "request": "request",
}
_OTHER_TARGETS = {"request": "serve"}  # flags that name the preset, where the first word does not
_ABOUT_A_RUN = ("resume", "fork", TARGET)  # flags that name one, which has options of its own
_ListFlags = Callable[[str], Collection[str]]  # the flags that a command of ours takes


@dataclass(frozen=True)
class PortedRow:
    """What became of one thing that the old command said or implied."""

    old: str
    new: str  # words of the new command; empty where there are none
    kind: OutcomeKind
    why: str
    source: str  # one of SOURCES


@dataclass(frozen=True, kw_only=True)
class PortedCommand:
    """An old command as one of ours: the answer of `phalanx port`."""

    dialect: str
    title: str  # of the old program
    old: str  # the old command in one line
    command: NewCommand
    rows: tuple[PortedRow, ...]
    warnings: tuple[str, ...]
    config: str = ""  # a named entry that the old command asks for
    then: tuple[tuple[str, ...], ...] = ()  # commands for afterwards
    decided: Mapping[str, str] = field(default_factory=dict)  # all options, the preset's included

    def to_dict(self) -> dict[str, object]:
        """The answer as plain values."""
        return {
            "dialect": self.dialect,
            "old": self.old,
            "command": ["phalanx", *self.command.words],
            "line": self.command.line,
            "variables": self.command.variables,
            "decided": dict(self.decided),
            "options": [vars(row) for row in self.rows],
            "warnings": list(self.warnings),
            "then": [" ".join(["phalanx", *words]) for words in self.then],
        }


def port_line(
    line: OldLine,
    list_flags: _ListFlags,
    *,
    dialect: str | None,
    overrides: Mapping[str, str] | None = None,
    local: bool = False,
    images: int | None = None,
) -> PortedCommand:
    """The answer for one command; ConfigError for what no dialect can mean.

    overrides: options of ours that are laid over the result. local: without hosts. images: those
    to train with, where they are here.
    """
    old = read_old_command(line.words, line.environment)
    chosen = choose_script(old, dialect)
    if chosen.matched.problems:
        raise join_problems(chosen.matched.problems)
    port = _read_values(old, chosen, images)
    if old.wrapper:
        port.warnings.append(
            f"{old.wrapper}: was left out; start the new command with it where it is needed"
        )
    port.warnings += [f"{text}: was left out" for text in line.left_out]
    port.warnings += [
        f"{text}: was left out; change to that folder first, or relative paths lead elsewhere"
        for text in line.moves
    ]
    answer = _port_job(port, list_flags, overrides or {}, local=local)
    return replace(answer, old=" ".join(map(quote_word, line.words)))


def port_entry(
    name: str,
    chosen: ChosenScript,
    list_flags: _ListFlags,
    *,
    overrides: Mapping[str, str],
    images: int | None,
) -> PortedCommand:
    """The answer for an entry of a configs.yml, whose keys were matched with a script's options.

    overrides: options of ours that are laid over the result. images: those to train with, where
    they are here.
    """
    config = _to_values([one for one in chosen.matched.given if one.values])
    _refuse_rivals(chosen, config)
    facts = _add_stages(LaunchFacts(), config)
    values = OldValues(chosen.script.options, {}, config, launch=facts, images=images)
    port = PortJob(OldCommand(), chosen, values, warnings=[*chosen.warnings])
    return replace(_port_job(port, list_flags, overrides, local=True), old=name)


def _port_job(
    port: PortJob, list_flags: _ListFlags, overrides: Mapping[str, str], *, local: bool
) -> PortedCommand:
    """The answer for a command or an entry whose options are known."""
    made = _compose_command(port, list_flags, overrides)
    command, entries = made.command, made.entries
    for entry in entries:
        command.launch |= entry.effect.launch
        command.variables |= entry.effect.variables
        port.warnings += _list_warnings(entry)
    command.launch = {} if local else command.launch
    rows = _build_rows(made, overrides)
    is_known = port.config_known and not port.chosen.matched.wants_help
    notes = port.chosen.script.notes(port.values) if is_known else []
    return PortedCommand(
        dialect=port.chosen.dialect.name,
        title=port.chosen.dialect.title,
        old="",
        command=command,
        rows=tuple(rows),
        warnings=tuple(dict.fromkeys([*port.warnings, *notes])),
        config=port.config_name,
        decided=merge_flags(entries),
        then=tuple(words for entry in entries for words in entry.effect.then),
    )


def _list_warnings(entry: SourcedEffect) -> list[str]:
    """The warnings of an effect, each with what it is about."""
    texts = entry.effect.warnings
    return [text if text.startswith("-") else f"{entry.old}: {text}" for text in texts]


@dataclass
class _ComposedCommand:
    """A new command, and what it was made of."""

    command: NewCommand
    entries: list[SourcedEffect]
    preset_values: Mapping[str, object]  # what the preset or model that it begins with already has
    accepted_flags: Collection[str]  # the flags that it takes


def _compose_command(
    port: PortJob, list_flags: _ListFlags, overrides: Mapping[str, str]
) -> _ComposedCommand:
    """The new command with the flags that its preset does not have."""
    entries, script = list_effects(port), port.chosen.script
    preset, flags = _choose_preset(port), merge_flags(entries)
    command = NewCommand(_COMMANDS[script.kind])
    if port.chosen.matched.wants_help:
        model = {"model": flags["model"]} if flags.get("model") else {}
        command.flags = {**model, "help": "true"}
        return _ComposedCommand(command, entries, {}, set(command.flags))
    preset_values: dict[str, object] = {}
    if any(flags.get(name) for name in _ABOUT_A_RUN):
        # a run has its options: only what the command says itself is laid over them
        entries = [entry for entry in entries if entry.source in COMMAND_SOURCES]
        flags, preset = merge_flags(entries), None
    elif script.kind == "validate" and port.config_known and flags.get("model"):
        preset = flags["model"]  # of a model's name, no preset has a say
        preset_values = {name: option.default for name, option in OPTIONS.items()} | {
            "model": preset
        }
    elif preset and script.kind not in _OTHER_TARGETS:  # whose options are those of a preset
        preset_values = read_preset_values(preset, flags.get("model"))
    accepted_flags = _choose_accepted_flags(list_flags(command.name), flags, named=preset is None)
    preset_values |= find_same_rate(flags, preset_values)
    rest = {
        n: t
        for n, t in flags.items()
        if n in accepted_flags and not is_same_value(n, t, preset_values)
    }
    target = {_OTHER_TARGETS.get(script.kind, TARGET): preset} if preset else {}
    command.flags = apply_overrides({**target, **order_flags(rest, entries)}, overrides)
    return _ComposedCommand(command, entries, preset_values, accepted_flags)


def _read_values(old: OldCommand, chosen: ChosenScript, images: int | None) -> PortJob:
    """The options with those of a named config below them."""
    given = _to_values(chosen.matched.given)
    name = given.get("config", "")
    entry = chosen.dialect.configs.get(name)
    config: dict[str, str] = {}
    if entry is not None:
        matched = match_words(shlex.split(entry), chosen.script.options)
        config = _to_values(matched.given)
    facts = read_launch_facts(old.launcher, old.launcher_options, old.environment)
    if facts.devices_per_replica is None:
        facts = _add_stages(facts, config | given)
    options = chosen.script.options
    values = OldValues(
        options,
        given,
        config,
        kind=chosen.script.kind,
        launch=facts,
        environment=old.environment,
        images=images,
    )
    port = PortJob(old, chosen, values, name, entry is not None or not name)
    port.warnings += chosen.warnings
    instead = chosen.script.instead(values)
    if instead is not None:
        script = chosen.dialect.scripts[instead[0]]
        matched = match_words(old.words, script.options)
        port.chosen = replace(chosen, script=script, matched=matched)
        values.kind = script.kind
        port.warnings += [instead[1]] if instead[1] else []
    _refuse_rivals(chosen, given)
    return port


def _add_stages(facts: LaunchFacts, values: Mapping[str, str]) -> LaunchFacts:
    """The facts with the devices of a replica that an option tells."""
    shards = values.get("shards", "")
    return replace(facts, devices_per_replica=int(shards) if shards.isdecimal() else None)


def _refuse_rivals(chosen: ChosenScript, given: Collection[str]) -> None:
    """Refuse two options of which one is to be given, in the words that they were given in."""
    for rivals in chosen.script.exclusive:
        if sum(name in given for name in rivals) > 1:
            written = [one for one in chosen.matched.given if one.option.name in rivals]
            names = dict.fromkeys(
                one.written.split()[0].rstrip(":").partition("=")[0] for one in written
            )
            raise ConfigError(f"{' and '.join(names)}: only one of them may be given; choose one")


def _to_values(given: Sequence[GivenOption]) -> dict[str, str]:
    return {one.option.name: one.text for one in given}


def _choose_preset(port: PortJob) -> str | None:
    """Our preset that the new command begins with."""
    name, dialect = port.config_name, port.chosen.dialect
    nearest = port.chosen.script.preset(port.values)
    if not name:
        return name_preset(nearest) or nearest or None
    own = dialect.presets.get(name)
    for choice in filter(None, (own, name)):
        found = name_preset(choice)
        if found:
            return found
    if not port.config_known:
        port.warnings.append(
            f"--config {name}: no preset is called that here; `phalanx port --configs configs.yml "
            "--save presets` turns the entries of that file into presets"
        )
        return name
    return own or nearest or None


def _choose_accepted_flags(
    known: Collection[str], flags: Mapping[str, str], *, named: bool
) -> set[str]:
    """The flags that the new command takes."""
    accepted_flags = {TARGET, *known}
    if named:
        accepted_flags -= {n for n in OPTIONS if OPTIONS[n].section in MODEL_SECTIONS}
        accepted_flags -= {"image-size", "data"}  # which a run knows
    if flags.get("resume"):
        accepted_flags -= {n for n in OPTIONS if not OPTIONS[n].resumable}
    return accepted_flags


def _build_rows(made: _ComposedCommand, overrides: Mapping[str, str]) -> list[PortedRow]:
    """A row for each thing the command says, and for each implied one that adds to it."""
    entries, preset_values, command = made.entries, made.preset_values, made.command
    flags, ours = merge_flags(entries), find_overridden(overrides)
    is_model = command.flags.get(TARGET, "") == preset_values.get("model")
    already = "as it is by default" if is_model else "as the preset has it"
    last = {name: entry for entry in entries for name in entry.effect.flags}
    rows = []
    for entry in (e for source in reversed(SOURCES) for e in entries if e.source == source):
        asked = {n: t for n, t in entry.effect.flags.items() if n not in ours}
        own = {n: t for n, t in asked.items() if flags.get(n) == t}
        written = {n: t for n, t in own.items() if n in made.accepted_flags}
        is_said = entry.source in COMMAND_SOURCES
        added = {n: t for n, t in written.items() if not is_same_value(n, t, preset_values)}
        shown = written if is_said else {n: t for n, t in added.items() if last[n] is entry}
        if not (is_said or shown or entry.effect.variables):
            continue
        words = NewCommand("", dict(shown)).words + command.spell_around(entry.effect)
        why, kind = entry.effect.why, entry.kind
        overruled = {n: flags[n] for n in asked if n not in own and n in flags}
        counts = {ours[n]: overrides[ours[n]] for n in entry.effect.flags if n in ours}
        if counts and not own:
            why = f"does not count beside {_spell(counts)}, which is given to `port`"
        elif own and not written:
            why, kind = "the new command has no use for it", "nothing"
        elif is_said and overruled and not own:
            why = _add_reason(why, f"{_spell(overruled)} counts, which is said elsewhere")
        elif is_said and written and not added:
            why = _add_reason(why, already)
        old = " ".join(entry.old.split())
        rows.append(PortedRow(old, " ".join(map(quote_word, words)), kind, why, entry.source))
    return rows


def _spell(flags: dict[str, str]) -> str:
    return " ".join(NewCommand("", flags).words)


def _add_reason(why: str, more: str) -> str:
    return "; ".join(filter(None, [why, more]))
