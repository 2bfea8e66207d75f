"""What options of today would change about a run that was started with others."""

from collections.abc import Mapping
from typing import Any

from phalanx.config.read import EXCLUSIVE, Settings
from phalanx.config.schema import OPTIONS


def find_changes(settings: Settings, stored: Mapping[str, Any]) -> dict[str, str]:
    """By option that a resume must not change, the flag the run was started with instead.

    The flag is empty where the run was started without one.
    """
    now = settings.config.flat()
    changed = [
        name
        for name in OPTIONS
        if name in stored and now[name] != stored[name] and not OPTIONS[name].resumable
    ]
    # what a flag brings along, such as the steps that --epochs replaces, goes without saying
    changed = [name for name in changed if settings.origins[name] == "flag"] or changed
    return {name: _find_replaced(name, stored, now) for name in changed}


def format_flag(name: str, value: Any) -> str:
    """An option with its value, as it is typed.

    >>> format_flag("epochs", 2.0), format_flag("validation", False), format_flag("steps", None)
    ('--epochs 2', '--validation false', '--steps null')
    """
    text = str(value).lower() if isinstance(value, bool) else str(value).removesuffix(".0")
    return f"--{name} {'null' if value is None else text}"


def _find_replaced(name: str, stored: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The flag that another one of its kind, or another value, takes the place of."""
    rivals = next((group for group in EXCLUSIVE if name in group), ())
    gone = [r for r in rivals if r != name and stored.get(r) not in (None, now[r])]
    old = gone[0] if gone else name
    return "" if stored[old] is None else format_flag(old, stored[old])
