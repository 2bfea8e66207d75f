"""Which Lightning this process uses: it is published twice, as two packages that do not mix."""

import sys
from importlib import import_module
from types import ModuleType

from phalanx.errors import ConfigError
from phalanx.plan.machine_choice import find_lightning

# for each package, the module with the Trainer, and that of Lightning Fabric below it
_MODULES = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}


def import_lightning() -> ModuleType:
    """The one already imported, since a Trainer only accepts its own modules; else any."""
    name = _find_modules()[0]
    try:
        return import_module(name)
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"{name}: is installed, but cannot be imported ({error}); often a package below it was "
            f"built for another torch: see `python -c 'import {name}'`"
        ) from error


def import_environments() -> ModuleType:
    """The cluster environments of the same package."""
    return import_module(f"{_find_modules()[1]}.plugins.environments")


def _find_modules() -> tuple[str, str]:
    for modules in _MODULES.values():
        if modules[0] in sys.modules:
            return modules
    return _MODULES[find_lightning()]
