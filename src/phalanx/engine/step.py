"""One optimizer step."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import nan
from typing import NamedTuple

import torch
from torch import Tensor, nn

from phalanx.engine.fused_update import DeviceLossScale
from phalanx.engine.loss import LOSSES
from phalanx.engine.mixing import Mix, Mixing, Targets, draw_mix, mix_images, mix_labels
from phalanx.engine.state import TrainState
from phalanx.models.norms import to_float32_or_64
from phalanx.models.units import draw_dropout_noise, find_noise_sizes
from phalanx.optim.update import collect_gradients, set_velocity_scale, update_weights
from phalanx.ranges import RANGES


class MicroBatch(NamedTuple):
    """Images of one forward pass, normalised and on the device, with their labels."""

    images: Tensor  # [N, 3, H, W], in channels_last memory format
    labels: Tensor  # [N]
    first: int  # position of the first image in the training stream; the others follow


@dataclass(frozen=True)
class StepOptions:
    """The settings of a step that are not the optimizer's."""

    label_smoothing: float
    device_type: str
    half: torch.dtype | None  # the autocast dtype; None for full precision
    seed: int = 0  # of dropout and mixing
    flip: bool = False  # when scoring, average the logits of each image and its mirror image
    mixing: Mixing = field(default_factory=Mixing)
    loss: str = "cross-entropy"  # a row of LOSSES
    clip_norm: float = 0.0  # largest global gradient norm; 0: no limit
    clip_value: float = 0.0  # largest absolute value in a gradient; 0: no limit
    velocity_ratio: float | None = None  # of sgd_combined: loss scale over its velocity's scale
    metrics: bool = True  # whether steps compute top-1; if not, it is NaN

    def autocast(self) -> AbstractContextManager[None]:
        """The context forward passes run in."""
        if self.half is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.half)


Scale = float | Tensor
"""A loss scale; a tensor if it adapts on the device."""

ForwardBackward = Callable[[Sequence[MicroBatch], Scale], Tensor]
"""Runs a step's passes with the loss scale and leaves the gradients in the model's parameters;
returns [loss, top-1] of the whole global batch, still on the device."""

RunPass = Callable[[Sequence[MicroBatch], Scale], Tensor]
"""One forward and backward pass over concatenated micro-batches, with the loss scale; returns
[loss, correct predictions] summed over the images, still on the device."""

RunTurn = Callable[[Sequence[Sequence[MicroBatch]], Scale, bool], Tensor]
"""Runs all passes of a turn with the loss scale; the flag says whether it is the rank's last turn
of the step. Returns [loss, correct predictions] summed over the images."""

GatherNorms = Callable[[Tensor], Tensor]


class PassParts:
    """The parts of a forward and backward pass, for a whole model or one stage of it.

    Each loss is a sum divided by the size of the global batch, whichever process computes the rest
    of it: the gradients add up to the same however a step is split.
    """

    def __init__(self, model: nn.Module, options: StepOptions, *, global_batch: int) -> None:
        self._model, self._options, self._global_batch = model, options, global_batch
        bare = getattr(model, "module", model)
        self._noise_sizes = find_noise_sizes(bare)
        # models with fused units compute in 16 bits from the first layer on
        self.image_type = options.half if getattr(bare, "fused", None) else None

    def draw_mixes(self, batches: Sequence[MicroBatch]) -> list[Mix]:
        """How the images of each micro-batch are mixed."""
        options = self._options
        return [
            draw_mix(images, labels, first=first, seed=options.seed, mixing=options.mixing)
            for images, labels, first in batches
        ]

    @staticmethod
    def mix_targets(batches: Sequence[MicroBatch], mixes: Sequence[Mix]) -> list[Targets]:
        """The weighted labels of each micro-batch."""
        pairs = zip(batches, mixes, strict=True)
        return [mix_labels(batch.labels, mix) for batch, mix in pairs]

    def join_images(self, batches: Sequence[MicroBatch], mixes: Sequence[Mix]) -> Tensor:
        """The mixed images of all micro-batches as one batch, in the dtype of the model's input."""
        pairs = zip(batches, mixes, strict=True)
        images = _concatenate([mix_images(batch.images, mix) for batch, mix in pairs])
        return images.to(self.image_type or images.dtype)

    def forward(self, x: Tensor, firsts: Sequence[int | Tensor]) -> Tensor:
        """The model's output for concatenated micro-batches; firsts: `first` of each of them."""
        # what the model drops depends only on the positions of the images in the training stream
        noise = [
            draw_dropout_noise(
                self._noise_sizes,
                seed=self._options.seed,
                first=first,
                images=len(x) // len(firsts),
                device=x.device,
            )
            for first in firsts
        ]
        drops = {path: _concatenate([one[path] for one in noise]) for path in noise[0]}
        with RANGES("forward"), self._options.autocast():
            out: Tensor = self._model(x, drops) if drops else self._model(x)
            return out

    def find_loss_factor(self, loss_scale: Scale) -> Scale | None:
        """The factor for a summed loss; None to divide it by the global batch size only."""
        unscaled = not isinstance(loss_scale, Tensor) and loss_scale == 1
        return None if unscaled else loss_scale / self._global_batch

    def compute_loss(
        self, logits: Tensor, targets: Sequence[Targets], factor: Scale | None
    ) -> tuple[Tensor, Tensor]:
        """The loss to call backward on, and [loss, correct predictions] summed over the images.

        targets: of each micro-batch, from `mix_labels`. factor: from `find_loss_factor`.
        """
        logits, options = to_float32_or_64(logits), self._options
        loss = _sum_losses(logits, targets, options)
        scaled = loss / self._global_batch if factor is None else loss * factor
        with torch.no_grad():  # a mixed image counts as correct if its own label is predicted
            labels = _concatenate([target[0].labels for target in targets])
            right = (logits.argmax(1) == labels).sum() if options.metrics else loss * nan
            return scaled, torch.stack([loss, right])


def build_pass(model: nn.Module, options: StepOptions, *, global_batch: int) -> RunPass:
    """A function that runs the forward and backward pass of a model, which may be wrapped."""
    parts = PassParts(model, options, global_batch=global_batch)

    def run_pass(batches: Sequence[MicroBatch], loss_scale: Scale) -> Tensor:
        mixes = parts.draw_mixes(batches)
        images = parts.join_images(batches, mixes)
        logits = parts.forward(images, [batch.first for batch in batches])
        targets, factor = parts.mix_targets(batches, mixes), parts.find_loss_factor(loss_scale)
        with RANGES("loss"):
            loss, totals = parts.compute_loss(logits, targets, factor)
        with RANGES("backward"):
            loss.backward()
        return totals

    return run_pass


def _concatenate(parts: list[Tensor]) -> Tensor:
    """The tensors of several micro-batches, concatenated."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _sum_losses(logits: Tensor, targets: Sequence[Targets], options: StepOptions) -> Tensor:
    """The summed loss of concatenated micro-batches."""
    images = [len(target[0].labels) for target in targets]
    parts = (logits,) if len(images) == 1 else logits.split(images)
    losses = [
        LOSSES[options.loss](part, target, options.label_smoothing)
        for part, target in zip(parts, targets, strict=True)
    ]
    return sum(losses[1:], losses[0])


def build_forward_backward(run_pass: RunPass, *, global_batch: int) -> ForwardBackward:
    """A function that runs the passes of a single replica one after the other."""

    def forward_backward(passes: Sequence[MicroBatch], loss_scale: Scale) -> Tensor:
        totals = [run_pass([batch], loss_scale) for batch in passes]
        return sum(totals[1:], totals[0]) / global_batch

    return forward_backward


def compute_logits(model: nn.Module, images: Tensor, options: StepOptions) -> Tensor:
    """The float32 logits of images to score."""
    with options.autocast():
        logits: Tensor = model(images).float()
        if options.flip:
            logits = (logits + model(images.flip(3)).float()) / 2
    return logits


def train_step(
    state: TrainState,
    passes: Sequence[MicroBatch],
    lr: float,
    *,
    options: StepOptions,
    forward_backward: ForwardBackward,
    loss_scale: float = 1.0,
    gather_norms: GatherNorms = lambda norms: norms,
) -> Tensor:
    """Accumulate the passes, update once and return [loss, gradient norm, top-1] on the device.

    Does not wait for the device: only log points and saves read values. If the loss scale adapts
    and the gradients are not finite, nothing is updated and the norm is returned as 0.
    gather_norms: turns the gradient norms of this process into those of the whole model.
    """
    if not state.model.training:
        state.model.train()
    scaler = state.scaler
    scale = loss_scale if scaler is None else scaler.multiplier
    loss, top1 = forward_backward(passes, scale)
    state.step += 1
    with RANGES("update"):
        if state.fused_update is not None:
            with state.offload.on_device() if state.offload else nullcontext():
                grad_norm = state.fused_update.apply(state.step, lr, loss_scale)
        else:
            assert not isinstance(scale, Tensor), "such a scale belongs to a fused update"
            grad_norm = _apply_update(state, lr, scale, options, gather_norms)
    return torch.stack([loss, grad_norm, top1])


def _apply_update(
    state: TrainState, lr: float, scale: float, options: StepOptions, gather_norms: GatherNorms
) -> Tensor:
    """Update once and return the gradient norm. An adaptive loss scale waits for the device."""
    scaler = state.scaler
    assert not isinstance(scaler, DeviceLossScale), "it belongs to a fused update"
    with state.update_context() as counts:
        gradients = collect_gradients(state.optimizer)
        grad_norm = _unscale_and_clip(gradients, scale, options, gather_norms)
        if scaler is not None and not bool(torch.isfinite(grad_norm)):
            scaler.record_overflow(state.step)
            state.optimizer.zero_grad(set_to_none=True)
            return torch.zeros_like(grad_norm)
        if options.velocity_ratio is not None:
            set_velocity_scale(state.optimizer, scale / options.velocity_ratio)
        update_weights(state.optimizer, lr)
    state.record_update(counts)
    if scaler is not None:
        scaler.record_finite_step(state.step)
    return grad_norm


@torch.no_grad()
def _unscale_and_clip(
    gradients: list[Tensor], scale: float, options: StepOptions, gather_norms: GatherNorms
) -> Tensor:
    """Unscale and clip the gradients; the global norm after unscaling and before clipping."""
    if scale != 1:
        torch._foreach_mul_(gradients, 1 / scale)
    # needed without metrics, too: it shows whether all gradients are finite
    norm = _compute_global_norm(gradients, gather_norms)
    clip_gradients(gradients, options, gather_norms, norm=norm)
    return norm


@torch.no_grad()
def clip_gradients(
    gradients: list[Tensor],
    options: StepOptions,
    gather_norms: GatherNorms = lambda norms: norms,
    *,
    norm: Tensor | None = None,
) -> None:
    """Clip by value, then by global norm, as the options say; norm: the gradients', if known."""
    if options.clip_value:
        torch._foreach_clamp_min_(gradients, -options.clip_value)
        torch._foreach_clamp_max_(gradients, options.clip_value)
        norm = None  # it may be smaller now
    if options.clip_norm:
        norm = _compute_global_norm(gradients, gather_norms) if norm is None else norm
        torch._foreach_mul_(gradients, (options.clip_norm / (norm + 1e-6)).clamp(max=1.0))


def _compute_global_norm(gradients: list[Tensor], gather_norms: GatherNorms) -> Tensor:
    return torch.linalg.vector_norm(gather_norms(torch.stack(torch._foreach_norm(gradients))))
