"""The options that differ from those that a run was started with."""

from collections.abc import Mapping
from typing import Any

from phalanx.config.read import EXCLUSIVE, Settings
from phalanx.config.schema import OPTIONS

SHAPING = (  # options that decide which weights a model has, and group norm's layout
    "model",
    "norm-type",
    "enable-fast-groupnorm",
    "shortcut-type",
    "stage1-projection",
    "efficientnet-group-dim",
    "efficientnet-expand-ratio",
)


def find_changes(settings: Settings, stored: Mapping[str, Any]) -> dict[str, str]:
    """The changed options that a resume must not change, each with the run's original flag.

    The flag is empty if the run was started without one.
    """
    now = settings.config.flat()
    changed = [
        name
        for name in OPTIONS
        if name in stored and now[name] != stored[name] and not OPTIONS[name].resumable
    ]
    # leave out indirect changes, such as the steps that --epochs replaces
    changed = [name for name in changed if settings.origins[name] == "flag"] or changed
    return {name: _find_replaced(name, stored, now) for name in changed}


def format_flag(name: str, value: Any) -> str:
    """An option with its value, as written on the command line.

    >>> format_flag("epochs", 2.0), format_flag("validation", False), format_flag("steps", None)
    ('--epochs 2', '--validation false', '--steps null')
    """
    text = str(value).lower() if isinstance(value, bool) else str(value).removesuffix(".0")
    return f"--{name} {'null' if value is None else text}"


def _find_replaced(name: str, stored: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The original flag that an option, or an option exclusive with it, replaces."""
    rivals = next((group for group in EXCLUSIVE if name in group), ())
    gone = [r for r in rivals if r != name and stored.get(r) not in (None, now[r])]
    old = gone[0] if gone else name
    return "" if stored[old] is None else format_flag(old, stored[old])
