"""The way out of an option that does not exist: another trainer's word, or a slip."""

import re
from collections.abc import Collection
from difflib import get_close_matches

from phalanx.catalog.other_trainers import OTHER_NAMES
from phalanx.catalog.other_values import say_here
from phalanx.config.schema import OPTIONS, SPELLINGS
from phalanx.errors import suggest

_FLAG = re.compile(r"--([a-z0-9-]+)")


def suggest_option(word: str, known: Collection[str], given: Collection[str] = ()) -> str:
    """The way out of an option that is none of the known ones, with or without its dashes.

    given: the options beside it, which are no way out.

    >>> suggest_option("--optimiser", ["--optimizer"]), suggest_option("epohcs", ["epochs"])
    ('it is --optimizer here', "did you mean 'epochs'?")
    """
    plain, name = _to_flag_name(word), _find_name(word)
    ours = {flag.lstrip("-"): flag for flag in known}
    beside = {_find_name(other) for other in given if other != word}
    if name in ours:  # written in another way, such as --batch_size
        return _refer_to(name, beside, f"did you mean {ours[name]!r}?")
    answer = OTHER_NAMES.get(plain, "")
    if answer and _can_follow(answer, ours):
        flag = _FLAG.match(answer)
        return _refer_to(flag[1], beside, say_here(answer)) if flag else answer
    if answer:  # nothing here does what it means, least of all what is spelt alike
        return suggest("", known)
    positive = OPTIONS.get(plain.removeprefix("no-"))
    if positive and positive.name in ours and positive.type is bool:
        return f"write --{positive.name} false"
    nearest = next(iter(get_close_matches(word, known, n=1)), "")
    return _refer_to(nearest.lstrip("-"), beside, suggest(word, known))


def _to_flag_name(word: str) -> str:
    """A word as flags are written.

    >>> _to_flag_name("--maxEpochs"), _to_flag_name("max_epochs"), _to_flag_name("BN-decay")
    ('max-epochs', 'max-epochs', 'bn-decay')
    """
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", word.lstrip("-"))
    return apart.lower().replace("_", "-")


def _find_name(word: str) -> str:
    """The option that a word stands for, or the word as flags are written."""
    plain = _to_flag_name(word)
    return SPELLINGS.get(plain, plain)


def _can_follow(answer: str, ours: Collection[str]) -> bool:
    """Whether a command that has these options can do what an answer says."""
    named = [flag for flag in _FLAG.findall(answer) if flag in OPTIONS]
    # an answer that names none is about training, and whatever trains has --seed
    return all(flag in ours for flag in named or ["seed"])


def _refer_to(name: str, beside: Collection[str], hint: str) -> str:
    """The hint, unless the option it names was given beside the unknown one."""
    return f"--{name} is given as well; leave this one out" if name in beside else hint
