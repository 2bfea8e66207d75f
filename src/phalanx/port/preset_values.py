"""What a preset already has, and what is laid over it."""

from collections.abc import Mapping
from math import isclose, prod

from phalanx.config.presets import find_old_preset, find_preset
from phalanx.config.read import EXCLUSIVE, MODEL_DEFAULTS, read_settings
from phalanx.config.text import parse_option_text
from phalanx.errors import ConfigError

_BATCH_OPTIONS = ("batch-size", "gradient-accumulation", "replicas")
_LENGTHS = ("warmup-epoch", "lr-decay-length", "lr-decay-period", "lr-epoch-decay")
_AUTOMATIC = {"gradient-accumulation": 1}  # what an option is that nobody gave


def name_preset(name: str) -> str | None:
    """The name by which a preset or file of ours is found, if any.

    An entry of ./configs.yml in the words of an older program is none, and hides none.
    """
    try:
        preset = find_preset(name)
        if preset.entry_name is None or _is_readable(name):
            return name
        return find_old_preset(name).full_name
    except ConfigError:
        return None


def _is_readable(name: str) -> bool:
    try:
        read_settings(name)
    except ConfigError:
        return False
    return True


def read_preset_values(preset: str, model: str | None) -> dict[str, object]:
    """The values of a preset's options; none where it cannot be read here.

    model: of the command; another one than the preset's does without some of its options.
    """
    try:
        has: dict[str, object] = read_settings(preset).config.flat()
    except ConfigError:
        return {}
    left_out = () if model in (None, has["model"]) else MODEL_DEFAULTS
    return {name: value for name, value in has.items() if name not in left_out}


def find_same_rate(flags: Mapping[str, str], has: Mapping[str, object]) -> dict[str, object]:
    """The rate per image that comes to the preset's own rate, where the command has such a one."""
    exponent = flags.get("base-learning-rate")
    sizes = [flags.get(n) or has.get(n) or 1 for n in _BATCH_OPTIONS]
    if exponent is None or has.get("base-learning-rate") is not None:
        return {}
    rate = 2 ** float(exponent) * prod(int(str(size)) for size in sizes)
    own = has.get("lr")
    same = isinstance(own, float) and isclose(rate, own, rel_tol=1e-8)
    return {"base-learning-rate": float(exponent)} if same else {}


def is_same_value(name: str, text: str, has: Mapping[str, object]) -> bool:
    """Whether the preset already has this value."""
    if name not in has:
        return False
    own = _AUTOMATIC.get(name) if has[name] is None else has[name]
    try:
        return bool(parse_option_text(name, text) == own)
    except ValueError:
        return False


def find_overridden(overrides: Mapping[str, str]) -> dict[str, str]:
    """The flags that options of ours overrule, each with the one that counts.

    In a run of another length, the preset's warm-up counts, which is shortened where it must be.
    """
    length = next((name for name in ("steps", "epochs") if name in overrides), None)
    found = dict.fromkeys(_LENGTHS, length) if length else {}
    for group in EXCLUSIVE:
        given = next((name for name in group if name in overrides), None)
        found |= dict.fromkeys(group, given) if given else {}
    if overrides.get("data") in ("generated", "synthetic"):
        found["data-dir"] = "data"
    return found | {name: name for name in overrides}


def apply_overrides(flags: Mapping[str, str], overrides: Mapping[str, str]) -> dict[str, str]:
    """The flags under options of ours; what these exclude is left out."""
    overruled = find_overridden(overrides)
    return {n: text for n, text in flags.items() if overruled.get(n, n) == n} | dict(overrides)
