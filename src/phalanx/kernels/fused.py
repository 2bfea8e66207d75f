"""Where the twins for GPUs are found."""

from collections.abc import Callable
from functools import cache
from importlib import import_module

from torch import Tensor


@cache
def find_fused(module: str, name: str) -> Callable[..., Tensor] | None:
    """A function of a neighbouring module, where Triton is installed; looked for when needed."""
    try:
        return getattr(import_module(f"phalanx.kernels.{module}"), name)
    except ImportError:
        return None
