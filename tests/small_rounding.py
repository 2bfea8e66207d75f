"""Rounding of a single tensor."""

import torch
from torch import Tensor

from phalanx.kernels.rounding import round_each


def round_to(
    values: Tensor, dtype: torch.dtype, *, key: int, saturate: bool, stochastic: bool
) -> Tensor:
    """Values in 16 bits, in their memory layout."""
    out = torch.empty_like(values, dtype=dtype)
    round_each([values], [out], keys=[key], saturate=saturate, stochastic=stochastic)
    return out
