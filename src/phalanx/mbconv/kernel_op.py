"""Registers each kernel as a torch operator, `phalanx::mbconv_...`, with a plain reference."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from phalanx.kernels.fused import find_fused_for

_P = ParamSpec("_P")
_R = TypeVar("_R")


def kernel_op(fused: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make an operator from a reference in plain torch; on a GPU the fused function runs instead.

    `fused` is the dotted name of that function, which takes the same arguments, the first of them
    a tensor. The reference also serves as the fake implementation.
    """

    def wrap(reference: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(reference)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            kernel = find_fused_for(cast(Tensor, args[0]), fused)
            return reference(*args, **kwargs) if kernel is None else kernel(*args, **kwargs)

        name = f"phalanx::mbconv_{reference.__name__}"
        operation = torch.library.custom_op(name, run, mutates_args=())
        operation.register_fake(reference)
        operation.reference = reference  # type: ignore[attr-defined]
        return operation

    return wrap
