"""What an old command says or implies, as effects by source: what counts least first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from phalanx.dialects.table import Effect, OldOption, OldValues, Outcome, OutcomeKind
from phalanx.port.dialect_choice import ChosenScript
from phalanx.port.launchers import VARIABLES
from phalanx.port.old_command import OldCommand

SOURCES = ("program", "default", "config", "environment", "launcher", "command")  # the last wins
COMMAND_SOURCES = (
    "environment",
    "launcher",
    "command",
)  # those that stand in the command itself
_KEPT_VARIABLE = "is set for the new command, too"


@dataclass
class SourcedEffect:
    """An effect on the new command, and what of the old one it comes from."""

    old: str
    effect: Effect
    kind: OutcomeKind
    source: str


@dataclass
class PortJob:
    """A command while it is being ported."""

    old: OldCommand
    chosen: ChosenScript
    values: OldValues
    config_name: str = ""
    config_known: bool = True
    warnings: list[str] = field(default_factory=list)


def list_effects(port: PortJob) -> list[SourcedEffect]:
    """Everything the command says or implies, what counts least first."""
    values, script = port.values, port.chosen.script
    found: list[SourcedEffect] = []
    if port.config_known and not port.chosen.matched.wants_help:
        for fact in script.facts(values):
            entry = SourcedEffect("", Effect(flags=fact.flags, why=fact.why), "computed", "program")
            found.append(entry)
    for option in script.options:
        if not values.is_given(option.name) and port.config_known:
            text = values.text(option.name)
            if text:
                shown = f"no --{option.name}" if text == "false" else f"--{option.name} {text}"
                found.append(_apply(option, text, values, shown, "default"))
    said = {one.option.name for one in port.chosen.matched.given}
    for option in script.options:
        if option.name in values.config and option.name not in said:
            text = values.config[option.name]
            shown = f"--{option.name} {text}".removesuffix(" true")
            found.append(_apply(option, text, values, shown, "config"))
    found += _list_variables(port)
    found += _list_launchers(port)
    found += _list_script(port)
    for one in port.chosen.matched.given:
        found.append(_apply(one.option, one.text, values, one.written, "command"))
    return found


def _list_launchers(port: PortJob) -> list[SourcedEffect]:
    """What became of poprun, mpirun and gc-profile before the command."""
    profiled = Effect(flags={"profile": "trace"}, why="into the folder of the run")
    profiler = [SourcedEffect("gc-profile", profiled, "renamed", "launcher")] * port.old.is_profiled
    options = (*port.old.launcher_options, *port.old.profiler_options)
    own = [_apply(o.option, o.text, port.values, o.written, "launcher") for o in options]
    return [*profiler, *own]


def _list_script(port: PortJob) -> list[SourcedEffect]:
    """What is to say about the script as a whole."""
    about = port.chosen.script.about
    entry = SourcedEffect(port.old.script_name, Effect(why=about), "elsewhere", "command")
    return [entry] if about else []


def _list_variables(port: PortJob) -> list[SourcedEffect]:
    """What became of the variables before the command."""
    found = []
    facts = port.values.launch
    for name, text in port.old.environment.items():
        kept = Effect(variables={name: text}, why=_KEPT_VARIABLE)
        effect = VARIABLES[name](text) if name in VARIABLES else kept
        kind: OutcomeKind = effect.kind or ("renamed" if name in VARIABLES else "kept")
        found.append(SourcedEffect(f"{name}={text}", effect, kind, "environment"))
    if facts.name == "TF_CONFIG":
        hosts = [host.partition(":")[0] for host in facts.hosts]
        launch = {"host": ",".join(hosts)}
        port_number = facts.hosts[0].partition(":")[2]
        launch |= {"master-port": port_number} if port_number else {}
        why = "once, from one host: phalanx launch starts all of them"
        found.append(
            SourcedEffect("TF_CONFIG", Effect(launch=launch, why=why), "computed", "environment")
        )
    return found


def _apply(option: OldOption, text: str, values: OldValues, old: str, source: str) -> SourcedEffect:
    """The effect of one option."""
    outcome: Outcome = option.outcome
    effect = outcome.apply(text, values)
    kind = effect.kind or outcome.kind
    if outcome.kind == kind == "kept" and not effect.flags:
        effect = replace(effect, flags={option.name: text})
    return SourcedEffect(old, effect, kind, source)


def merge_flags(entries: Sequence[SourcedEffect]) -> dict[str, str]:
    """The flags of all entries, later sources over earlier ones; an empty value takes one away."""
    merged: dict[str, str] = {}
    for entry in entries:
        for name, text in entry.effect.flags.items():
            merged[name] = text
    return {name: text for name, text in merged.items() if text}


def order_flags(flags: Mapping[str, str], entries: Sequence[SourcedEffect]) -> dict[str, str]:
    """The flags in the order of the old command, then what config, default and program add."""
    order = [
        name
        for source in reversed(SOURCES)
        for e in entries
        if e.source == source
        for name in e.effect.flags
    ]
    return {name: flags[name] for name in dict.fromkeys(order) if name in flags}
