"""Which trackers a run uses, and whether they are installed."""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from phalanx.config.schema import OPTIONS, Config
from phalanx.errors import ConfigError
from phalanx.plan.world import is_first_rank

_MODULES = {  # by option, the modules that a tracker needs besides Phalanx
    "tensorboard": None,
    "wandb": "wandb",
    "mlflow": "mlflow",
}


def choose_trackers(config: Config) -> dict[str, dict[str, Any]]:
    """The trackers that the options ask for, with their own options."""
    values = config.flat()
    own = [name for name, option in OPTIONS.items() if option.section == "trackers"]
    return {
        tracker: {name: values[name] for name in own if name.startswith(f"{tracker}-")}
        for tracker in _MODULES
        if values[tracker]
    }


def refuse_missing_trackers(config: Config) -> None:
    """Raise if a chosen tracker is not installed, with the command that installs it."""
    if is_first_rank():  # other ranks have no trackers
        refuse_missing(choose_trackers(config))


def refuse_missing(trackers: Iterable[str]) -> None:
    """The same for these trackers only."""
    for tracker in trackers:
        module = _MODULES[tracker]
        spec = find_spec(module) if module else None
        # without an origin it is only a folder of that name, such as wandb leaves behind
        if module and (spec is None or spec.origin is None):
            raise ConfigError(
                f"--{tracker}: {tracker} is not installed; pip install 'phalanx[{tracker}]'"
            )
