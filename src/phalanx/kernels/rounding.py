"""Float32 numbers rounded to 16 bits, to the nearest or up and down by chance.

Chances are counter-based, as in phalanx.plan.draws: those of an element are a pure function of a
key and of the element's place in the tensor, counted in logical order. Neither the device nor the
memory layout changes a bit of what comes out.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phalanx.kernels.fused import find_fused
from phalanx.plan.draws import GOLDEN

LARGEST = {torch.bfloat16: 0x7F7F0000, torch.float16: 0x477FE000}  # finite values, as float32 bits
INFINITY = 0x7F800000
_SMALLEST = 0x33800000  # 2**-24, the smallest float16 above 0
_FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
AT_A_TIME = 2**17  # elements; even, and what is in work stays in a processor's cache
_FEW, _PARTS = 2**13, 8  # the way is measured over few elements at a time, a part of a tensor
_WALKED = 2**30  # elements that 32-bit numbers count with room to spare
COUNTS = ("lost", "updated", "gradient zero", "gradient not finite", "elements", "way", "gone")


def round_to(
    values: Tensor, dtype: torch.dtype, *, key: int, saturate: bool, stochastic: bool
) -> Tensor:
    """Values as bfloat16 or float16, in their memory layout.

    By chance: the upper neighbour as often as the value lies near it, so that the mean is the
    value; a chance below 2**-31 counts as none. What lies beyond the largest finite number becomes
    that number or infinity; infinity and NaN stay.
    """
    out = torch.empty_like(values, dtype=dtype, requires_grad=False)
    round_each([values], [out], keys=[key], saturate=saturate, stochastic=stochastic)
    return out


@torch.no_grad()
def round_each(
    values: Sequence[Tensor],
    kept: Sequence[Tensor],
    *,
    keys: Sequence[int],
    saturate: bool,
    stochastic: bool,
) -> None:
    """`round_to` for many: each of `values` rounded into its place of `kept`, all of one type."""
    fused = _fused_for(values, kept)
    if fused is not None:
        fused(values, kept, None, keys=keys, saturate=saturate, stochastic=stochastic)
        return
    for value, goal, key in zip(values, kept, keys, strict=True):
        goal.copy_(_round_plain(value, goal.dtype, key, saturate, stochastic))


@torch.no_grad()
def round_counted(
    values: Sequence[Tensor],
    kept: Sequence[Tensor],
    gradients: Sequence[Tensor],
    *,
    keys: Sequence[int],
    saturate: bool,
    stochastic: bool,
) -> Tensor:
    """Like `round_each`; what happened to the elements as `COUNTS` names it, on the device.

    An element is updated if its value is not the one kept so far, and lost if what is kept after
    that is the same as before. The way is what the elements should have moved, all added up;
    gone is how far rounding let them.
    """
    fused = _fused_for(values, kept, gradients)
    if fused is not None:
        return fused(values, kept, gradients, keys=keys, saturate=saturate, stochastic=stochastic)
    rows = []
    for value, goal, gradient, key in zip(values, kept, gradients, keys, strict=True):
        new = _round_plain(value, goal.dtype, key, saturate, stochastic)
        updated = value != goal
        lost = (updated & (new == goal)).sum()
        finite, nonzero = gradient.isfinite().sum(), gradient.count_nonzero()
        size = torch.full_like(lost, value.numel())
        counted = torch.stack([lost, updated.sum(), size - nonzero, size - finite, size])
        rows.append(torch.cat([counted.double(), _measure_way(value, goal, new)]))
        goal.copy_(new)
    return torch.stack(rows).sum(0)


def _measure_way(values: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """How far elements should have moved, and how far they did; what is not finite stands still.

    A few rows at a time: copies of the whole would be the most memory that a step takes.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=values.device)
    tensors = [torch.atleast_1d(tensor) for tensor in (values, before, after)]
    rows, size = len(tensors[0]), values.numel()
    few = max(1, rows * min(_FEW, size // _PARTS) // max(size, 1))
    for value, old, new in zip(*(tensor.split(few) for tensor in tensors), strict=True):
        wish, move = value - old, new.float().sub_(old)
        nowhere = (wish.isfinite() & move.isfinite()).logical_not_()
        move.mul_(wish.sign())
        for place, part in enumerate((wish.abs_(), move)):
            sums[place] += part.masked_fill_(nowhere, 0.0).sum(dtype=torch.float64)
    return sums


def _fused_for(
    values: Sequence[Tensor], kept: Sequence[Tensor], gradients: Sequence[Tensor] = ()
) -> Callable[..., Tensor] | None:
    """The twin for GPUs, where these tensors lie on one in a way that it can walk."""
    if not (values and values[0].is_cuda):
        return None
    pairs = [*zip(values, kept, strict=True), *zip(kept, gradients, strict=bool(gradients))]
    walked = all(value.numel() < _WALKED and layout_of(value) for value in values)
    alike = all(one.stride() == two.stride() for one, two in pairs)
    typed = all(tensor.dtype == kept[0].dtype for tensor in (*kept, *gradients))
    return find_fused("rounding_fused", "round_fused") if walked and alike and typed else None


def layout_of(values: Tensor) -> tuple[int, int] | None:
    """(channels, pixels) of memory in which pixels lie apart by all channels.

    (1, 1) is plain order; None is any other way to lie in memory.
    """
    if values.is_contiguous():
        return 1, 1
    if values.dim() > 2 and values.movedim(1, -1).is_contiguous():
        return values.shape[1], values[0, 0].numel()
    return None


def signed(word: int) -> int:
    """An unsigned 64-bit word, or one with a sign, as torch's int64 holds it."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


def draw_words(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """32 random bits for each of `count` places from an even one on, as int32.

    Places 2n and 2n + 1 share the word that phalanx.plan.draws.draw_bits has for n, the lower half
    first.
    """
    begin, end = first // 2, (first + count + 1) // 2
    words = torch.arange(begin, end, device=device).mul_(signed(int(GOLDEN))).add_(signed(key))
    words = _mix(_mix(words).bitwise_xor_(signed(key)))
    return words.view(torch.int32)[:count]


def _mix(words: Tensor) -> Tensor:
    """Twin of phalanx.plan.draws.mix, in place."""
    for bits, factor in _FACTORS:
        words.bitwise_xor_((words >> bits).bitwise_and_((1 << (64 - bits)) - 1))
        words.mul_(signed(factor))
    return words.bitwise_xor_((words >> 31).bitwise_and_((1 << 33) - 1))


def _round_plain(
    values: Tensor, dtype: torch.dtype, key: int, saturate: bool, stochastic: bool
) -> Tensor:
    """Values rounded, in plain order."""
    if not stochastic:
        return _round_to_nearest(values, dtype, saturate)
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    edge = LARGEST[dtype] if saturate else INFINITY
    parts = values.contiguous().view(-1).split(AT_A_TIME)
    for number, (part, goal) in enumerate(zip(parts, out.view(-1).split(AT_A_TIME), strict=True)):
        draws = draw_words(key, number * AT_A_TIME, len(part), values.device)
        goal.copy_(_round_by_chance(part, draws, dtype, edge))
    return out


def _round_to_nearest(values: Tensor, dtype: torch.dtype, saturate: bool) -> Tensor:
    """Values rounded as every processor does it, ties to even."""
    if not saturate:
        return values.to(dtype)
    largest = torch.finfo(dtype).max
    return torch.where(values.isinf(), values, values.clamp(-largest, largest)).to(dtype)


def _round_by_chance(values: Tensor, draws: Tensor, dtype: torch.dtype, edge: int) -> Tensor:
    """Float32 whose last bits are gone: in whole numbers, for no device to flush the small ones.

    Neighbouring floats have neighbouring bits: a draw added to the bits that go carries into those
    that stay as often as it should. A float16 below 2**-14 loses a bit more with each halving.
    """
    bits = values.view(torch.int32)
    sizes = bits & 0x7FFFFFFF
    if dtype == torch.bfloat16:
        rounded = (draws & 0xFFFF).add_(sizes).bitwise_and_(~0xFFFF)
    else:
        gone = (126 - (sizes >> 23)).clamp_(13, 23)
        mask = torch.bitwise_left_shift(torch.ones_like(gone), gone).sub_(1)
        rounded = (draws & mask).add_(sizes).bitwise_and_(mask.bitwise_not_())
        # between 0 and the smallest there is: no carry, but the chance itself in steps of 2**-31
        up = (draws & 0x7FFFFFFF) < (values.abs() * 2.0**55).int()
        rounded = torch.where(sizes < _SMALLEST, up.int() * _SMALLEST, rounded)
    beyond = torch.where(sizes < INFINITY, edge, sizes)
    rounded = torch.where(sizes > LARGEST[dtype], beyond, rounded)
    return rounded.bitwise_or_(bits ^ sizes).view(torch.float32)
