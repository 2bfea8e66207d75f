"""Fused kernels, imported on first use: Triton is optional, and slow to import."""

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor


@cache
def find_fused(name: str) -> Callable[..., Any] | None:
    """The function of that dotted name, imported on first use; None without Triton."""
    module, _, function = name.rpartition(".")
    try:
        return getattr(import_module(module), function)
    except ImportError as problem:
        if (problem.name or "").startswith("phalanx"):
            raise  # a bug of ours: if it were hidden, a GPU would run without kernels, unnoticed
        return None


def find_fused_for(tensor: Tensor, name: str) -> Callable[..., Any] | None:
    """`find_fused` if the tensor is on a GPU or Triton's interpreter is on; else None."""
    runs_fused = tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return find_fused(name) if runs_fused else None


def find_memory_error() -> type[BaseException]:
    """What Triton raises if a kernel needs more shared memory or threads than the GPU has."""
    found: Any = find_fused("triton.runtime.errors.OutOfResources")
    return found or MemoryError
