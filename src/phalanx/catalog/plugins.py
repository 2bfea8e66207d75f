"""A user's own models and datasets: a module that adds rows to the tables when it is imported."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from phalanx.catalog.datasets import DATASETS, Dataset
from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import Variant
from phalanx.errors import ConfigError

_TABLES: dict[str, tuple[dict[str, Any], type]] = {
    "model": (MODELS, Variant),
    "dataset": (DATASETS, Dataset),
}


def load_plugins(names: str) -> None:
    """Import the modules of a list with commas; the current folder is searched too."""
    for name in names.split(","):
        _load_plugin(name.strip())


def _load_plugin(name: str) -> None:
    """Import one module, and see that it took nothing from the tables."""
    before = {kind: dict(table) for kind, (table, _) in _TABLES.items()}
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        import_module(name)
    except ImportError as error:
        if error.name not in (None, name, name.partition(".")[0]):
            raise ConfigError(f"--plugin {name}: {error}, which it imports") from error
        raise ConfigError(
            f"--plugin {name}: {error}; give a module's name, without .py, that lies in this "
            "folder, is installed, or is reached by PYTHONPATH"
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--plugin {name}: {type(error).__name__}: {error}") from error
    for kind, (table, rows) in _TABLES.items():
        wrong = [row for row, value in table.items() if not isinstance(value, rows)]
        if wrong:
            raise ConfigError(
                f"--plugin {name}: the {kind} {wrong[0]!r} is no {rows.__name__}; "
                "docs/extending.md shows what a row is made of"
            )
        replaced = [row for row, value in before[kind].items() if table.get(row) is not value]
        if replaced:
            raise ConfigError(
                f"--plugin {name}: replaces the {kind} {replaced[0]!r}; give yours another name"
            )
