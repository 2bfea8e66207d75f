"""Keys of a configs.yml matched with the options of a program, and which program that is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from phalanx.config.text import FALSE_WORDS, TRUE_WORDS, YamlEntry
from phalanx.dialects.table import TRUE, Dialect, GivenOption, OldOption, nothing
from phalanx.errors import ConfigError, join_problems, suggest
from phalanx.port.config_file import OldEntry
from phalanx.port.dialect_choice import DIALECTS, ChosenScript
from phalanx.port.match import MatchedWords, find_option, find_wrong_value, normalise_values

_FALSE = "false"
_UNSET = nothing("it has no value, which is as if it were not there")
_OFF = nothing("off, as it is without the key")


@dataclass(frozen=True)
class MatchedFile:
    """The entries of a file in the words of one program."""

    dialect: Dialect
    entries: Mapping[str, MatchedWords]  # by name
    warnings: tuple[str, ...] = ()

    def choose(self, entry: OldEntry) -> ChosenScript:
        """What is ported for an entry."""
        script = self.dialect.scripts[self.dialect.main_script]
        matched = self.entries[entry.name]
        return ChosenScript(self.dialect, script, matched, (*self.warnings, *matched.notes))

    def refuse_problems(self, entries: Sequence[OldEntry]) -> None:
        """Tell all that is wrong with these entries; what several merge is told once."""
        problems = [text for entry in entries for text in self.entries[entry.name].problems]
        if problems:
            raise join_problems(list(dict.fromkeys(problems)))


def match_file(entries: Sequence[OldEntry], asked: str | None, path: Path) -> MatchedFile:
    """The program that knows the keys of a file best; asked: by name, or none."""
    if asked is not None and asked not in DIALECTS:
        raise ConfigError(f"--dialect {asked}: no such dialect; {suggest(asked, DIALECTS)}")
    dialects = [DIALECTS[asked]] if asked else list(DIALECTS.values())
    dialects = [dialect for dialect in dialects if dialect.configs]
    if not dialects:
        raise ConfigError(
            f"--dialect {asked}: that program read no configs.yml; leave --dialect out"
        )
    tried = [_try_dialect(entries, dialect, path) for dialect in dialects]
    ranked = sorted(tried, key=_rank)
    best = ranked[0]
    same = [one.dialect for one in ranked if _rank(one) == _rank(best)]
    forms = {id(one.configs): one.name for one in reversed(same)}  # one of those that share a file
    if len(forms) == 1:
        return best
    others = " or ".join(name for name in forms.values() if name != best.dialect.name)
    warning = (
        f"taken as entries of {best.dialect.title} ({best.dialect.name}); --dialect {others} if "
        "they are not"
    )
    return replace(best, warnings=(warning,))


def _try_dialect(entries: Sequence[OldEntry], dialect: Dialect, path: Path) -> MatchedFile:
    options = dialect.scripts[dialect.main_script].options
    matched = {entry.name: _match_keys(entry.keys, options, path) for entry in entries}
    for found in matched.values() if dialect.key_note else ():
        found.notes += [f"{name}: {dialect.key_note}" for name in found.abbreviated]
    return MatchedFile(dialect, matched)


def _rank(choice: MatchedFile) -> tuple[int, int]:
    """What speaks against a program: keys that it does not know, and prefixes."""
    found = choice.entries.values()
    return sum(len(one.problems) for one in found), sum(one.prefixes for one in found)


def _match_keys(
    keys: Sequence[YamlEntry], options: Sequence[OldOption], path: Path
) -> MatchedWords:
    """The options that keys stand for; of two spellings of one, the later counts."""
    found = MatchedWords()
    for key in keys:
        given = _match_key(found, key, options, f"{path}:{key.line}")
        if given is None:
            continue
        earlier = [one for one in found.given if one.option.name == given.option.name]
        for one in earlier:
            found.given.remove(one)
            found.notes.append(f"{one.written}: does not count; {given.written} says otherwise")
        found.given.append(given)
    return found


def _match_key(
    found: MatchedWords, key: YamlEntry, options: Sequence[OldOption], where: str
) -> GivenOption | None:
    """The option of one key; what is wrong with it goes to the problems."""
    name, texts = key.key.replace("_", "-"), _read_texts(key.node)
    written = f"{key.key}: {_spell(key.node)}"
    opposite = next((option for option in options if option.name == f"no-{name}"), None)
    if opposite and texts and not any(name in option.names for option in options):
        # the attribute that a flag such as --no-validation set to false
        return _match_switch(found, opposite, written, _negate(texts), where)
    option, problem, is_prefix = find_option(key.key, options, dashes="")
    if option is None:
        found.problems.append(f"{where}: {problem}")
        found.unknown.append(key.key)
        return None
    if is_prefix:
        found.prefixes += 1
        found.abbreviated.append(f"{key.key}, taken as {option.name.replace('-', '_')}")
    if not texts:
        return GivenOption(replace(option, outcome=_UNSET), written, ())
    if option.takes == "flag":
        return _match_switch(found, option, written, texts, where)
    texts = texts if option.takes in ("two", "many", "bools") else [",".join(texts)]
    has_braces = isinstance(option.default, str) and option.default.startswith("{")
    problem = find_wrong_value(option, f"{where}: {key.key}", texts)
    if isinstance(key.node, yaml.MappingNode) and not has_braces:
        problem = f"{where}: {key.key}: expected a value, got a mapping"
    if problem:
        found.problems.append(problem)
        return None
    return GivenOption(option, written, tuple(normalise_values(option, texts)))


def _match_switch(
    found: MatchedWords, option: OldOption, written: str, texts: Sequence[str], where: str
) -> GivenOption | None:
    """A flag, which in YAML is true or false."""
    text = texts[0].lower()
    if len(texts) != 1 or text not in TRUE_WORDS + FALSE_WORDS:
        found.problems.append(f"{where}: {written.partition(':')[0]}: expected true or false")
        return None
    if text in TRUE_WORDS:
        return GivenOption(option, written, (TRUE,))
    if option.default == _FALSE:
        return GivenOption(option, written, (_FALSE,))
    return GivenOption(replace(option, outcome=_OFF), written, ())


def _negate(texts: Sequence[str]) -> list[str]:
    """The words of a switch turned round; others as they are."""
    words = {word: _FALSE for word in TRUE_WORDS} | {word: TRUE for word in FALSE_WORDS}
    return [words.get(text.lower(), text) for text in texts]


def _read_texts(node: yaml.Node) -> list[str]:
    """A value as the words that it would be on a command line."""
    if isinstance(node, yaml.SequenceNode):
        return [_spell(item) for item in node.value]
    return [] if node.tag == "tag:yaml.org,2002:null" else [_spell(node)]


def _spell(node: yaml.Node) -> str:
    """A value as it could be written in one line."""
    if isinstance(node, yaml.MappingNode):
        pairs = [f"{_spell(key)}: {_spell(value)}" for key, value in node.value]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(node, yaml.SequenceNode):
        return f"[{', '.join(map(_spell, node.value))}]"
    return str(node.value)
