"""The memory of a training step, predicted by a pass on the meta device."""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.catalog.variant import Variant
from phalanx.errors import ConfigError
from phalanx.kernels.choices import CHOICES
from phalanx.models.cost import AUTOCAST_LAYERS, Fuse, build_on_meta, explain_meta_error
from phalanx.models.recompute import enable_recomputation
from phalanx.models.units import find_noise_sizes

HALF_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class BytesPerWeight:
    """The bytes for each element of the weights, independent of the batch."""

    weight: int = 4
    gradient: int = 4
    optimizer: int = 4  # optimizer state: 4 for momentum, 8 for AdamW
    update: int = 0  # temporaries during an update
    average: int = 0  # moving average of the weights
    accumulates: bool = False  # whether gradients of earlier micro-batches exist before a pass


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The bytes of a training step by purpose, and the peak."""

    weights: int  # with buffers
    gradients: int
    optimizer: int
    averages: int = 0  # of the weights, if they are averaged
    sums: int = 0  # of the gradients of all replicas, if they are stored separately
    statistics: int = 0  # running statistics of replicas, if there are several
    activations: int  # kept between the forward and the backward pass of a micro-batch
    transfers: int = 0  # between stages: waiting to be sent, or received ahead of its pass
    working: int  # the rest of the peak; below 0 if the others are not all needed at once
    peak: int


@dataclass(frozen=True, kw_only=True)
class PassSpec:
    """The shape and precision of a pass through a model."""

    num_classes: int
    batch: int
    image_size: int
    half: bool = False  # with precision 16.32
    stored: tuple[str, ...] | None = None  # the patterns of recomputation; None without it
    fuse: Fuse | None = None  # makes units use fused kernels

    def build(self, variant: Variant) -> nn.Module:
        """The model on the meta device, in training mode."""
        return build_on_meta(
            variant, num_classes=self.num_classes, half=self.half, fuse=self.fuse
        ).train()

    def make_images(self) -> Tensor:
        """A micro-batch on the meta device."""
        return torch.empty(self.batch, 3, self.image_size, self.image_size, device="meta")


@lru_cache(maxsize=64)  # each call runs a pass: a second for large networks
def predict_memory(variant: Variant, one_pass: PassSpec, *, per_weight: BytesPerWeight) -> Memory:
    """The memory of a step on one device.

    16-bit weights are not copied for passes in 16 bits. Not included: memory that libraries
    allocate for themselves, and images that wait for later steps.
    """
    model, recomputes = one_pass.build(variant), one_pass.stored is not None
    if one_pass.stored is not None:
        enable_recomputation(model, one_pass.stored, variant=variant)
    copied = one_pass.half and per_weight.weight != HALF_BYTES
    return trace_pass(
        model, one_pass.make_images(), per_weight=per_weight, copied=copied, recomputes=recomputes
    ).memory


class _PassTrace(NamedTuple):
    """The result of a pass on the meta device."""

    memory: Memory
    output: Tensor


def trace_pass(
    model: nn.Module,
    x: Tensor,
    *,
    per_weight: BytesPerWeight,
    copied: bool,
    recomputes: bool,
    is_last: bool = True,
    in_flight: int = 1,
) -> _PassTrace:
    """The memory of the passes of a model, or of a stage with `in_flight` micro-batches.

    Each of these keeps its activations. A stage also holds the input and the gradient that it has
    received ahead of their passes, and a gradient until it is sent; outputs are kept anyway.

    x: requires a gradient if it comes from another stage. copied: whether autocast copies the
    weights of its layers for a pass. Autograd keeps the copies for the backward pass, unless they
    are recomputed there.
    """
    count = sum(weight.numel() for weight in model.parameters())
    gradients, optimizer = count * per_weight.gradient, count * per_weight.optimizer
    live = LiveBytes(gradients if per_weight.accumulates else 0)
    averages = count * per_weight.average
    copies = _find_autocast_weights(model) if copied else []
    saved = [] if recomputes else copies
    width = 0 if per_weight.accumulates else per_weight.gradient
    _count_gradients(model, live, width=width, copied=saved)
    activations, output = _run_pass(
        model, x, live=live, copied=copies, saved=saved, is_last=is_last
    )
    transfers = 2 * x.nbytes * x.requires_grad + output.nbytes * (not is_last)
    passes = live.peak + (in_flight - 1) * activations + transfers
    weights = count * per_weight.weight + sum(buffer.nbytes for buffer in model.buffers())
    lasting = weights + averages + optimizer
    peak = lasting + max(passes, gradients + count * per_weight.update)
    memory = Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        averages=averages,
        activations=in_flight * activations,
        transfers=transfers,
        working=peak - lasting - gradients - in_flight * activations - transfers,
        peak=peak,
    )
    return _PassTrace(memory, output)


@lru_cache(maxsize=64)
def count_statistics_bytes(variant: Variant, *, num_classes: int) -> int:
    """The bytes of the running means and variances of a model's batch norms."""
    model = build_on_meta(variant, num_classes=num_classes, half=False)
    return sum(buffer.nbytes for buffer in model.buffers() if buffer.is_floating_point())


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations create, while they are alive."""

    def __init__(self, start: int = 0):
        super().__init__()
        self.bytes = self.peak = start
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and count the new storages among its outputs."""
        out = func(*args, **(kwargs or {}))
        inputs = {id(part) for part in args if isinstance(part, Tensor)}
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, Tensor) and id(tensor) not in inputs:
                self._count_until_freed(tensor.untyped_storage())
        return out

    def add(self, count: int) -> None:
        """Add a number of bytes, which may be negative."""
        self.bytes += count
        self.peak = max(self.peak, self.bytes)

    def ignore(self, tensor: Tensor) -> None:
        """Never count this tensor, which is counted elsewhere."""
        storage = tensor.untyped_storage()
        self._alive[storage._cdata] = weakref.ref(storage)

    def _count_until_freed(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._alive:
            return

        def subtract(_: object) -> None:
            del self._alive[address]
            self.bytes -= size

        self._alive[address] = weakref.ref(storage, subtract)
        self.add(size)


def _find_autocast_weights(model: nn.Module) -> list[Tensor]:
    """The weights that autocast copies to 16 bits for a pass."""
    layers = [module for module in model.modules() if isinstance(module, AUTOCAST_LAYERS)]
    return [weight for layer in layers for weight in layer.parameters()]


def _count_half_bytes(weights: Iterable[Tensor]) -> int:
    """The bytes of 16-bit copies of weights."""
    return HALF_BYTES * sum(weight.numel() for weight in weights)


def _count_gradients(
    model: nn.Module, live: LiveBytes, *, width: int, copied: Iterable[Tensor]
) -> None:
    """Count `width` bytes per element for each finished gradient, and drop the one on meta.

    The 16-bit copy of its weight, if autograd saved one, is freed then.
    """
    copies = {id(weight) for weight in copied}

    def count_finished(weight: Tensor) -> None:
        live.add(
            width * weight.numel() - _count_half_bytes([weight] if id(weight) in copies else [])
        )
        weight.grad = None

    for tensor in (*model.parameters(), *model.buffers()):
        live.ignore(tensor)
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(count_finished)


def _run_pass(
    model: nn.Module,
    received: Tensor,
    *,
    live: LiveBytes,
    copied: list[Tensor],
    saved: list[Tensor],
    is_last: bool,
) -> tuple[int, Tensor]:
    """Run forward, loss and backward; returns the bytes alive between them, and the output.

    The copies that autocast makes are freed when it ends, except for those that autograd saved.
    """
    start, sizes, batch = live.bytes, find_noise_sizes(model), len(received)
    live.add(_count_half_bytes(copied))
    try:
        with CHOICES.without_timing(), torch.device("meta"), live:
            x = torch.empty_like(received).requires_grad_(received.requires_grad)
            noise = {path: torch.empty(batch, size) for path, size in sizes.items()}
            output = model(x, noise) if noise else model(x)
            live.add(_count_half_bytes(saved) - _count_half_bytes(copied))
            between = live.bytes - start
            if is_last:
                labels = torch.empty(batch, dtype=torch.long)
                cross_entropy(output.float(), labels).backward()
            else:
                output.backward(torch.empty_like(output))
    except (RuntimeError, ValueError) as error:
        reason = str(error).rstrip(".")
        if "meta tensor" in reason:  # a plugin's network that reads values
            raise explain_meta_error(error) from error
        raise ConfigError(
            f"a batch of {' x '.join(map(str, received.shape))} cannot be trained on: {reason}; "
            "try another --batch-size or --image-size"
        ) from error
    except Exception as error:  # from a plugin
        raise explain_meta_error(error) from error
    return between, output.detach()
