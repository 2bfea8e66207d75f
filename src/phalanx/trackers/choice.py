"""Which trackers a run uses, and whether they can be used."""

import os
from collections.abc import Mapping
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
_WANDB_MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")


def choose_trackers(config: Config) -> dict[str, dict[str, Any]]:
    """The trackers that the options ask for, with their own options."""
    values = config.flat()
    own = [name for name, option in OPTIONS.items() if option.section == "trackers"]
    return {
        tracker: {name: values[name] for name in own if name.startswith(f"{tracker}-")}
        for tracker in _MODULES
        if values[tracker]
    }


def check_run_trackers(config: Config) -> None:
    """Raise if a tracker of a run cannot be used on this machine."""
    if is_first_rank():  # other ranks have no trackers
        check_trackers(choose_trackers(config))


def check_trackers(chosen: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise if a tracker is not installed, or the environment asks for an unknown mode of it."""
    for tracker, options in chosen.items():
        module = _MODULES[tracker]
        spec = find_spec(module) if module else None
        # without an origin it is only a folder of that name, such as wandb leaves behind
        if module and (spec is None or spec.origin is None):
            raise ConfigError(
                f"--{tracker}: {tracker} is not installed; pip install 'phalanx[{tracker}]'"
            )
        mode = os.environ.get("WANDB_MODE")
        if mode and mode not in _WANDB_MODES and options.get("wandb-mode") == "auto":
            raise ConfigError(
                f"WANDB_MODE={mode}: expected online, offline or disabled; change it, or give "
                "--wandb-mode"
            )
