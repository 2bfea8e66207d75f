"""Run phalanx as if only some packages were installed.

python only_these.py REQUIREMENTS_FILE WORDS...
"""

import re
import runpy
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

NAME = re.compile(r"[A-Za-z0-9._-]+")


def find_all(names: list[str]) -> set[str]:
    """Packages and, without extras, what they require in turn."""
    found: set[str] = set()
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            continue
        names += [
            match[0] for line in lines if "extra ==" not in line and (match := NAME.match(line))
        ]
    return found


class Refusal(MetaPathFinder):
    """Finds nothing, and lets nobody else find what other packages own."""

    def __init__(self, packages: set[str]) -> None:
        self.refused = set()
        for module, owners in packages_distributions().items():
            if not packages & {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners}:
                self.refused.add(module)
        self.refused.discard("phalanx")

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self.refused:
            raise ModuleNotFoundError(f"No module named {name!r} (not among the requirements)")
        return None


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    asked = [NAME.match(line)[0] for line in lines if line and not line.startswith("#")]
    sys.meta_path.insert(0, Refusal(find_all(asked)))
    sys.argv = ["phalanx", *sys.argv[2:]]
    runpy.run_module("phalanx", run_name="__main__")
