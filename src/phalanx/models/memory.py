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
from phalanx.models.count import IN_HALF, build_on_meta, uncountable
from phalanx.models.recompute import store_only

HALF_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class Upkeep:
    """Bytes that every weight costs, whatever the batch."""

    weight: int = 4
    gradient: int = 4
    optimizer: int = 4  # all that the update rule remembers: 4 for momentum, 8 for AdamW
    update: int = 0  # temporaries while the weights are moved
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
    upkeep: Upkeep,
    half: bool = False,
    stored: Sequence[str] | None = None,
) -> Memory:
    """The memory of a step on one device; stored: recomputation's patterns, None without it.

    half: as 16.32 computes; weights that have 16 bits themselves are not copied for it. Not in
    it: what libraries take for themselves, and images that wait for later steps.
    """
    model = build_on_meta(variant, num_classes=num_classes, half=half).train()
    if stored is not None:
        store_only(model, stored, variant=variant)
    count = sum(weight.numel() for weight in model.parameters())
    gradients, optimizer = count * upkeep.gradient, count * upkeep.optimizer
    live = Live(gradients if upkeep.accumulates else 0)
    averages = count * upkeep.average
    copied = _weights_in_half(model) if half and upkeep.weight != HALF_BYTES else []
    kept = copied if stored is None else []
    _hold_gradients(model, live, width=0 if upkeep.accumulates else upkeep.gradient, copied=kept)
    shape = (batch, 3, image_size, image_size)
    activations = _run_pass(model, shape, live=live, copied=copied, kept=kept)
    weights = count * upkeep.weight + sum(buffer.nbytes for buffer in model.buffers())
    peak = weights + averages + optimizer + max(live.peak, gradients + count * upkeep.update)
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        averages=averages,
        activations=activations,
        working=peak - weights - averages - gradients - optimizer - activations,
        peak=peak,
    )


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make while they are alive."""

    def __init__(self, start: int = 0):
        super().__init__()
        self.bytes = self.peak = start
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and count what is new among its outputs."""
        out = func(*args, **(kwargs or {}))
        given = {id(part) for part in args if isinstance(part, Tensor)}
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, Tensor) and id(tensor) not in given:
                self._watch(tensor.untyped_storage())
        return out

    def add(self, count: int) -> None:
        """Count bytes that are more or fewer from now on."""
        self.bytes += count
        self.peak = max(self.peak, self.bytes)

    def ignore(self, tensor: Tensor) -> None:
        """Never count this one: it is there anyway."""
        storage = tensor.untyped_storage()
        self._alive[storage._cdata] = weakref.ref(storage)

    def _watch(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed, once."""
        place, size = storage._cdata, storage.nbytes()
        if place in self._alive:
            return

        def freed(_: object) -> None:
            del self._alive[place]
            self.bytes -= size

        self._alive[place] = weakref.ref(storage, freed)
        self.add(size)


def _weights_in_half(model: nn.Module) -> list[Tensor]:
    """The weights that autocast makes a 16-bit copy of for a pass."""
    casts = [module for module in model.modules() if isinstance(module, IN_HALF)]
    return [weight for cast in casts for weight in cast.parameters()]


def _bytes_in_half(weights: Iterable[Tensor]) -> int:
    """What 16-bit copies of weights take."""
    return HALF_BYTES * sum(weight.numel() for weight in weights)


def _hold_gradients(model: nn.Module, live: Live, *, width: int, copied: Iterable[Tensor]) -> None:
    """Count each finished gradient with that many bytes a weight, and drop the one on meta.

    The weight's copy in 16 bits, if autograd kept one, is gone then.
    """
    copies = {id(weight) for weight in copied}

    def finished(weight: Tensor) -> None:
        live.add(width * weight.numel() - _bytes_in_half([weight] if id(weight) in copies else []))
        weight.grad = None

    for tensor in (*model.parameters(), *model.buffers()):
        live.ignore(tensor)
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(finished)


def _run_pass(
    model: nn.Module,
    shape: tuple[int, ...],
    *,
    live: Live,
    copied: list[Tensor],
    kept: list[Tensor],
) -> int:
    """Forward, loss and backward under the count; what is alive between them comes back.

    The copies that autocast makes go when it ends, but for those that autograd keeps.
    """
    start, wanted = live.bytes, getattr(model, "chances", {})
    live.add(_bytes_in_half(copied))
    try:
        with torch.device("meta"), live:
            images = torch.empty(shape)
            chances = {path: torch.empty(shape[0], width) for path, width in wanted.items()}
            logits = model(images, chances) if chances else model(images)
            live.add(_bytes_in_half(kept) - _bytes_in_half(copied))
            between = live.bytes - start
            labels = torch.empty(shape[0], dtype=torch.long)
            cross_entropy(logits.float(), labels).backward()
    except (RuntimeError, ValueError) as error:
        told = str(error).rstrip(".")
        if "meta tensor" in told:  # a plugin's network that looks at values
            raise uncountable(error) from error
        raise ConfigError(
            f"a batch of {' x '.join(map(str, shape))} cannot be trained on: {told}; "
            "try another --batch-size or --image-size"
        ) from error
    except Exception as error:  # of a plugin
        raise uncountable(error) from error
    return between
