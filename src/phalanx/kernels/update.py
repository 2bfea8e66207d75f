"""One optimizer step of all weights at once: gradient norm, loss scale, clipping, update.

Everything that changes from step to step is in device memory (`settings`, the loss scale,
`results`): the host never waits, and a CUDA graph can replay the step. Every operation is rounded
to float32, in the order of the functions below, so that the fused kernels give the same bits. These
take addresses instead of tensors and are not torch operators: updates are never traced.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.fused import find_fused

_Column = list[Tensor | None]

# indices into `settings`, float64; the settings of each group of weights follow
LOSS_SCALE, STEP, AVERAGE_SHARE, CLIP_NORM, CLIP_VALUE, VELOCITY_RATIO = range(6)
GROWTH_INTERVAL, SMALLEST_SCALE, LARGEST_SCALE, GROUPS = range(6, 10)
# indices into `results`, float32
NORM, UNSCALE, CLIP_RATIO, UPDATED, VELOCITY_SCALE, RESULTS = range(6)
# indices into an adaptive loss scale, float64; its last changes follow, as pairs (step, scale)
SCALE, FINITE_STEPS, SKIPPED, CHANGES, HISTORY = range(5)


class GroupSettings(NamedTuple):
    """The settings that the weights of a group share."""

    lr: float
    l2: float
    weight_factor: float  # by which decoupled decay multiplies a weight
    momentum: float  # the first of Adam's betas
    decay: float  # of mean squares; the second of Adam's betas
    eps: float


class UpdateColumns(NamedTuple):
    """The tensors of a step, one row per weight; None where a weight has no such tensor.

    All tensors of a row have the same memory layout. A row without a gradient is not updated:
    buffers that are averaged have such rows.
    """

    weights: list[Tensor]  # float32
    gradients: _Column  # float32; only read
    first: _Column  # the optimizer's state, float32: velocity, mean or mean square
    second: _Column  # more of it: Adam's mean square, the velocity of both rmsprops
    averages: _Column  # the moving average, float32
    halves: _Column  # the weight in 16 bits, all of the same type
    numbers: _Column  # 0-d, of the state: a count of steps (float32), a velocity's scale (float64)


class UpdateRows(NamedTuple):
    """The tensors of a step that may be replaced by others in the next."""

    columns: UpdateColumns
    groups: list[int]  # of each row
    counters: list[tuple[Tensor, Tensor]]  # int64, and their copies


@dataclass
class UpdateTensors:
    """What a step reads and writes besides its rows; the same tensors at every step."""

    formula: str  # a key of FORMULAS
    has_momentum: bool
    settings: Tensor
    results: Tensor
    loss_scale: Tensor | None = None  # if it adapts; a constant one is in `settings`
    multiplier: Tensor | None = None  # a copy of it, 0-d and float32, that passes multiply by


class MultiTensorUpdate:
    """Updates the rows it is given, with fused kernels where possible."""

    def __init__(self, tensors: UpdateTensors) -> None:
        self._tensors = tensors
        build: Any = find_fused("phalanx.kernels.update_fused.build_update_tables")
        self._fused: Any = None if build is None else build(tensors)
        self._rows: UpdateRows | None = None
        self._copies: list[Tensor | None] = []

    def set_rows(self, rows: UpdateRows) -> bool:
        """Set the rows of the next steps; returns False if they must be set again before each."""
        weights, gradients = rows.columns.weights, rows.columns.gradients
        ordered = [_order_like(w, g) for w, g in zip(weights, gradients, strict=True)]
        copies = [o for o, g in zip(ordered, gradients, strict=True) if o is not g]
        rows = rows._replace(columns=rows.columns._replace(gradients=ordered))
        if self._fused is None:
            self._rows = rows
            return False
        self._copies = copies  # for other tensors only addresses are kept: they are not ours
        self._fused.upload(rows)
        return not copies

    def run(self) -> None:
        """Update once, and fill `results`; fused, it does not wait for the device."""
        if self._fused is not None:
            self._fused.launch()
        elif self._rows is not None:
            _update_reference(self._tensors, self._rows)
            self._rows = None  # so that gradients can be freed


def _order_like(weight: Tensor, gradient: Tensor | None) -> Tensor | None:
    """The gradient in its weight's memory layout, which autograd's gradients already have."""
    if gradient is None:
        return None
    sizes = zip(weight.shape, weight.stride(), gradient.stride(), strict=True)
    if all(size == 1 or own == other for size, own, other in sizes):
        return gradient
    return torch.empty_like(weight).copy_(gradient)


def overwrite(target: Tensor, numbers: Any) -> None:
    """Copy a list or an array of numbers into a tensor, without waiting for its device."""
    source = torch.as_tensor(numbers, dtype=target.dtype)
    if target.is_cuda:
        source = source.pin_memory()  # from pageable memory the copy would wait
    target.copy_(source, non_blocking=True)


# --- the reference for the fused kernels ---


class _UpdateRow(NamedTuple):
    """A row of UpdateColumns."""

    weight: Tensor
    gradient: Tensor | None
    first: Any  # a tensor, if the formula uses it
    second: Any
    average: Tensor | None
    half: Tensor | None
    number: Any


class _StepNumbers(NamedTuple):
    """Values that all weights share."""

    velocity_scale: float
    has_momentum: bool


@torch.no_grad()
def _update_reference(tensors: UpdateTensors, rows: UpdateRows) -> None:
    """The step, weight by weight."""
    settings: list[float] = tensors.settings.tolist()
    loss_scale, limit = tensors.loss_scale, settings[CLIP_VALUE]
    scale = settings[LOSS_SCALE] if loss_scale is None else float(loss_scale[SCALE])
    unscaled = [None if g is None else g * (1 / scale) for g in rows.columns.gradients]
    clipped = [None if g is None else g.clamp(-limit, limit) for g in unscaled]
    norm, ratio = _find_norm(unscaled), 1.0
    if settings[CLIP_NORM]:
        ratio = float((settings[CLIP_NORM] / (_find_norm(clipped) + 1e-6)).clamp(max=1.0))
    updated = loss_scale is None or bool(norm.isfinite())
    step = _StepNumbers(scale / settings[VELOCITY_RATIO], tensors.has_momentum)
    reported_norm = float(norm) if updated else 0.0
    overwrite(tensors.results, [reported_norm, 1 / scale, ratio, updated, step.velocity_scale])
    if loss_scale is not None and tensors.multiplier is not None:
        _adapt_loss_scale(loss_scale, settings, finite=updated)
        tensors.multiplier.copy_(loss_scale[SCALE])
    if not updated:
        return
    for number, gradient in enumerate(clipped):
        row = _UpdateRow(*(column[number] for column in rows.columns))  # type: ignore[arg-type]
        start = GROUPS + len(GroupSettings._fields) * rows.groups[number]
        group = GroupSettings(*settings[start : start + len(GroupSettings._fields)])
        if gradient is not None:
            with_l2 = gradient * ratio + group.l2 * row.weight
            decayed = row.weight * group.weight_factor
            row.weight.copy_(FORMULAS[tensors.formula](row, with_l2, decayed, group, step))
            if row.half is not None:
                row.half.copy_(row.weight)
        _move_average(row, settings[AVERAGE_SHARE])
    for counter, copy in rows.counters:
        copy.copy_(counter)


def _find_norm(gradients: Sequence[Tensor | None]) -> Tensor:
    """The norm of all gradients, summed in float64."""
    squares = [gradient.double().square().sum() for gradient in gradients if gradient is not None]
    return torch.stack(squares).sum().sqrt().float()


def _adapt_loss_scale(loss_scale: Tensor, settings: Sequence[float], *, finite: bool) -> None:
    """Halve the scale where gradients are not finite; double it after many steps where they are."""
    scale, finite_steps, skipped, changes = loss_scale[:HISTORY].tolist()
    finite_steps += finite
    grows = finite_steps >= settings[GROWTH_INTERVAL] and scale < settings[LARGEST_SCALE]
    if not finite or grows:
        scale = scale * 2 if finite else max(scale / 2, settings[SMALLEST_SCALE])
        history = loss_scale[HISTORY:].view(-1, 2)
        overwrite(history[int(changes) % len(history)], [settings[STEP], scale])
        finite_steps, changes = 0, changes + 1
    overwrite(loss_scale[:HISTORY], [scale, finite_steps, skipped + (not finite), changes])


def _move_average(row: _UpdateRow, share: float) -> None:
    """Move the average towards its weight by that share, as torch.lerp does."""
    if row.average is not None:
        difference = row.weight - row.average
        if share < 0.5:
            row.average.copy_(row.average + difference * share)
        else:
            row.average.copy_(row.weight - difference * (1 - share))


# Each updates the state of a row and returns its new weight; `weight` has been decayed already.


def _sgd(
    row: _UpdateRow, gradient: Tensor, weight: Tensor, group: GroupSettings, step: _StepNumbers
) -> Tensor:
    if step.has_momentum:
        gradient = row.first.copy_(row.first * group.momentum + gradient)
    return weight - gradient * group.lr


def _nesterov(
    row: _UpdateRow, gradient: Tensor, weight: Tensor, group: GroupSettings, step: _StepNumbers
) -> Tensor:
    row.first.copy_(row.first * group.momentum + gradient)
    return weight - (gradient + row.first * group.momentum) * group.lr


def _sgd_combined(
    row: _UpdateRow, gradient: Tensor, weight: Tensor, group: GroupSettings, step: _StepNumbers
) -> Tensor:
    rescaled = row.first * (step.velocity_scale / float(row.number))
    row.number.fill_(step.velocity_scale)
    row.first.copy_(rescaled * group.momentum + gradient * step.velocity_scale)
    return weight - row.first * (group.lr / step.velocity_scale)


def _adam(
    row: _UpdateRow, gradient: Tensor, weight: Tensor, group: GroupSettings, step: _StepNumbers
) -> Tensor:
    steps = float(row.number.add_(1))
    bias, root_of_bias = 1 - group.momentum**steps, (1 - group.decay**steps) ** 0.5
    row.first.copy_(row.first * group.momentum + gradient * (1 - group.momentum))
    row.second.copy_(row.second * group.decay + gradient * gradient * (1 - group.decay))
    divisor = _root(row.second) / _like(root_of_bias, weight) + group.eps
    return weight - row.first * (group.lr / bias) / divisor


def _rmsprop(
    row: _UpdateRow, gradient: Tensor, weight: Tensor, group: GroupSettings, step: _StepNumbers
) -> Tensor:
    row.number.add_(1)
    row.first.copy_(row.first * group.decay + gradient * gradient * (1 - group.decay))
    gradient = gradient / (_root(row.first) + group.eps)
    if step.has_momentum:
        gradient = row.second.copy_(row.second * group.momentum + gradient)
    return weight - gradient * group.lr


def _rmsprop_tf(
    row: _UpdateRow, gradient: Tensor, weight: Tensor, group: GroupSettings, step: _StepNumbers
) -> Tensor:
    row.first.copy_(row.first * group.decay + gradient * gradient * (1 - group.decay))
    change = gradient / _root(row.first + group.eps) * group.lr
    if step.has_momentum:
        change = row.second.copy_(row.second * group.momentum + change)
    return weight - change


def _root(values: Tensor) -> Tensor:
    """Correctly rounded square roots, which not every library computes in 32 bits."""
    return values.double().sqrt().float()


def _like(number: float, weight: Tensor) -> Tensor:
    """A divisor as a tensor: torch would multiply by the reciprocal of a Python number."""
    return torch.full((), number, dtype=weight.dtype, device=weight.device)


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "sgd": _sgd,
    "nesterov": _nesterov,
    "sgd_combined": _sgd_combined,
    "adam": _adam,
    "rmsprop": _rmsprop,
    "rmsprop_tf": _rmsprop_tf,
}
