"""The dialects, and which of them a command is written in."""

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.dialects.popart import POPART
from phalanx.dialects.pytorch import LIGHTNING, PYTORCH
from phalanx.dialects.runner import RUNNER
from phalanx.dialects.table import Dialect, Script
from phalanx.dialects.tf1 import TF1
from phalanx.dialects.tf2 import TF2
from phalanx.errors import ConfigError, suggest
from phalanx.port.match import MatchedWords, match_words
from phalanx.port.old_command import OldCommand

DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect for dialect in (TF1, TF2, PYTORCH, LIGHTNING, POPART)
}


@dataclass(frozen=True)
class ChosenScript:
    """A script of a dialect, and the options that were found for it."""

    dialect: Dialect
    script: Script
    matched: MatchedWords
    warnings: tuple[str, ...]


def choose_script(old: OldCommand, asked: str | None) -> ChosenScript:
    """The dialect and script of a command: the one that knows its options best."""
    if asked is not None and asked not in DIALECTS:
        raise ConfigError(f"--dialect {asked}: no such dialect; {suggest(asked, DIALECTS)}")
    dialects = [DIALECTS[asked]] if asked else list(DIALECTS.values())
    dialects = dialects if not old.script else [*dialects, RUNNER]
    found = [choice for dialect in dialects for choice in _try_dialect(old, dialect)]
    if not found:
        raise ConfigError(_describe_unknown_script(old, dialects))
    here = [choice for choice in found if _is_in_its_folder(old, choice.dialect)]
    _refuse_shared_config(here or found, asked)
    ranked = sorted(found, key=lambda choice: _rank(old, choice))
    best = ranked[0]
    same = [c for c in ranked[1:] if _rank(old, c) == _rank(old, best)]
    if not same:
        return best
    others = " or ".join(choice.dialect.name for choice in same)
    warning = (
        f"taken as a command of {best.dialect.title} ({best.dialect.name}); --dialect {others} "
        "if it is not"
    )
    return ChosenScript(best.dialect, best.script, best.matched, (*best.warnings, warning))


def _try_dialect(old: OldCommand, dialect: Dialect) -> list[ChosenScript]:
    """The script of a dialect that a command calls, with its words; none where it has no such."""
    name = old.script_name or dialect.main_script
    if name not in dialect.scripts:
        return []
    script = dialect.scripts[name]
    forgotten = f"the script is missing after the interpreter; taken as {name}"
    warnings = () if old.script else (forgotten,)
    return [ChosenScript(dialect, script, match_words(old.words, script.options), warnings)]


def _rank(old: OldCommand, choice: ChosenScript) -> tuple[int, int, int, int, int]:
    """What speaks against a choice: a path of another program, unknown options and configs."""
    matched, dialect = choice.matched, choice.dialect
    config = next((g.text for g in matched.given if g.option.name == "config"), "")
    return (
        len(matched.unknown) + len(matched.problems),
        int(not _is_in_its_folder(old, dialect)),
        int(_lacks_all(old, choice)),
        int(bool(config) and config not in dialect.configs),
        matched.prefixes,
    )


def _is_in_its_folder(old: OldCommand, dialect: Dialect) -> bool:
    """Whether the script's path is one that only this program is found under."""
    return any(folder in old.script for folder in dialect.folders)


def _lacks_all(old: OldCommand, choice: ChosenScript) -> bool:
    """Whether a command has nothing of what the script would not have started without."""
    needs = choice.script.needs
    given = {one.option.name for one in choice.matched.given} | set(old.environment)
    passed_on = " ".join(one.text for one in old.launcher_options)
    return bool(needs) and not any(name in given or name in passed_on for name in needs)


def _refuse_shared_config(found: list[ChosenScript], asked: str | None) -> None:
    """Refuse a config name that exists in two dialects, unless their options tell them apart."""
    fits = [choice for choice in found if not choice.matched.problems]
    names = {
        choice.dialect.name: given.text
        for choice in fits
        for given in choice.matched.given
        if given.option.name == "config" and given.text in choice.dialect.configs
    }
    if len(names) > 1 and asked is None:
        config = next(iter(names.values()))
        raise ConfigError(
            f"--config {config}: exists in {' and in '.join(names)}; say which one is meant: "
            f"--dialect {next(iter(names))}"
        )


def _describe_unknown_script(old: OldCommand, dialects: list[Dialect]) -> str:
    known = sorted({name for dialect in dialects for name in dialect.scripts})
    return f"{old.script_name}: no such script is known; {suggest(old.script_name, known)}"
