"""Kernels are imported by their names, which no linter looks into."""

import ast
import re
from pathlib import Path

import phalanx

SOURCE = Path(phalanx.__file__).parent
NAME = re.compile(r"phalanx((?:\.\w+)+_fused)\.(\w+)")


def list_named_kernels():
    """(module, function) of every string that names a kernel."""
    for file in SOURCE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if "_fused." in text:
            strings = (node.value for node in ast.walk(ast.parse(text)) if is_string(node))
            yield from (found.groups() for found in map(NAME.fullmatch, strings) if found)


def is_string(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_every_kernel_that_is_named_exists():
    named = set(list_named_kernels())
    assert len(named) > 50
    for module, function in named:
        file = SOURCE.joinpath(*module.split(".")).with_suffix(".py")
        defined = ast.parse(file.read_text(encoding="utf-8")).body
        assert function in {getattr(node, "name", None) for node in defined}, (module, function)
