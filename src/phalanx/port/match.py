"""Old words matched with a table: `=` and spaces, lists, flags, prefixes as argparse has them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import takewhile
from os.path import expandvars

from phalanx.config.text import FALSE_WORDS, NEGATIVE_NUMBER, TRUE_WORDS
from phalanx.dialects.table import TRUE, GivenOption, OldOption


@dataclass
class MatchedWords:
    """What the words of a program were understood as."""

    given: list[GivenOption] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)  # from the first word that is no option
    unknown: list[str] = field(default_factory=list)  # options that the table does not have
    problems: list[str] = field(default_factory=list)  # what to say of them and of other mistakes
    wants_help: bool = False
    prefixes: int = 0  # names that were not written out
    abbreviated: list[str] = field(default_factory=list)  # which, of keys in YAML
    notes: list[str] = field(default_factory=list)  # what was understood otherwise than written


def match_words(
    words: Sequence[str], options: Sequence[OldOption], *, stops: bool = False
) -> MatchedWords:
    """The options among the words; stops: the first word that is no option ends them."""
    found = MatchedWords()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            found.wants_help = True
        elif is_option(word):
            _match_option(found, word, rest, options, most_unknown=1 if stops else None)
        elif stops:
            found.rest = [word, *rest]
            break
        elif word.startswith("$"):
            found.problems.append(
                f"{word}: stands for words that are not known here; write them in its place"
            )
        elif word != "--":
            found.problems.append(
                f"{word}: is not an option and belongs to none; put it after the option it is for, "
                "or quotes around a value with spaces in it"
            )
    return found


def is_option(word: str) -> bool:
    """Whether a word begins an option: a negative number does not."""
    return len(word) > 1 and word[0] == "-" and word != "--" and not NEGATIVE_NUMBER.fullmatch(word)


def _match_option(
    found: MatchedWords,
    word: str,
    rest: list[str],
    options: Sequence[OldOption],
    *,
    most_unknown: int | None,
) -> None:
    """Take one option and its values from the words.

    most_unknown: how many values an option that is not known may have.
    """
    dashed, equals, value = word.partition("=")
    option, problem, is_prefix = find_option(dashed, options)
    if option is None:
        found.problems.append(problem)
        found.unknown.append(dashed)
        values = 0 if equals else sum(1 for _ in takewhile(lambda w: not is_option(w), rest))
        del rest[: values if most_unknown is None else min(values, most_unknown)]
        return
    found.prefixes += is_prefix
    texts = [_fill_in(option, value)] if equals else _take_values(option, rest)
    written = word if equals else " ".join([word, *texts])
    if option.takes in ("one", "two", "many") and not texts:
        if not option.lacks_value:
            found.problems.append(f"{dashed}: expected a value after it")
            return
    elif option.takes == "flag" and equals:
        found.problems.append(f"{word}: takes no value; write {dashed}")
        return
    problem = find_wrong_value(option, dashed, texts)
    if problem:
        found.problems.append(problem)
        return
    found.given.append(GivenOption(option, written, tuple(normalise_values(option, texts))))


def find_option(
    written: str, options: Sequence[OldOption], *, dashes: str = "--"
) -> tuple[OldOption | None, str, bool]:
    """The row that a spelling means, or why there is none; and whether it is a prefix of it.

    dashes: what a name begins with; of a key in YAML, nothing, and it may have underscores.
    """
    name = written.lstrip("-") if dashes else written.replace("_", "-")
    exact = [option for option in options if name in option.names]
    if exact:
        return exact[0], "", False
    near = {
        spelling: option
        for option in options
        for spelling in option.names
        if written.startswith(dashes) and spelling.startswith(name)
    }
    meant = {option.name: option for option in near.values()}
    if len(meant) == 1:
        return next(iter(meant.values())), "", True
    underscores = not dashes and "_" in written
    if meant:
        names = ", ".join(dashes + spelling for spelling in sorted(near))
        names = names.replace("-", "_") if underscores else names
        return None, f"{written}: may stand for {names}; write the one you mean in full", False
    spellings = [dashes + spelling for option in options for spelling in option.names]
    close = " or ".join(get_close_matches(dashes + name, spellings, n=3))
    close = close.replace("-", "_") if underscores else close
    way_out = f"did you mean {close}?" if close else "no option is spelt like it"
    return None, f"{written}: the old program has no such option; {way_out}", False


def _is_worked_with(option: OldOption) -> bool:
    """Whether a value is more than a text that is handed on."""
    return option.number is not None or bool(option.choices) or option.takes in ("bool", "bools")


def _fill_in(option: OldOption, value: str) -> str:
    """A value with the variables that are set, where it has to be known."""
    return expandvars(value) if _is_worked_with(option) else value


def _take_values(option: OldOption, rest: list[str]) -> list[str]:
    """The words after an option that are its values."""
    values: list[str] = []
    most = {"one": 1, "two": 2, "optional": 1, "bool": 1, "flag": 0}.get(option.takes)
    while rest and not is_option(rest[0]) and rest[0] != "--":
        if most is not None and len(values) >= most:
            break
        value = _fill_in(option, rest[0])
        is_word = value.lower() in TRUE_WORDS + FALSE_WORDS or value.startswith("$")
        if option.takes == "bool" and not is_word:
            break
        values.append(value)
        rest.pop(0)
    return values


def find_wrong_value(option: OldOption, dashed: str, values: Sequence[str]) -> str:
    """What is wrong with the values; empty where nothing is. Text may hold variables."""
    for value in values:
        if "$" in value or value.startswith("<"):
            if not _is_worked_with(option):
                continue
            way_out = "set the variable, or write the value itself"
            return f"{dashed} {value}: the new command depends on what it is; {way_out}"
        if option.choices and value.lower() not in [c.lower() for c in option.choices]:
            near = get_close_matches(value, option.choices, n=1)
            way_out = f"did you mean {near[0]}?" if near else f"it was {_join(option.choices)}"
            return f"{dashed} {value}: the old program has no such choice; {way_out}"
        if option.number is not None and (problem := option.number.find_problem(value)):
            return f"{dashed}: {problem}"
        if option.takes in ("bool", "bools") and value.lower() not in TRUE_WORDS + FALSE_WORDS:
            return f"{dashed}: expected true or false, got {value!r}"
    return ""


def _join(choices: Sequence[str]) -> str:
    return f"{', '.join(choices[:-1])} or {choices[-1]}" if len(choices) > 1 else choices[0]


def normalise_values(option: OldOption, values: list[str]) -> list[str]:
    """The values as outcomes expect them: switches are true or false."""
    if option.takes == "flag":
        return [TRUE]
    if option.takes in ("bool", "bools"):
        return [str(value.lower() in TRUE_WORDS).lower() for value in values] or [TRUE]
    if option.takes == "optional" and not values:
        return [option.bare]
    return values
