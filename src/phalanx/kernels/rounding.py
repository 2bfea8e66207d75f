"""Float32 numbers rounded to 16 bits, to the nearest or stochastically.

The random bits of an element are a pure function of a key and of the element's number in the
tensor, counted in logical order (phalanx.plan.draws): neither the device nor the memory layout
changes a bit of the result.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phalanx.kernels.fused import find_fused
from phalanx.kernels.random_bits import draw_int32

# as the bits of a float32
LARGEST_FINITE = {torch.bfloat16: 0x7F7F0000, torch.float16: 0x477FE000}
INFINITY = 0x7F800000
_SMALLEST_FLOAT16 = 0x33800000  # 2**-24, a subnormal number

CHUNK = 2**17  # elements rounded at a time: even, and few enough for a CPU's cache
_MEASURED, _PARTS = 2**13, 8  # elements measured at a time: min(2**13, an eighth of a tensor)
_MAX_FUSED_ELEMENTS = 2**30  # the fused kernel has 32-bit offsets
COUNTS = (  # checkpoints store them in this order
    "lost",
    "updated",
    "gradient zero",
    "gradient not finite",
    "elements",
    "distance wanted",
    "distance moved",
)


@torch.no_grad()
def round_each(
    values: Sequence[Tensor],
    targets: Sequence[Tensor],
    gradients: Sequence[Tensor] | None = None,
    *,
    keys: Sequence[int],
    saturate: bool,
    stochastic: bool,
) -> Tensor:
    """Round each tensor of `values` into its target; all targets are bfloat16 or all float16.

    Stochastic: the nearer the upper neighbour, the more often a value is rounded up, so that the
    mean is the value; a probability below 2**-31 counts as zero. Values beyond the largest finite
    number become that number with `saturate`, else infinity; infinity and NaN stay as they are.

    Returns the `COUNTS` of all elements together, on their device; zeros without gradients. An
    element is updated if its value differs from its target, and lost if rounding leaves the target
    as it was. Distances are how far elements should have moved, and how far rounding let them move
    in that direction.
    """
    fused = _find_fused_for(values, targets, gradients or ())
    if fused is not None:
        return fused(
            values, targets, gradients, keys=keys, saturate=saturate, stochastic=stochastic
        )
    rows = []
    for number, (value, target, key) in enumerate(zip(values, targets, keys, strict=True)):
        rounded = _round(value, target.dtype, key, saturate, stochastic)
        if gradients is not None:
            rows.append(_count(value, target, rounded, gradients[number]))
        target.copy_(rounded)
    return torch.stack(rows).sum(0) if rows else torch.zeros(len(COUNTS), dtype=torch.float64)


def _count(values: Tensor, before: Tensor, after: Tensor, gradients: Tensor) -> Tensor:
    """The `COUNTS` of one tensor."""
    updated = values != before
    lost = (updated & (after == before)).sum()
    finite, nonzero = gradients.isfinite().sum(), gradients.count_nonzero()
    size = torch.full_like(lost, values.numel())
    counts = torch.stack([lost, updated.sum(), size - nonzero, size - finite, size])
    return torch.cat([counts.double(), _measure_distances(values, before, after)])


def _measure_distances(values: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """How far elements should have moved, and how far they did; non-finite ones are left out.

    A few rows at a time: copies of whole tensors would determine a step's peak memory.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=values.device)
    tensors = [torch.atleast_1d(tensor) for tensor in (values, before, after)]
    rows, size = len(tensors[0]), values.numel()
    rows_at_a_time = max(1, rows * min(_MEASURED, size // _PARTS) // max(size, 1))
    parts = (tensor.split(rows_at_a_time) for tensor in tensors)
    for value, old, new in zip(*parts, strict=True):
        change, rounded_change = value - old, new.float().sub_(old)
        not_finite = (change.isfinite() & rounded_change.isfinite()).logical_not_()
        rounded_change.mul_(change.sign())
        for place, distance in enumerate((change.abs_(), rounded_change)):
            sums[place] += distance.masked_fill_(not_finite, 0.0).sum(dtype=torch.float64)
    return sums


def _find_fused_for(
    values: Sequence[Tensor], targets: Sequence[Tensor], gradients: Sequence[Tensor]
) -> Callable[..., Tensor] | None:
    """The fused kernel, if these tensors are on a GPU and in a layout that it supports."""
    if not (values and values[0].is_cuda):
        return None
    pairs = [*zip(values, targets, strict=True), *zip(targets, gradients, strict=bool(gradients))]
    is_supported = (
        all(value.numel() < _MAX_FUSED_ELEMENTS and find_layout(value) for value in values)
        and all(one.stride() == two.stride() for one, two in pairs)
        and all(tensor.dtype == targets[0].dtype for tensor in (*targets, *gradients))
    )
    return find_fused("phalanx.kernels.rounding_fused.round_fused") if is_supported else None


def find_layout(values: Tensor) -> tuple[int, int] | None:
    """(channels, pixels) of a tensor in channels_last memory; (1, 1) if contiguous; else None."""
    if values.is_contiguous():
        return 1, 1
    if values.dim() > 2 and values.movedim(1, -1).is_contiguous():
        return values.shape[1], values[0, 0].numel()
    return None


def _round(
    values: Tensor, dtype: torch.dtype, key: int, saturate: bool, stochastic: bool
) -> Tensor:
    """The reference for the fused kernel: values rounded."""
    if not stochastic:
        if saturate:
            largest = torch.finfo(dtype).max
            values = torch.where(values.isinf(), values, values.clamp(-largest, largest))
        return values.to(dtype)  # ties to even, on every device
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    chunks = zip(values.contiguous().view(-1).split(CHUNK), out.view(-1).split(CHUNK), strict=True)
    for number, (chunk, target) in enumerate(chunks):
        random = draw_int32(key, number * CHUNK, len(chunk), values.device)
        target.copy_(_round_stochastically(chunk, random, dtype, saturate))
    return out


def _round_stochastically(
    values: Tensor, random: Tensor, dtype: torch.dtype, saturate: bool
) -> Tensor:
    """Float32 values that 16 bits can hold; in integers, as some devices flush subnormal floats.

    The bits of neighbouring floats are neighbouring integers: random bits added to the dropped bits
    carry into the kept ones with the right probability. A float16 below 2**-14 drops one more bit
    with each halving.
    """
    bits = values.view(torch.int32)
    magnitudes = bits & 0x7FFFFFFF
    if dtype == torch.bfloat16:
        rounded = (random & 0xFFFF).add_(magnitudes).bitwise_and_(~0xFFFF)
    else:
        dropped = (126 - (magnitudes >> 23)).clamp_(13, 23)
        mask = torch.bitwise_left_shift(torch.ones_like(dropped), dropped).sub_(1)
        rounded = (random & mask).add_(magnitudes).bitwise_and_(mask.bitwise_not_())
        # below the smallest number there is no carry: the probability, in steps of 2**-31
        up = (random & 0x7FFFFFFF) < (values.abs() * 2.0**55).int()
        rounded = torch.where(magnitudes < _SMALLEST_FLOAT16, up.int() * _SMALLEST_FLOAT16, rounded)
    largest = LARGEST_FINITE[dtype]
    overflow = torch.where(magnitudes < INFINITY, largest if saturate else INFINITY, magnitudes)
    rounded = torch.where(magnitudes > largest, overflow, rounded)
    return rounded.bitwise_or_(bits ^ magnitudes).view(torch.float32)
