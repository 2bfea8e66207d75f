"""How the fused kernels are found: Triton is optional, and slow to import."""

from collections.abc import Callable
from functools import cache
from importlib import import_module

from torch import Tensor


@cache
def find_fused(name: str) -> Callable[..., Tensor] | None:
    """The function of that dotted name, imported when first asked for; None without Triton."""
    module, _, function = name.rpartition(".")
    try:
        return getattr(import_module(module), function)
    except ImportError:
        return None
