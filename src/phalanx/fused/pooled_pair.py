"""The blocks of airbench: convolution, pool, norm, GELU, then convolution, norm, GELU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.fused.conv_norm import ConvNorm, convolve, find_conv_norm
from phalanx.fused.half_copies import to_half
from phalanx.fused.stem_ops import pool, unpool_norm_back
from phalanx.fused.suited import UnitNotFused, check_types
from phalanx.fused.unit import Gradients, WrittenUnit
from phalanx.kernels.batch_norm import GELU, apply_norm
from phalanx.models.airbench import PooledConvPair


class _PooledPair(WrittenUnit):
    """Two convolutions with their norms, the first with a pool between."""

    def __init__(
        self, modules: Sequence[nn.Module], half: torch.dtype, first: ConvNorm, second: ConvNorm
    ) -> None:
        super().__init__(modules, half)
        self._first, self._second = first, second

    @property
    def parameters(self) -> list[Tensor]:
        """Those of both, in order."""
        return [*self._first.parameters, *self._second.parameters]

    def run(self, x: Tensor, factor: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        """The block's output."""
        weight = to_half(self._first.conv.weight, self.half)
        a, at = pool(convolve(x, weight, self._first.conv))
        v = self._first.norm.find_vectors(a)
        inner = apply_norm(a, v, GELU)
        b, w, other = self._second.run(inner)
        return apply_norm(b, w, GELU), [x, a, at, v, weight, inner, b, w, other]

    def run_back(
        self, dy: Tensor, second: Tensor | None, saved: Sequence[Any], *, wanted: bool
    ) -> Gradients:
        """Gradients from that of the output."""
        x, a, at, v, weight, inner, b, w, other = saved
        db, last = self._second.norm_back(dy, b, w, GELU)
        dinner, dother = self._second.conv_back(db, inner, other)
        u = self._first.norm.reduce(dinner, a, v, GELU, None)
        da = unpool_norm_back(dinner, at, a, v, u, GELU, list(x.shape[2:]))
        dx, dweight = self._first.conv_back(da, x, weight, wanted=wanted)
        return dx, None, [dweight, *self._first.norm.list_gradients(u), dother, *last]


def build_pooled_pair(modules: Sequence[nn.Module], half: torch.dtype) -> WrittenUnit:
    """A PooledConvPair of airbench's network."""
    (block,) = modules
    assert isinstance(block, PooledConvPair)
    check_types([block.pool, block.act1, block.act2], nn.MaxPool2d, nn.GELU, nn.GELU)
    if block.act1.approximate != "none" or block.act2.approximate != "none":
        raise UnitNotFused("its GELU is approximate")
    pair, first = block.pool, find_conv_norm(block.conv1, block.bn1, half)
    if (pair.kernel_size, pair.stride, pair.padding) != (2, 2, 0):
        raise UnitNotFused("its pool is of another shape")
    if first.conv.stride != (1, 1) or first.conv.padding != (1, 1):
        raise UnitNotFused("its first convolution changes the size of the image")
    return _PooledPair(modules, half, first, find_conv_norm(block.conv2, block.bn2, half))
