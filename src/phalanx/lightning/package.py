"""Which Lightning this process uses: it is published twice, as two packages that do not mix."""

import sys
from importlib import import_module
from types import ModuleType

from phalanx.plan.machine_choice import find_lightning

# of each package, the module with the Trainer, and that with what lies below it
_MODULES = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}


def import_lightning() -> ModuleType:
    """The one that is imported already, since a Trainer takes its own modules only; else any."""
    return import_module(_find_modules()[0])


def import_environments() -> ModuleType:
    """What the same package knows of launchers."""
    return import_module(f"{_find_modules()[1]}.plugins.environments")


def _find_modules() -> tuple[str, str]:
    for modules in _MODULES.values():
        if modules[0] in sys.modules:
            return modules
    return _MODULES[find_lightning()]
