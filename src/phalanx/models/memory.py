"""How much memory a training step needs at most: one pass on the meta device, byte by byte."""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.catalog.variant import Variant
from phalanx.errors import ConfigError
from phalanx.models.count import AUTOCAST_LAYERS, build_on_meta, cannot_count
from phalanx.models.recompute import enable_recomputation
from phalanx.models.units import find_noise_sizes

HALF_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class BytesPerWeight:
    """What every number of a weight costs, whatever the batch."""

    weight: int = 4
    gradient: int = 4
    optimizer: int = 4  # its state: 4 for momentum, 8 for AdamW
    update: int = 0  # temporaries during an update
    average: int = 0  # of a running average of the weights
    accumulates: bool = False  # a pass begins with the gradients of micro-batches before it


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a training step by what they are for, and the most there are at once."""

    weights: int  # with buffers
    gradients: int
    optimizer: int
    averages: int = 0  # of the weights, where they are made
    activations: int  # there between the forward and the backward pass of a micro-batch
    working: int  # what the peak has beyond all these; below 0 where they are not there together
    peak: int


@lru_cache(maxsize=64)  # a pass over the network each: a second for large ones
def predict_memory(
    variant: Variant,
    *,
    num_classes: int,
    batch: int,
    image_size: int,
    per_weight: BytesPerWeight,
    half: bool = False,
    stored: Sequence[str] | None = None,
) -> Memory:
    """The memory of a step on one device; stored: recomputation's patterns, None without it.

    half: as 16.32 computes; weights that have 16 bits themselves are not copied for it. Not
    included: what libraries take for themselves, and images that wait for later steps.
    """
    model = build_on_meta(variant, num_classes=num_classes, half=half).train()
    if stored is not None:
        enable_recomputation(model, stored, variant=variant)
    count = sum(weight.numel() for weight in model.parameters())
    gradients, optimizer = count * per_weight.gradient, count * per_weight.optimizer
    live = LiveBytes(gradients if per_weight.accumulates else 0)
    averages = count * per_weight.average
    # autocast copies the weights of its layers for a pass; autograd keeps the copies for the
    # backward pass, unless they are made again there
    copied = _autocast_weights(model) if half and per_weight.weight != HALF_BYTES else []
    saved = copied if stored is None else []
    width = 0 if per_weight.accumulates else per_weight.gradient
    _count_gradients(model, live, width=width, copied=saved)
    shape = (batch, 3, image_size, image_size)
    activations = _run_pass(model, shape, live=live, copied=copied, saved=saved)
    weights = count * per_weight.weight + sum(buffer.nbytes for buffer in model.buffers())
    peak = weights + averages + optimizer + max(live.peak, gradients + count * per_weight.update)
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        averages=averages,
        activations=activations,
        working=peak - weights - averages - gradients - optimizer - activations,
        peak=peak,
    )


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make, for as long as they are alive."""

    def __init__(self, start: int = 0):
        super().__init__()
        self.bytes = self.peak = start
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and count what is new among its outputs."""
        out = func(*args, **(kwargs or {}))
        inputs = {id(part) for part in args if isinstance(part, Tensor)}
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, Tensor) and id(tensor) not in inputs:
                self._count_until_freed(tensor.untyped_storage())
        return out

    def add(self, count: int) -> None:
        """Count bytes that are more or fewer from now on."""
        self.bytes += count
        self.peak = max(self.peak, self.bytes)

    def ignore(self, tensor: Tensor) -> None:
        """Never count this one: it is there anyway."""
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


def _autocast_weights(model: nn.Module) -> list[Tensor]:
    """The weights that autocast makes a 16-bit copy of for a pass."""
    layers = [module for module in model.modules() if isinstance(module, AUTOCAST_LAYERS)]
    return [weight for layer in layers for weight in layer.parameters()]


def _half_bytes(weights: Iterable[Tensor]) -> int:
    """What 16-bit copies of weights take."""
    return HALF_BYTES * sum(weight.numel() for weight in weights)


def _count_gradients(
    model: nn.Module, live: LiveBytes, *, width: int, copied: Iterable[Tensor]
) -> None:
    """Count each finished gradient with that many bytes per number, and drop the one on meta.

    The weight's copy in 16 bits, if autograd saved one, is freed then.
    """
    copies = {id(weight) for weight in copied}

    def count_finished(weight: Tensor) -> None:
        live.add(width * weight.numel() - _half_bytes([weight] if id(weight) in copies else []))
        weight.grad = None

    for tensor in (*model.parameters(), *model.buffers()):
        live.ignore(tensor)
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(count_finished)


def _run_pass(
    model: nn.Module,
    shape: tuple[int, ...],
    *,
    live: LiveBytes,
    copied: list[Tensor],
    saved: list[Tensor],
) -> int:
    """Forward, loss and backward under the count; gives the bytes that are alive between them.

    The copies that autocast makes are freed when it ends, except for those that autograd saved.
    """
    start, sizes = live.bytes, find_noise_sizes(model)
    live.add(_half_bytes(copied))
    try:
        with torch.device("meta"), live:
            images = torch.empty(shape)
            noise = {path: torch.empty(shape[0], size) for path, size in sizes.items()}
            logits = model(images, noise) if noise else model(images)
            live.add(_half_bytes(saved) - _half_bytes(copied))
            between = live.bytes - start
            labels = torch.empty(shape[0], dtype=torch.long)
            cross_entropy(logits.float(), labels).backward()
    except (RuntimeError, ValueError) as error:
        reason = str(error).rstrip(".")
        if "meta tensor" in reason:  # a plugin's network that looks at values
            raise cannot_count(error) from error
        raise ConfigError(
            f"a batch of {' x '.join(map(str, shape))} cannot be trained on: {reason}; "
            "try another --batch-size or --image-size"
        ) from error
    except Exception as error:  # of a plugin
        raise cannot_count(error) from error
    return between
