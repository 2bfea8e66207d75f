"""Which trackers a run wants, and whether they are installed."""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from phalanx.config.schema import OPTIONS, Config
from phalanx.errors import ConfigError
from phalanx.plan.world import is_first_rank

_MODULES = {  # by the option that asks for it, what a tracker needs beside Phalanx
    "tensorboard": None,
    "wandb": "wandb",
    "mlflow": "mlflow",
}


def choose_trackers(config: Config) -> dict[str, dict[str, Any]]:
    """By tracker that the options ask for, its own options."""
    values = config.flat()
    own = [name for name, option in OPTIONS.items() if option.section == "trackers"]
    return {
        tracker: {name: values[name] for name in own if name.startswith(f"{tracker}-")}
        for tracker in _MODULES
        if values[tracker]
    }


def refuse_missing_trackers(config: Config) -> None:
    """Raise where a tracker is asked for that is not installed, with the line that installs it."""
    if is_first_rank():  # others have no trackers
        refuse_missing(choose_trackers(config))


def refuse_missing(trackers: Iterable[str]) -> None:
    """The same for these alone."""
    for tracker in trackers:
        module = _MODULES[tracker]
        spec = find_spec(module) if module else None
        # without an origin it is a mere folder of that name, such as wandb leaves behind
        if module and (spec is None or spec.origin is None):
            raise ConfigError(
                f"--{tracker}: {tracker} is not installed; pip install 'phalanx[{tracker}]'"
            )
