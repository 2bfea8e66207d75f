"""The norm of all gradients and what follows from it, for phalanx.kernels.update_fused.

Two Triton kernels: the first has a program for each block of elements, the second is one program.
The table of a step has a column of addresses for each field of UpdateColumns (0 for None), then
SIZE and GROUP. It is stored column by column; `row` points to the first entry of a row.
"""
# ruff: noqa: PLR0913, PLR0917, PLR1714, SIM108, SIM109

import triton
import triton.language as tl

from phalanx.kernels import update
from phalanx.kernels.update import FORMULAS, GroupSettings, UpdateColumns

# the indices of update.py as constexpr, so that kernels can read them
SGD, NESTEROV, COMBINED, ADAM, RMSPROP, RMSPROP_TF = map(tl.constexpr, range(len(FORMULAS)))
WEIGHT, GRADIENT, FIRST, SECOND, AVERAGE, HALF_COPY, _NUMBER = map(
    tl.constexpr, range(len(UpdateColumns._fields))
)
SIZE, GROUP = tl.constexpr(7), tl.constexpr(8)
AVERAGE_SHARE = tl.constexpr(update.AVERAGE_SHARE)
CLIP_VALUE, GROUPS = tl.constexpr(update.CLIP_VALUE), tl.constexpr(update.GROUPS)
GROUP_SIZE = tl.constexpr(len(GroupSettings._fields))
LR, L2, WEIGHT_FACTOR, MOMENTUM, DECAY, EPS = map(tl.constexpr, range(len(GroupSettings._fields)))
UNSCALE, CLIP_RATIO = tl.constexpr(update.UNSCALE), tl.constexpr(update.CLIP_RATIO)
UPDATED, VELOCITY_SCALE = tl.constexpr(update.UPDATED), tl.constexpr(update.VELOCITY_SCALE)
_NORM, _CLIP_NORM = tl.constexpr(update.NORM), tl.constexpr(update.CLIP_NORM)
_STEP, _VELOCITY_RATIO = tl.constexpr(update.STEP), tl.constexpr(update.VELOCITY_RATIO)
_GROWTH, _HISTORY = tl.constexpr(update.GROWTH_INTERVAL), tl.constexpr(update.HISTORY)
_SMALLEST, _LARGEST = tl.constexpr(update.SMALLEST_SCALE), tl.constexpr(update.LARGEST_SCALE)


@triton.jit
def find_address(row, rows, COLUMN: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The address of a row's tensor; if it is aligned, loads are vectorised."""
    address = tl.load(row + COLUMN * rows)
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def read_elements(pointer, inside, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements, with 0 for those that are not inside."""
    if MASKED:
        values = tl.load(pointer, mask=inside, other=0.0)
    else:
        values = tl.load(pointer)
    return values


@triton.jit
def write_elements(pointer, values, inside, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the elements that are inside."""
    if MASKED:
        tl.store(pointer, values, mask=inside)
    else:
        tl.store(pointer, values)


@triton.jit
def clamp(values, limit):  # type: ignore[no-untyped-def]
    """Values clamped to [-limit, limit]; NaN stays NaN."""
    values = tl.where(values > limit, limit, values)
    return tl.where(values < -limit, -limit, values)


# --- the sums of squares of each block ---


@triton.jit
def _store_squares(gradient, inside, unscale, limit, sums, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store two sums of squares: of the unscaled gradients, and of those clipped by value."""
    values = read_elements(gradient, inside, MASKED) * unscale
    clipped = clamp(values, limit).to(tl.float64)
    values = values.to(tl.float64)
    tl.store(sums, tl.sum(values * values))
    tl.store(sums + 1, tl.sum(clipped * clipped))


@triton.jit
def sum_squares(  # type: ignore[no-untyped-def]
    table,
    rows,
    blocks,
    settings,
    loss_scale,
    sums,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Both sums of squares of one block of one gradient."""
    block = blocks + 2 * tl.program_id(0)
    row, start = table + tl.load(block), tl.multiple_of(tl.load(block + 1), BLOCK)
    size = tl.load(row + SIZE * rows)
    address = find_address(row, rows, GRADIENT, ALIGNED)
    where = start + tl.arange(0, BLOCK)
    gradient = address.to(tl.pointer_type(tl.float32)) + where
    unscale = (1.0 / tl.load(loss_scale)).to(tl.float32)
    limit = tl.load(settings + CLIP_VALUE).to(tl.float32)
    sums += 2 * tl.program_id(0)
    if address == 0:
        tl.store(sums, 0.0)
        tl.store(sums + 1, 0.0)
    elif start + BLOCK <= size:
        _store_squares(gradient, where < size, unscale, limit, sums, False)
    else:
        _store_squares(gradient, where < size, unscale, limit, sums, True)


# --- in one program: norm, clipping, loss scale, and the scalars of each weight's state ---


@triton.jit
def _sum_blocks(sums, count, MANY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both sums over all blocks, always in the same order."""
    total = tl.zeros([MANY], tl.float64)
    clipped = tl.zeros([MANY], tl.float64)
    for start in range(0, count, MANY):
        indices = start + tl.arange(0, MANY)
        total += tl.load(sums + 2 * indices, mask=indices < count, other=0.0)
        clipped += tl.load(sums + 2 * indices + 1, mask=indices < count, other=0.0)
    return tl.sum(total), tl.sum(clipped)


@triton.jit
def _adapt_loss_scale(state, multiplier, settings, finite, history):  # type: ignore[no-untyped-def]
    """Update the loss scale after a step."""
    scale, finite_steps = tl.load(state), tl.load(state + 1) + tl.where(finite, 1.0, 0.0)
    skipped, changes = tl.load(state + 2), tl.load(state + 3)
    largest, smallest = tl.load(settings + _LARGEST), tl.load(settings + _SMALLEST)
    grows = (finite_steps >= tl.load(settings + _GROWTH)) & (scale < largest)
    halved = tl.where(scale / 2 > smallest, scale / 2, smallest)
    new = tl.where(finite, tl.where(grows, scale * 2, scale), halved)
    changed = grows | (finite == 0)
    change = state + _HISTORY + 2 * (changes.to(tl.int64) % history)
    tl.debug_barrier()  # all threads have read what is overwritten below
    tl.store(change, tl.load(settings + _STEP), mask=changed)
    tl.store(change + 1, new, mask=changed)
    tl.store(state, new)
    tl.store(state + 1, tl.where(changed, 0.0, finite_steps))
    tl.store(state + 2, skipped + tl.where(finite, 0.0, 1.0))
    tl.store(state + 3, changes + tl.where(changed, 1.0, 0.0))
    tl.store(multiplier, new.to(tl.float32))


@triton.jit
def _power(base, exponent):  # type: ignore[no-untyped-def]
    """Powers with whole exponents, in float64."""
    left = exponent.to(tl.int32)
    power = tl.full(exponent.shape, 1.0, tl.float64)
    for _ in range(24):  # a float32 counts no further than 2**24
        power = tl.where((left & 1) == 1, power * base, power)
        base = base * base
        left = left >> 1
    return power


@triton.jit
def _advance_scalars(  # type: ignore[no-untyped-def]
    table,
    rows,
    settings,
    velocity_scale,
    factors,
    FORMULA: tl.constexpr,
    MANY: tl.constexpr,
):
    """Advance the scalar state of each updated weight, and store the two factors of its update."""
    for start in range(0, rows, MANY):
        indices = start + tl.arange(0, MANY)
        row, inside = table + indices, indices < rows
        inside &= tl.load(row + GRADIENT * rows, mask=inside, other=0) != 0
        number = tl.load(row + _NUMBER * rows, mask=inside, other=0)
        group = settings + GROUPS + GROUP_SIZE * tl.load(row + GROUP * rows, mask=inside, other=0)
        lr = tl.load(group + LR, mask=inside, other=0.0)
        if FORMULA == COMBINED:
            number = number.to(tl.pointer_type(tl.float64))
            old = tl.load(number, mask=inside, other=1.0)
            first = velocity_scale / old
            second = lr / velocity_scale
            tl.store(number, tl.zeros_like(old) + velocity_scale, mask=inside)
        else:
            number = number.to(tl.pointer_type(tl.float32))
            steps = tl.load(number, mask=inside, other=0.0) + 1.0
            beta1 = tl.load(group + MOMENTUM, mask=inside, other=0.0)
            beta2 = tl.load(group + DECAY, mask=inside, other=0.0)
            first = lr / (1.0 - _power(beta1, steps))
            second = tl.sqrt(1.0 - _power(beta2, steps))
            tl.store(number, steps, mask=inside)
        tl.store(factors + 2 * indices, first.to(tl.float32), mask=inside)
        tl.store(factors + 2 * indices + 1, second.to(tl.float32), mask=inside)


@triton.jit
def _copy_counters(counters, pairs, MANY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy int64 counters, given as pairs of addresses: source, target."""
    for start in range(0, pairs, MANY):
        pair = start + tl.arange(0, MANY)
        inside = pair < pairs
        source = tl.load(counters + 2 * pair, mask=inside, other=0)
        target = tl.load(counters + 2 * pair + 1, mask=inside, other=0)
        value = tl.load(source.to(tl.pointer_type(tl.int64)), mask=inside, other=0)
        tl.store(target.to(tl.pointer_type(tl.int64)), value, mask=inside)


@triton.jit
def finish_gradient_norm(  # type: ignore[no-untyped-def]
    table,
    rows,
    sums,
    blocks,
    settings,
    loss_scale,
    multiplier,
    results,
    factors,
    counters,
    pairs,
    history,
    FORMULA: tl.constexpr,
    ADAPTS: tl.constexpr,
    MANY: tl.constexpr,
):
    """Fill results and factors from the sums of all blocks."""
    scale = tl.load(loss_scale)
    velocity_scale = scale / tl.load(settings + _VELOCITY_RATIO)
    squares, clipped = _sum_blocks(sums, blocks, MANY)
    norm, clipped_norm = tl.sqrt(squares).to(tl.float32), tl.sqrt(clipped).to(tl.float32)
    limit = tl.load(settings + _CLIP_NORM).to(tl.float32)
    ratio = tl.div_rn(1.0, clipped_norm + 1e-6) * limit  # as torch divides a number by a tensor
    ratio = tl.where((limit == 0) | (ratio > 1), 1.0, ratio)
    finite = tl.abs(norm) < float("inf")
    if ADAPTS:
        updated = finite
        _adapt_loss_scale(loss_scale, multiplier, settings, finite, history)
    else:
        updated = finite | True
    tl.store(results + _NORM, tl.where(updated, norm, 0.0))
    tl.store(results + UNSCALE, (1.0 / scale).to(tl.float32))
    tl.store(results + CLIP_RATIO, ratio)
    tl.store(results + UPDATED, tl.where(updated, 1.0, 0.0))
    tl.store(results + VELOCITY_SCALE, velocity_scale.to(tl.float32))
    if updated:
        if FORMULA == COMBINED or FORMULA == ADAM or FORMULA == RMSPROP:
            _advance_scalars(table, rows, settings, velocity_scale, factors, FORMULA, MANY)
        _copy_counters(counters, pairs, MANY)
