"""From an old command to the answer: the new command and what became of every option."""

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from phalanx.config.schema import OPTIONS
from phalanx.errors import ConfigError, join_problems
from phalanx.port.dialects import ChosenScript, choose_script
from phalanx.port.launchers import VARIABLES, read_launch_facts
from phalanx.port.match import match_words
from phalanx.port.new_command import NewCommand, quote_word
from phalanx.port.old_command import OldCommand, read_old_command
from phalanx.port.preset_values import (
    find_same_rate,
    has_preset,
    is_same_value,
    lay_over,
    read_preset_values,
)
from phalanx.port.table import (
    TARGET,
    Effect,
    GivenOption,
    OldOption,
    OldValues,
    Outcome,
    OutcomeKind,
)
from phalanx.port.words import OldLine

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
_MODEL_SECTIONS = ("model", "resnet", "efficientnet")
_LAYERS = (
    "program",
    "default",
    "config",
    "environment",
    "launcher",
    "command",
)  # the last one wins
_SAID = ("environment", "launcher", "command")  # the layers that stand in the command itself
_KEPT_VARIABLE = "is set for the new command, too"
_OptionsOf = Callable[[str], Collection[str]]  # the flags that a command of ours takes


@dataclass(frozen=True)
class PortedRow:
    """What became of one thing that the old command said or implied."""

    old: str
    new: str  # words of the new command; empty where there are none
    kind: OutcomeKind
    why: str
    source: str  # one of _LAYERS


@dataclass(frozen=True, kw_only=True)
class Ported:
    """The answer."""

    dialect: str
    title: str  # of the old program
    old: str  # the old command in one line
    command: NewCommand
    rows: tuple[PortedRow, ...]
    warnings: tuple[str, ...]
    config: str = ""  # a named entry that the old command asks for
    then: tuple[tuple[str, ...], ...] = ()  # commands for afterwards
    decided: Mapping[str, str] = field(default_factory=dict)  # all options, the preset's included

    def facts(self) -> dict[str, object]:
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


@dataclass
class _Entry:
    """An effect on its way into the command."""

    old: str
    effect: Effect
    kind: OutcomeKind
    source: str


@dataclass
class _Port:
    """A command while it is being ported."""

    old: OldCommand
    chosen: ChosenScript
    values: OldValues
    config_name: str = ""
    config_known: bool = True
    warnings: list[str] = field(default_factory=list)


def port_line(
    line: OldLine,
    options_of: _OptionsOf,
    *,
    dialect: str | None = None,
    overrides: Mapping[str, str] | None = None,
    local: bool = False,
) -> Ported:
    """The answer for one command; ConfigError for what no dialect can mean.

    overrides: options of ours that are laid over the result. local: without hosts.
    """
    old = read_old_command(line.words, line.environment)
    chosen = choose_script(old, dialect)
    if chosen.matched.problems:
        raise join_problems(chosen.matched.problems)
    port = _read_values(old, chosen)
    port.warnings += [f"{text}: was left out" for text in line.left_out]
    script = port.chosen.script
    made = _compose(port, options_of, overrides or {})
    command, entries = made.command, made.entries
    for entry in entries:
        command.launch |= entry.effect.launch
        command.variables |= entry.effect.variables
        port.warnings += [
            text if text.startswith("-") else f"{entry.old}: {text}"
            for text in entry.effect.warnings
        ]
    command.launch = {} if local else command.launch
    rows = _build_rows(entries, made.has, command, made.taken)
    is_known = port.config_known and not port.chosen.matched.wants_help
    notes = script.notes(port.values) if is_known else []
    return Ported(
        dialect=port.chosen.dialect.name,
        title=port.chosen.dialect.title,
        old=" ".join(map(quote_word, line.words)),
        command=command,
        rows=tuple(rows),
        warnings=tuple(dict.fromkeys([*port.warnings, *notes])),
        config=port.config_name,
        decided=_merge_flags(entries),
        then=tuple(words for entry in entries for words in entry.effect.then),
    )


@dataclass
class _Composed:
    """A new command, and what it was made of."""

    command: NewCommand
    entries: list[_Entry]
    has: Mapping[str, object]  # what the preset or model that it begins with already has
    taken: Collection[str]  # the flags that it takes


def _compose(port: _Port, options_of: _OptionsOf, overrides: Mapping[str, str]) -> _Composed:
    """The new command with the flags that its preset does not have."""
    entries, script = _list_entries(port), port.chosen.script
    preset, flags = _choose_preset(port), _merge_flags(entries)
    command = NewCommand(_COMMANDS[script.kind])
    if port.chosen.matched.wants_help:
        model = {"model": flags["model"]} if flags.get("model") else {}
        command.flags = {**model, "help": "true"}
        return _Composed(command, entries, {}, set(command.flags))
    has: dict[str, object] = {}
    if any(flags.get(name) for name in _ABOUT_A_RUN):
        # a run has its options: only what the command says itself is laid over them
        entries = [entry for entry in entries if entry.source in _SAID]
        flags, preset = _merge_flags(entries), None
    elif script.kind == "validate" and port.config_known and flags.get("model"):
        preset = flags["model"]  # of a model's name, no preset has a say
        has = {name: option.default for name, option in OPTIONS.items()} | {"model": preset}
    elif preset and script.kind not in _OTHER_TARGETS:
        has = read_preset_values(preset)
    taken = _choose_taken(options_of(command.name), flags, named=preset is None)
    has |= find_same_rate(flags, has)
    rest = {n: t for n, t in flags.items() if n in taken and not is_same_value(n, t, has)}
    target = {_OTHER_TARGETS.get(script.kind, TARGET): preset} if preset else {}
    command.flags = lay_over({**target, **_order(rest, entries)}, overrides)
    return _Composed(command, entries, has, taken)


def _read_values(old: OldCommand, chosen: ChosenScript) -> _Port:
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
        shards = given.get("shards", config.get("shards", ""))
        facts = replace(facts, devices_per_replica=int(shards) if shards.isdecimal() else None)
    options = chosen.script.options
    values = OldValues(
        options,
        given,
        config,
        kind=chosen.script.kind,
        launch=facts,
        environment=old.environment,
    )
    port = _Port(old, chosen, values, name, entry is not None or not name)
    port.warnings += chosen.warnings
    instead = chosen.script.instead(values)
    if instead is not None:
        script = chosen.dialect.scripts[instead[0]]
        matched = match_words(old.words, script.options)
        port.chosen = replace(chosen, script=script, matched=matched)
        values.kind = script.kind
        port.warnings += [instead[1]] if instead[1] else []
    for rivals in chosen.script.exclusive:
        both = [f"--{name}" for name in rivals if name in given]
        if len(both) > 1:
            raise ConfigError(f"{' and '.join(both)}: only one of them may be given; choose one")
    return port


def _to_values(given: Sequence[GivenOption]) -> dict[str, str]:
    return {one.option.name: one.text for one in given}


def _choose_preset(port: _Port) -> str | None:
    """Our preset that the new command begins with."""
    name, dialect = port.config_name, port.chosen.dialect
    if not name:
        return port.chosen.script.preset(port.values)
    if has_preset(name):
        return name
    if not port.config_known:
        port.warnings.append(
            f"--config {name}: no preset is called that here; `phalanx port --configs configs.yml` "
            "turns the entries of that file into presets"
        )
        return name
    return dialect.presets.get(name) or port.chosen.script.preset(port.values)


def _list_entries(port: _Port) -> list[_Entry]:
    """Everything the command says or implies, what counts least first."""
    values, script = port.values, port.chosen.script
    found: list[_Entry] = []
    if port.config_known and not port.chosen.matched.wants_help:
        for fact in script.facts(values):
            entry = _Entry("", Effect(flags=fact.flags, why=fact.why), "computed", "program")
            found.append(entry)
    for option in script.options:
        if not values.is_given(option.name) and port.config_known:
            text = values.text(option.name)
            if text:
                shown = f"no --{option.name}" if text == "false" else f"--{option.name} {text}"
                found.append(_apply(option, text, values, shown, "default"))
    for option in script.options:
        if option.name in values.config and option.name not in values.given:
            text = values.config[option.name]
            shown = f"--{option.name} {text}".removesuffix(" true")
            found.append(_apply(option, text, values, shown, "config"))
    found += _list_variables(port)
    for one in (*port.old.launcher_options, *port.old.profiler_options):
        found.append(_apply(one.option, one.text, values, one.written, "launcher"))
    for one in port.chosen.matched.given:
        found.append(_apply(one.option, one.text, values, one.written, "command"))
    return found


def _list_variables(port: _Port) -> list[_Entry]:
    """What became of the variables before the command."""
    found = []
    facts = port.values.launch
    for name, text in port.old.environment.items():
        kept = Effect(variables={name: text}, why=_KEPT_VARIABLE)
        effect = VARIABLES[name](text) if name in VARIABLES else kept
        kind: OutcomeKind = effect.kind or ("renamed" if name in VARIABLES else "kept")
        found.append(_Entry(f"{name}={text}", effect, kind, "environment"))
    if facts.name == "TF_CONFIG":
        hosts = [host.partition(":")[0] for host in facts.hosts]
        launch = {"host": ",".join(hosts)}
        port_number = facts.hosts[0].partition(":")[2]
        launch |= {"master-port": port_number} if port_number else {}
        why = "once, from one host: phalanx launch starts all of them"
        found.append(_Entry("TF_CONFIG", Effect(launch=launch, why=why), "computed", "environment"))
    return found


def _apply(option: OldOption, text: str, values: OldValues, old: str, source: str) -> _Entry:
    """The effect of one option."""
    outcome: Outcome = option.outcome
    effect = outcome.apply(text, values)
    if outcome.kind == "kept" and not effect.flags:
        effect = replace(effect, flags={option.name: text})
    return _Entry(old, effect, effect.kind or outcome.kind, source)


def _merge_flags(entries: Sequence[_Entry]) -> dict[str, str]:
    """The flags of all entries, later layers over earlier ones; an empty value takes one away."""
    merged: dict[str, str] = {}
    for entry in entries:
        for name, text in entry.effect.flags.items():
            merged[name] = text
    return {name: text for name, text in merged.items() if text}


def _order(flags: Mapping[str, str], entries: Sequence[_Entry]) -> dict[str, str]:
    """The flags in the order of the old command, then what config, default and program add."""
    order = [
        name
        for source in reversed(_LAYERS)
        for e in entries
        if e.source == source
        for name in e.effect.flags
    ]
    return {name: flags[name] for name in dict.fromkeys(order) if name in flags}


def _choose_taken(known: Collection[str], flags: Mapping[str, str], *, named: bool) -> set[str]:
    """The flags that the new command takes."""
    taken = {TARGET, *known}
    if named:
        taken -= {n for n in OPTIONS if OPTIONS[n].section in _MODEL_SECTIONS}
        taken -= {"image-size", "data"}  # which a run knows
    if flags.get("resume"):
        taken -= {n for n in OPTIONS if not OPTIONS[n].resumable}
    return taken


def _build_rows(
    entries: Sequence[_Entry],
    has: Mapping[str, object],
    command: NewCommand,
    taken: Collection[str],
) -> list[PortedRow]:
    """A row for each thing the command says, and for each implied one that adds to it."""
    flags = _merge_flags(entries)
    is_model = command.flags.get(TARGET, "") == has.get("model")
    already = "as it is by default" if is_model else "as the preset has it"
    last = {name: entry for entry in entries for name in entry.effect.flags}
    rows = []
    for entry in (e for source in reversed(_LAYERS) for e in entries if e.source == source):
        own = {n: t for n, t in entry.effect.flags.items() if flags.get(n) == t}
        written = {n: t for n, t in own.items() if n in taken}
        is_said = entry.source in _SAID
        added = {n: t for n, t in written.items() if not is_same_value(n, t, has)}
        shown = written if is_said else {n: t for n, t in added.items() if last[n] is entry}
        if not (is_said or shown or entry.effect.variables):
            continue
        words = NewCommand("", dict(shown)).words + command.spell_around(entry.effect)
        why, kind = entry.effect.why, entry.kind
        if own and not written:
            why, kind = "the new command has no use for it", "nothing"
        elif is_said and written and not added:
            why = "; ".join(filter(None, [why, already]))
        old = " ".join(entry.old.split())
        rows.append(PortedRow(old, " ".join(map(quote_word, words)), kind, why, entry.source))
    return rows
