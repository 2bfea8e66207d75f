"""Hints for an option that does not exist: another trainer's name, or a typing error."""

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches

from phalanx.catalog.other_trainers import OTHER_NAMES
from phalanx.catalog.other_values import describe_our_name
from phalanx.config.schema import OPTIONS, SPELLINGS
from phalanx.errors import suggest
from phalanx.units import format_multiples

_FLAG = re.compile(r"--([a-z0-9-]+)")
_DEVICE_COUNT = re.compile(r"--(num-ipus|replication-factor|batch-size)[= ](\d{1,9})(?!\S)")


def suggest_option(word: str, known: Collection[str], given: Collection[str] = ()) -> str:
    """A hint for an unknown option, with or without its dashes.

    given: the other options of the command, which are not suggested.

    >>> suggest_option("--optimiser", ["--optimizer"]), suggest_option("epohcs", ["epochs"])
    ('it is --optimizer here', "did you mean 'epochs'?")
    """
    plain, name = _to_flag_name(word), _find_name(word)
    ours = {flag.lstrip("-"): flag for flag in known}
    beside = {_find_name(other) for other in given if other != word}
    if name in ours:  # spelt in another way, such as --batch_size
        return _refer_to(name, beside, f"did you mean {ours[name]!r}?")
    answer = OTHER_NAMES.get(plain, "")
    if answer and _can_follow(answer, ours):
        flag = _FLAG.match(answer)
        return _refer_to(flag[1], beside, describe_our_name(answer)) if flag else answer
    if answer:  # no option here does the same, least of all one of a similar spelling
        return suggest("", known)
    positive = OPTIONS.get(plain.removeprefix("no-"))
    if positive and positive.name in ours and positive.type is bool:
        return f"write --{positive.name} false"
    # compared without dashes, which would make any two short names similar
    near = get_close_matches(plain, ours, n=1)
    if not near:
        return suggest("", known)
    return _refer_to(near[0], beside, f"did you mean {ours[near[0]]!r}?")


def explain_device_counts(words: Sequence[str]) -> list[str]:
    """Our options for --num-ipus and --replication-factor of PopART, or why they are invalid.

    Its rules are explained in its terms. There, --batch-size counts the images of all replicas.

    >>> explain_device_counts("--num-ipus 8 --replication-factor=4 --batch-size 32".split())
    ['--num-ipus 8 --replication-factor 4: write --replicas 4 --shards 2 --batch-size 8']
    """
    found = _DEVICE_COUNT.findall(" ".join(words).replace("_", "-"))
    counts = {name: int(number) for name, number in found}
    replicas = counts.get("replication-factor", 1)
    devices, images = counts.get("num-ipus", replicas), counts.get("batch-size", 0)
    if not {"num-ipus", "replication-factor"} & counts.keys() or devices * replicas == 0:
        return []
    problems = []
    if devices % replicas:
        problems.append(
            f"--num-ipus {devices}: the number of devices must be a multiple of the replication "
            f"factor, {replicas}; use {format_multiples(devices, replicas)}"
        )
    if images % devices:
        problems.append(
            f"--batch-size {images}: the batch size must be a multiple of the number of devices, "
            f"{devices}; use {format_multiples(images, devices)}"
        )
    theirs = " ".join(f"--{name} {n}" for name, n in counts.items() if name != "batch-size")
    ours = f"--replicas {replicas} --shards {devices // replicas}"
    ours += f" --batch-size {images // replicas}" if images else ""
    return problems or [f"{theirs}: write {ours}"]


def _to_flag_name(word: str) -> str:
    """A word in the spelling of flags.

    >>> _to_flag_name("--maxEpochs"), _to_flag_name("max_epochs"), _to_flag_name("BN-decay")
    ('max-epochs', 'max-epochs', 'bn-decay')
    """
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", word.lstrip("-"))
    return apart.lower().replace("_", "-")


def _find_name(word: str) -> str:
    """The option that a word stands for, or the word in the spelling of flags."""
    plain = _to_flag_name(word)
    return SPELLINGS.get(plain, plain)


def _can_follow(answer: str, ours: Collection[str]) -> bool:
    """Whether a command has the options that an answer names."""
    named = [flag for flag in _FLAG.findall(answer) if flag in OPTIONS]
    # an answer that names none is about training, and all commands that train have --seed
    return all(flag in ours for flag in named or ["seed"])


def _refer_to(name: str, beside: Collection[str], hint: str) -> str:
    """The hint, unless the option it names was also given."""
    return f"--{name} is given as well; leave this one out" if name in beside else hint
