"""How a dialect is written: a table of options, and what becomes of each.

A dialect is one older program: its scripts, and for each script a table of its options. A row says
what the option takes, what it is where nobody gives it, and its outcome:

    number_row("momentum", kept(), default="0.9")
    OldOption("optimiser", renamed("optimizer", {"SGD": "sgd", "RMSprop": "rmsprop_tf"}))
    OldOption("enable-half-partials", renamed("half-partials"), takes="flag")
    number_row("base-learning-rate", computed(_find_rate, "2^n x the batch"), number=EXPONENT)
    whole_row("prefetch-depth", elsewhere("workers read ahead by themselves"))
    count_row("batch-size", kept("the micro-batch"))

Outcomes: `kept` (same name, same value), `renamed` (another name, or other words for the values),
`computed` (a function of the value and of all other options, which gives an Effect), `elsewhere`
(done another way on this hardware, perhaps by options of ours), `nothing` (no counterpart, and why
nothing is lost). The function of a computed row gets the value as text and the OldValues, and
looks up whatever else it needs there: `values.whole("batch-size")`, `values.has("pipeline")`. It
can rely on numbers being what their rows declare: others are refused before any outcome is asked.

`default` is the value that the older program takes where none is given: text, or a function of the
OldValues. Such values go the same way as given ones, so that a default that differs from ours
becomes an option of the new command. What the program always did without an option (how it padded,
how it cropped) is told by the script's `facts`.

The new command begins with a preset, which the script's `preset` names; an option that the preset
already has is not written again. Everything is text, as it stands on a command line.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from phalanx.dialects.numbers import COUNT, NUMBER, WHOLE, NumberKind

OutcomeKind = Literal["kept", "renamed", "computed", "elsewhere", "nothing"]
_Takes = Literal["one", "two", "many", "flag", "optional", "bool", "bools"]
KIND_WORDS = {  # as people read them
    "kept": "kept",
    "renamed": "renamed",
    "computed": "computed",
    "elsewhere": "done another way",
    "nothing": "no counterpart",
}
TRUE = "true"
TARGET = "@"  # the flag that is none: what a command is about, its first word


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What an old option sets, and why."""

    flags: Mapping[str, str] = field(default_factory=dict)  # of the new command; "" takes one away
    why: str = ""
    warnings: tuple[str, ...] = ()
    launch: Mapping[str, str] = field(default_factory=dict)  # of `phalanx launch`, if it is needed
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment
    kind: OutcomeKind | None = None  # where it is another one than the row's
    then: tuple[tuple[str, ...], ...] = ()  # commands to run afterwards


Apply = Callable[[str, "OldValues"], Effect]  # named port_ and what it ports
_Default = str | Callable[["OldValues"], str]


@dataclass(frozen=True)
class Outcome:
    """What becomes of an option, in general."""

    kind: OutcomeKind
    apply: Apply
    summary: str = ""  # for the documentation: the new name, how it is computed, why there is none


@dataclass(frozen=True)
class OldOption:
    """A row of a dialect's table."""

    name: str  # without dashes
    outcome: Outcome
    takes: _Takes = "one"
    number: NumberKind | None = None  # what a value has to be; None: any text
    choices: tuple[str, ...] = ()  # in any case of letters
    default: _Default | None = None
    aliases: tuple[str, ...] = ()
    bare: str = TRUE  # the value of an `optional` one that has none
    lacks_value: bool = False  # a README leaves its value out: it is taken as not given

    @property
    def names(self) -> tuple[str, ...]:
        """All spellings."""
        return (self.name, *self.aliases)


def kept(why: str = "") -> Outcome:
    """The option has the same name and meaning here."""
    return Outcome("kept", lambda text, values: Effect(why=why), why)


def renamed(name: str, words: Mapping[str, str] | None = None, why: str = "") -> Outcome:
    """The option has another name here, and maybe other words for its values."""
    lowered = {old.lower(): new for old, new in (words or {}).items()}

    def apply(text: str, values: OldValues) -> Effect:
        return Effect(flags={name: lowered.get(text.lower(), text)}, why=why)

    summary = "the run that the command is about" if name == TARGET else f"--{name}"
    return Outcome("renamed", apply, summary)


def computed(apply: Apply, summary: str) -> Outcome:
    """The value is worked out from this option and others."""
    return Outcome("computed", apply, summary)


def always(effect: Effect, summary: str) -> Outcome:
    """The effect is the same with every value."""
    return computed(lambda text, values: effect, summary)


def elsewhere(how: str, flags: Mapping[str, str] | None = None) -> Outcome:
    """The same is done in another way here."""
    return Outcome("elsewhere", lambda text, values: Effect(flags=flags or {}, why=how), how)


def nothing(why: str) -> Outcome:
    """There is no counterpart, and nothing is lost."""
    return Outcome("nothing", lambda text, values: Effect(why=why), why)


def only_with(option: str, used: Collection[str], outcome: Outcome, reason: str) -> Outcome:
    """An outcome that counts only with some values of another option, in lower case."""

    def apply(text: str, values: OldValues) -> Effect:
        if values.text(option).lower() not in used:
            return Effect(why=reason, kind="nothing")
        return outcome.apply(text, values)

    return Outcome(outcome.kind, apply, outcome.summary)


def complement(name: str) -> Outcome:
    """A share that is counted from the other end here."""

    def apply(text: str, values: OldValues) -> Effect:
        return Effect(flags={name: f"{1 - float(text):.10g}"}, why=f"1 - {text}")

    return computed(apply, f"--{name}, 1 minus the value")


def lost(why: str) -> Outcome:
    """There is no counterpart, and something is lost, which is told."""
    return Outcome("nothing", lambda text, values: Effect(why=why, warnings=(why,)), why)


def flag_row(
    name: str, outcome: Outcome, *aliases: str, default: _Default | None = None
) -> OldOption:
    """A row of an option without a value."""
    return OldOption(name, outcome, takes="flag", aliases=aliases, default=default)


def number_row(
    name: str,
    outcome: Outcome,
    *aliases: str,
    default: _Default | None = None,
    number: NumberKind = NUMBER,
) -> OldOption:
    """A row of an option that takes a number."""
    return OldOption(name, outcome, number=number, aliases=aliases, default=default)


whole_row = partial(number_row, number=WHOLE)
count_row = partial(number_row, number=COUNT)  # at least 1


def replace_rows(table: Sequence[OldOption], *rows: OldOption) -> tuple[OldOption, ...]:
    """The table with other rows of the same names, and with those that it did not have."""
    own = {row.name: row for row in rows}
    kept_rows = [own.pop(row.name, row) for row in table]
    return (*kept_rows, *own.values())


@dataclass(frozen=True)
class GivenOption:
    """An option as it stands in a command."""

    option: OldOption
    written: str  # as it was typed, with its values
    values: tuple[str, ...]

    @property
    def text(self) -> str:
        """Its value as one text."""
        lists = self.option.takes in ("two", "many", "bools")
        return ",".join(self.values) if lists else "".join(self.values[-1:])


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """What a launcher says about a run."""

    name: str = ""  # poprun, mpirun or TF_CONFIG; empty where there is none
    replicas: int | None = None  # over all hosts
    devices_per_replica: int | None = None
    hosts: tuple[str, ...] = ()


class OldValues:
    """All options of an old command, with what nobody gave filled in by config and default."""

    def __init__(
        self,
        options: Sequence[OldOption],
        given: Mapping[str, str],
        config: Mapping[str, str],
        *,
        kind: str = "train",
        launch: LaunchFacts | None = None,
        environment: Mapping[str, str] | None = None,
        images: int | None = None,
    ) -> None:
        self.kind = kind  # of the script: train, validate, ...
        self.launch = launch or LaunchFacts()
        self.environment = environment or {}
        self.images = images  # to train with, where they are here; else published counts hold
        self.config = config
        self.given = given
        self._options = {option.name: option for option in options}
        self._asked: list[str] = []  # defaults that are being looked up, so that none asks itself

    def text(self, name: str) -> str:
        """The value of an option; empty where there is none."""
        for values in (self.given, self.config):
            if name in values:
                return values[name]
        default = self._options[name].default if name in self._options else None
        if not callable(default):
            return default or ""
        if name in self._asked:
            raise AssertionError(f"the default of {name} asks for itself")
        self._asked.append(name)
        try:
            return default(self)
        finally:
            self._asked.remove(name)

    def number(self, name: str, default: float = 0.0) -> float:
        """The value as a number."""
        text = self.text(name)
        return float(text) if text else default

    def whole(self, name: str, default: int = 0) -> int:
        """The value as a whole number."""
        return int(self.number(name, default))

    def has(self, name: str) -> bool:
        """Whether a switch is on, or any value is there."""
        return self.text(name) not in ("", "false")

    def many(self, name: str) -> list[str]:
        """The values of an option that takes several."""
        return [part for part in self.text(name).split(",") if part]

    def is_given(self, name: str) -> bool:
        """Whether the command or its config says it."""
        return name in self.given or name in self.config


@dataclass(frozen=True)
class Fact:
    """Something the older program always did, as options of ours."""

    flags: Mapping[str, str]
    why: str


@dataclass(frozen=True, kw_only=True)
class Script:
    """A program of a dialect, and the command it becomes."""

    kind: str  # of the new command: a key of _COMMANDS in ported_command.py
    options: tuple[OldOption, ...]
    facts: Callable[[OldValues], list[Fact]] = lambda values: []
    preset: Callable[[OldValues], str] = lambda values: ""  # ours, which the command begins with
    instead: Callable[[OldValues], tuple[str, str] | None] = lambda values: None
    # another script that must be meant, and the warning
    exclusive: tuple[tuple[str, ...], ...] = ()  # options of which one is to be given
    notes: Callable[[OldValues], list[str]] = lambda values: []  # warnings about the whole
    about: str = ""  # how the new command stands to the script as a whole
    needs: tuple[str, ...] = ()  # options and variables: without all of them it never started


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """An older program."""

    name: str  # as --dialect takes it
    title: str
    scripts: Mapping[str, Script]  # by file name; of a module, its name and first word
    configs: Mapping[str, str] = field(default_factory=dict)  # named entries as options
    presets: Mapping[str, str] = field(default_factory=dict)  # ours, by the name of such an entry
    folders: tuple[str, ...] = ()  # parts of paths that only this program is found under
    main_script: str = "train.py"  # what is meant where a command forgets it
    conflicts: tuple[str, ...] = ()  # where README and code differ: what was decided, for the docs
    key_note: str = ""  # what to say of a key of its configs.yml that is not written out
