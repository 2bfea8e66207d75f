"""A user's own models and datasets: a module that adds rows to the tables when it is imported.

A plugin is code. It is imported only if the command line, or a keyword of a function, names it; a
file that names one, which may come from somebody else, is refused unless the user names it, too.
"""

import shlex
import sys
from importlib import import_module
from importlib.util import find_spec
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
_LOADED: dict[str, None] = {}  # the names of imported plugins, in order


def load_plugins(names: str) -> None:
    """Import the modules of a comma-separated list; the current folder is searched, too.

    Only for names given by the user, or by a parent process that was allowed to import them.
    """
    for name in _split_names(names):
        _load_plugin(name)
        _LOADED[name] = None


def has_module(name: str) -> bool:
    """Whether a module of that name is installed or in the current folder."""
    name = name.rstrip(",")
    return Path(f"{name}.py").is_file() or find_spec(name) is not None


def refuse_unnamed_plugins(names: str, *, where: str) -> None:
    """Raise if a file asks for plugins that the user has not named."""
    if not _LOADED.keys() >= set(_split_names(names)):
        raise ConfigError(
            f"{where}: asks for the plugin {names}, whose code would run with your permissions; if "
            f"you trust it, add{format_plugin_flag(names)}"
        )


def list_loaded_plugins() -> str | None:
    """The plugins that the user has named, as a comma-separated list; None if there are none."""
    return ",".join(_LOADED) or None


def format_plugin_flag(names: str | None) -> str:
    """The flag that names plugins on a command line, after a space; empty if there are none.

    >>> format_plugin_flag("mine, theirs")
    ' --plugin mine,theirs'
    """
    return f" --plugin {shlex.quote(','.join(_split_names(names)))}" if names else ""


def _split_names(names: str) -> list[str]:
    return [name.strip() for name in names.split(",")]


def _load_plugin(name: str) -> None:
    """Import one module, and check that it removed nothing from the tables."""
    before = {kind: dict(table) for kind, (table, _) in _TABLES.items()}
    try:
        here = str(Path.cwd())
        # only if the plugin is there, and last: no other module is imported from this folder
        if here not in sys.path and find_spec(name.partition(".")[0]) is None:
            sys.path.append(here)
        import_module(name)
    except ImportError as error:
        if error.name not in (None, name, name.partition(".")[0]):
            raise ConfigError(f"--plugin {name}: {error}, which it imports") from error
        raise ConfigError(
            f"--plugin {name}: {error}; give a module's name, without .py, that is in this "
            "folder, is installed, or is reached by PYTHONPATH"
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--plugin {name}: {type(error).__name__}: {error}") from error
    for kind, (table, rows) in _TABLES.items():
        wrong = [row for row, value in table.items() if not isinstance(value, rows)]
        if wrong:
            raise ConfigError(
                f"--plugin {name}: the {kind} {wrong[0]!r} is not a {rows.__name__}; "
                "docs/extending.md shows what a row is made of"
            )
        replaced = [row for row, value in before[kind].items() if table.get(row) is not value]
        if replaced:
            raise ConfigError(
                f"--plugin {name}: replaces the {kind} {replaced[0]!r}; give yours another name"
            )
