"""How each kernel becomes an operation of torch: `phalanx::mbconv_...`, with a plain reference."""

import os
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from phalanx.kernels.fused import find_fused

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _takes_kernels(x: Tensor) -> bool:
    """Whether Triton can reach a tensor: on a GPU, or anywhere by its interpreter."""
    return x.is_cuda or (x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


def kernel_op(
    fused: str, *, mutates: tuple[str, ...] = ()
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make an operation of a reference in plain torch; on a GPU the fused function runs instead.

    `fused` is the dotted name of that function, which takes the same arguments, the first of them
    a tensor. The reference also says, on fake tensors, what shapes come out.
    """

    def wrap(reference: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(reference)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            first = args[0]
            taken = isinstance(first, Tensor) and _takes_kernels(first)
            kernel = find_fused(fused) if taken else None
            return reference(*args, **kwargs) if kernel is None else kernel(*args, **kwargs)  # type: ignore[return-value]

        name = f"phalanx::mbconv_{reference.__name__}"
        operation = torch.library.custom_op(name, run, mutates_args=mutates)
        operation.register_fake(reference)
        operation.reference = reference  # type: ignore[attr-defined]
        return operation

    return wrap
