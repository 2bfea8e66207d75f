"""phalanx.kernels.update as three Triton kernels for any number of tensors."""
# ruff: noqa: PLR0913, PLR0917, PLR1714, SIM109

from itertools import chain

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels import update
from phalanx.kernels.gpu import use_device
from phalanx.kernels.gradient_norm_fused import (
    ADAM,
    AVERAGE,
    AVERAGE_SHARE,
    CLIP_RATIO,
    CLIP_VALUE,
    COMBINED,
    DECAY,
    EPS,
    FIRST,
    GRADIENT,
    GROUP,
    GROUP_SIZE,
    GROUPS,
    HALF_COPY,
    L2,
    LR,
    MOMENTUM,
    NESTEROV,
    RMSPROP,
    RMSPROP_TF,
    SECOND,
    SGD,
    SIZE,
    UNSCALE,
    UPDATED,
    VELOCITY_SCALE,
    WEIGHT,
    WEIGHT_FACTOR,
    clamp,
    find_address,
    finish_gradient_norm,
    read_elements,
    sum_squares,
    write_elements,
)
from phalanx.kernels.rounding_fused import find_blocks
from phalanx.kernels.update import FORMULAS, UpdateColumns, UpdateRows, UpdateTensors, overwrite

_SUM_BLOCK, _BLOCK = 2048, 1024  # elements that a program sums or updates
_MANY = 1024  # rows or sums that `finish_gradient_norm`, a single program, processes at a time
_WARPS = 4
_ALIGNMENT = 16  # bytes; loads are vectorised only if all addresses have it


# --- the update of each block ---


@triton.jit
def _mean_square(square, gradient, decay):  # type: ignore[no-untyped-def]
    """The running mean square, updated with a gradient; decay is float64."""
    return square * decay.to(tl.float32) + gradient * gradient * (1.0 - decay).to(tl.float32)


@triton.jit
def _apply_formula(  # type: ignore[no-untyped-def]
    weight,
    gradient,
    first,
    second,
    inside,
    group,
    results,
    factors,
    FORMULA: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The new weights; updates the optimizer's state in place."""
    lr, eps = tl.load(group + LR).to(tl.float32), tl.load(group + EPS).to(tl.float32)
    momentum, decay = tl.load(group + MOMENTUM), tl.load(group + DECAY)
    beta = momentum.to(tl.float32)
    change = gradient * lr
    if FORMULA == SGD and HAS_MOMENTUM:
        velocity = read_elements(first, inside, MASKED) * beta + gradient
        write_elements(first, velocity, inside, MASKED)
        change = velocity * lr
    elif FORMULA == NESTEROV:
        velocity = read_elements(first, inside, MASKED) * beta + gradient
        write_elements(first, velocity, inside, MASKED)
        change = (gradient + velocity * beta) * lr
    elif FORMULA == COMBINED:
        velocity = read_elements(first, inside, MASKED) * tl.load(factors) * beta
        velocity = velocity + gradient * tl.load(results + VELOCITY_SCALE)
        write_elements(first, velocity, inside, MASKED)
        change = velocity * tl.load(factors + 1)
    elif FORMULA == ADAM:
        rest = (1.0 - momentum).to(tl.float32)
        mean = read_elements(first, inside, MASKED) * beta + gradient * rest
        square = _mean_square(read_elements(second, inside, MASKED), gradient, decay)
        write_elements(first, mean, inside, MASKED)
        write_elements(second, square, inside, MASKED)
        root = tl.div_rn(tl.sqrt_rn(square), tl.load(factors + 1) + tl.zeros_like(square))
        change = tl.div_rn(mean * tl.load(factors), root + eps)
    elif FORMULA == RMSPROP or FORMULA == RMSPROP_TF:
        square = _mean_square(read_elements(first, inside, MASKED), gradient, decay)
        write_elements(first, square, inside, MASKED)
        if FORMULA == RMSPROP:
            change = tl.div_rn(gradient, tl.sqrt_rn(square) + eps)
        else:
            change = tl.div_rn(gradient, tl.sqrt_rn(square + eps)) * lr
        if HAS_MOMENTUM:
            change = read_elements(second, inside, MASKED) * beta + change
            write_elements(second, change, inside, MASKED)
        if FORMULA == RMSPROP:
            change = change * lr
    return weight - change


@triton.jit
def _move_average(average, weight, share, inside, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Move averages towards their weights by a share, which is float64."""
    old = read_elements(average, inside, MASKED)
    difference = weight - old
    part, rest = share.to(tl.float32), (1.0 - share).to(tl.float32)
    new = tl.where(share < 0.5, old + difference * part, weight - difference * rest)
    write_elements(average, new, inside, MASKED)


@triton.jit
def _update_block(  # type: ignore[no-untyped-def]
    row,
    rows,
    where,
    inside,
    settings,
    results,
    factors,
    FORMULA: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    HALF: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Process one block of a row: gradient, decays, update, 16-bit copy and average."""
    single = tl.pointer_type(tl.float32)
    weights = find_address(row, rows, WEIGHT, ALIGNED).to(single) + where
    gradients = find_address(row, rows, GRADIENT, ALIGNED)
    halves = find_address(row, rows, HALF_COPY, ALIGNED)
    averages = find_address(row, rows, AVERAGE, ALIGNED)
    weight = read_elements(weights, inside, MASKED)
    if gradients != 0:
        group = settings + GROUPS + GROUP_SIZE * tl.load(row + GROUP * rows)
        l2 = tl.load(group + L2).to(tl.float32)
        weight_factor = tl.load(group + WEIGHT_FACTOR).to(tl.float32)
        gradient = read_elements(gradients.to(single) + where, inside, MASKED)
        limit = tl.load(settings + CLIP_VALUE).to(tl.float32)
        gradient = clamp(gradient * tl.load(results + UNSCALE), limit)
        gradient = gradient * tl.load(results + CLIP_RATIO) + weight * l2
        weight = _apply_formula(
            weight * weight_factor,
            gradient,
            find_address(row, rows, FIRST, ALIGNED).to(single) + where,
            find_address(row, rows, SECOND, ALIGNED).to(single) + where,
            inside,
            group,
            results,
            factors,
            FORMULA,
            HAS_MOMENTUM,
            MASKED,
        )
        write_elements(weights, weight, inside, MASKED)
        if halves != 0:
            half = halves.to(tl.pointer_type(HALF)) + where
            write_elements(half, weight.to(HALF), inside, MASKED)
    if averages != 0:
        average = averages.to(single) + where
        _move_average(average, weight, tl.load(settings + AVERAGE_SHARE), inside, MASKED)


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    table,
    rows,
    blocks,
    settings,
    results,
    factors,
    FORMULA: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    HALF: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one block of one row, unless the loss scale adapts and gradients are not finite."""
    block = blocks + 2 * tl.program_id(0)
    number, start = tl.load(block), tl.multiple_of(tl.load(block + 1), BLOCK)
    row, where = table + number, start + tl.arange(0, BLOCK)
    size = tl.load(row + SIZE * rows)
    factors += 2 * number
    if tl.load(results + UPDATED) != 0:
        # loads are vectorised only without a mask
        if start + BLOCK <= size:
            _update_block(
                row,
                rows,
                where,
                where < size,
                settings,
                results,
                factors,
                FORMULA,
                HAS_MOMENTUM,
                HALF,
                ALIGNED,
                MASKED=False,
            )
        else:
            _update_block(
                row,
                rows,
                where,
                where < size,
                settings,
                results,
                factors,
                FORMULA,
                HAS_MOMENTUM,
                HALF,
                ALIGNED,
                MASKED=True,
            )


class _UpdateTables:
    """Tables on the device: addresses of a step's rows, and what the kernels pass to each other.

    Their memory stays in place as long as the number of rows and their sizes do not change.
    """

    def __init__(self, tensors: UpdateTensors) -> None:
        self._tensors, self._device = tensors, tensors.settings.device
        self._sizes: tuple[int, ...] = ()
        self._pairs = 0
        self._aligned = False
        self._half = tl.float16

    def upload(self, rows: UpdateRows) -> None:
        """Store the addresses of these rows; the tensors themselves are not kept."""
        columns, counters = rows.columns, list(chain.from_iterable(rows.counters))
        sizes = tuple(weight.numel() for weight in columns.weights)
        if sizes != self._sizes or len(rows.counters) != self._pairs:
            self._sizes, self._pairs = sizes, len(rows.counters)
            self._allocate()
        addresses = [[0 if t is None else t.data_ptr() for t in column] for column in columns]
        table = np.array([*addresses, sizes, rows.groups])
        self._aligned = not (table[: len(columns) - 1] % _ALIGNMENT).any()  # without `numbers`
        overwrite(self._table, table)
        overwrite(self._counters, [counter.data_ptr() for counter in counters])
        types = {half.dtype for half in columns.halves if half is not None}
        self._half = tl.bfloat16 if torch.bfloat16 in types else tl.float16

    def _allocate(self) -> None:
        """Allocate memory for rows of these sizes."""

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self._device)

        self._sum_blocks = find_blocks(self._sizes, _SUM_BLOCK, self._device)
        self._blocks = find_blocks(self._sizes, _BLOCK, self._device)
        self._table = empty(len(UpdateColumns._fields) + 2, len(self._sizes), dtype=torch.int64)
        self._counters = empty(2 * self._pairs, dtype=torch.int64)
        self._sums = empty(len(self._sum_blocks), 2, dtype=torch.float64)
        self._factors = empty(len(self._sizes), 2, dtype=torch.float32)

    def launch(self) -> None:
        """Update all tensors."""
        with use_device(self._device):
            self._launch()

    def _launch(self) -> None:
        tensors, rows = self._tensors, len(self._sizes)
        blocks, sum_blocks = self._blocks, self._sum_blocks
        settings, results, state = tensors.settings, tensors.results, tensors.loss_scale
        formula = list(FORMULAS).index(tensors.formula)
        scale = settings[update.LOSS_SCALE :] if state is None else state
        # no fused multiply-add: the bits are those of the reference
        exact = {"enable_fp_fusion": False}
        sum_squares[(len(sum_blocks),)](
            *(self._table, rows, sum_blocks, settings, scale, self._sums),
            ALIGNED=self._aligned,
            BLOCK=_SUM_BLOCK,
            num_warps=_WARPS,
            **exact,
        )
        finish_gradient_norm[(1,)](
            *(self._table, rows, self._sums, len(sum_blocks), settings, scale),
            *(results if tensors.multiplier is None else tensors.multiplier, results),
            *(self._factors, self._counters, self._pairs),
            (scale.numel() - update.HISTORY) // 2,
            FORMULA=formula,
            ADAPTS=state is not None,
            MANY=_MANY,
            num_warps=8,
            **exact,
        )
        _update[(len(blocks),)](
            *(self._table, rows, blocks, settings, results, self._factors),
            FORMULA=formula,
            HAS_MOMENTUM=tensors.has_momentum,
            HALF=self._half,
            ALIGNED=self._aligned,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            **exact,
        )


def build_update_tables(tensors: UpdateTensors) -> _UpdateTables | None:
    """The fused update of such tensors, on a GPU or in Triton's interpreter; else None."""
    suits = tensors.settings.device.type == "cuda" or triton.knobs.runtime.interpret
    return _UpdateTables(tensors) if suits else None
