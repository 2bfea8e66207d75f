"""What a model costs, found on the meta device, where tensors have shapes and no values.

Unit by unit: parameters, multiply-adds, and what the backward pass keeps. And the memory that a
training step needs at most: one pass whose tensors are counted byte by byte.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from phalanx.catalog.models import ModelSize
from phalanx.catalog.variant import Variant
from phalanx.errors import ConfigError
from phalanx.models.build import build_model
from phalanx.models.recompute import enable_recomputation
from phalanx.models.units import UnitModel, find_noise_sizes, to_unit_model

_FLOPS_PER_MAC = 2
HALF_BYTES = 2
_AUTOCAST_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)  # these compute in 16 bits
_FLOAT32_NORMS = (nn.GroupNorm, nn.LayerNorm)  # under autocast
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, *_FLOAT32_NORMS)


@dataclass(frozen=True, kw_only=True)
class UnitCount:
    """The figures of one unit."""

    name: str
    shape: tuple[int, ...]  # of its output, for one image
    parameters: int
    macs: int  # multiply-adds of convolutions and linear layers, for one image
    activation_bytes: int  # what the backward pass of the whole batch needs from it


def count_units(
    variant: Variant, *, num_classes: int, batch: int, image_size: int, half: bool = False
) -> list[UnitCount]:
    """The figures of every unit in the order of the data; half: activations as 16.32 keeps them."""
    model = to_unit_model(build_on_meta(variant, num_classes=num_classes, half=half))
    images = torch.empty(batch, 3, image_size, image_size, device="meta")
    try:
        return count_model(model, images)
    except ConfigError:
        raise
    except Exception as error:
        raise _cannot_count(error) from error


def build_on_meta(variant: Variant, *, num_classes: int, half: bool) -> nn.Module:
    """A network of shapes without values; half: its tensors have the bits of 16.32."""
    full_norms = variant.norm.full_precision
    # these norms pass the device to autocast, which does not know meta; emulate_autocast does it
    variant = replace(variant, norm=replace(variant.norm, full_precision=False))
    try:
        with torch.device("meta"):
            model = build_model(variant, num_classes=num_classes)
    except Exception as error:  # of a plugin: our own networks never look at values
        raise _cannot_count(error) from error
    if half:
        emulate_autocast(model, full_norms=full_norms)
    return model


def _cannot_count(error: Exception) -> ConfigError:
    """The error for a plugin's network that cannot be built or run without values."""
    return ConfigError(
        f"--plugin: its network cannot be counted: {error}; it is built on torch's device meta, "
        "where tensors have shapes but no values"
    )


def count_size(variant: Variant) -> tuple[ModelSize, int]:
    """The whole model's figures at its own image size and classes, and how many units it has."""
    counts = count_units(
        variant, num_classes=variant.classes, batch=2, image_size=variant.image_size
    )
    size = ModelSize(sum(unit.parameters for unit in counts), sum(unit.macs for unit in counts))
    return size, len(counts)


def count_model(model: UnitModel, images: Tensor) -> list[UnitCount]:
    """The figures of every unit for that batch, in training and with nothing dropped."""
    model.train()
    saved = _SavedBytes([*model.parameters(), *model.buffers()])
    counted: set[nn.Parameter] = set()
    counts, x = [], images
    for unit, paths in model.units.items():
        before = saved.bytes
        hooks = saved_tensors_hooks(saved.add, _refuse_backward)
        with hooks, FlopCounterMode(display=False) as flops:
            x = _run_unit(model, unit, x)
        own = {weight for path in paths for weight in model.get_submodule(path).parameters()}
        counts.append(
            UnitCount(
                name=unit,
                shape=tuple(x.shape[1:]),
                parameters=sum(weight.numel() for weight in own - counted),
                macs=flops.get_total_flops() // (_FLOPS_PER_MAC * len(images)),
                activation_bytes=saved.bytes - before,
            )
        )
        counted |= own
    return counts


def _run_unit(model: UnitModel, unit: str, x: Tensor) -> Tensor:
    """The unit's output; what it cannot take is a mistake in the sizes, or a plugin's."""
    try:
        return model.run_unit(unit, x)
    except (RuntimeError, ValueError) as error:
        shape = " x ".join(map(str, x.shape))
        raise ConfigError(
            f"{unit} cannot take a batch of {shape}: {str(error).rstrip('.')}; "
            "try another --batch-size or --image-size"
        ) from error


class _SavedBytes:
    """Bytes of the storages that autograd saves, each counted once, without `existing` ones."""

    def __init__(self, existing: Iterable[Tensor]):
        self.bytes = 0
        # the tensors are held, so that no address is used a second time
        self._seen = {tensor.untyped_storage()._cdata: tensor for tensor in existing}

    def add(self, tensor: Tensor) -> None:
        """Count what a saved tensor keeps alive: of a view, all it is a view of."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = tensor.detach()
            self.bytes += storage.nbytes()


def _refuse_backward(saved: None) -> Tensor:
    """What was counted was not stored."""
    raise AssertionError("a count has no backward pass")


def emulate_autocast(model: nn.Module, *, full_norms: bool) -> None:
    """Make a model on meta give each tensor the bits that it has under autocast on a GPU.

    Convolutions and linear layers compute in 16 bits, batch norm in the type of its input, group
    norm in 32. Weights become 16 bits too, which changes no figure: their bytes are not counted.
    """
    for module in model.modules():
        if isinstance(module, _AUTOCAST_LAYERS):
            module.bfloat16()
            module.register_forward_pre_hook(lambda _, inputs: inputs[0].bfloat16())
        elif type(module) in _FLOAT32_NORMS or (full_norms and isinstance(module, _NORMS)):
            module.register_forward_pre_hook(lambda _, inputs: inputs[0].float())
            if full_norms:
                module.register_forward_hook(lambda _, inputs, output: output.bfloat16())


# --- the memory of a step ---


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
    sums: int = 0  # of the gradients of all replicas, where they are kept apart
    statistics: int = 0  # the running ones of replicas, where there are several
    activations: int  # there between the forward and the backward pass of a micro-batch
    transfers: int = 0  # between stages: what waits to be sent, or was received ahead of its pass
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
    images = torch.empty(batch, 3, image_size, image_size, device="meta")
    copied = half and per_weight.weight != HALF_BYTES
    return trace_pass(
        model, images, per_weight=per_weight, copied=copied, recomputes=stored is not None
    ).memory


class _TracedPass(NamedTuple):
    """What became of a pass on the meta device."""

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
) -> _TracedPass:
    """The memory of the passes of a model, or of a stage with so many micro-batches in flight.

    Each of these keeps its activations. A stage also holds the input and the gradient that it has
    received ahead of their passes, and a gradient until it is sent; outputs are kept anyway.

    x: requires a gradient where another stage has sent it. copied: autocast copies the weights of
    its layers for a pass. Autograd keeps the copies for the backward pass, unless they are made
    again there.
    """
    count = sum(weight.numel() for weight in model.parameters())
    gradients, optimizer = count * per_weight.gradient, count * per_weight.optimizer
    live = LiveBytes(gradients if per_weight.accumulates else 0)
    averages = count * per_weight.average
    copies = _autocast_weights(model) if copied else []
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
    return _TracedPass(memory, output)


@lru_cache(maxsize=64)
def count_statistics_bytes(variant: Variant, *, num_classes: int) -> int:
    """Bytes of the means and variances that a model's batch norms keep."""
    model = build_on_meta(variant, num_classes=num_classes, half=False)
    return sum(buffer.nbytes for buffer in model.buffers() if buffer.is_floating_point())


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
    layers = [module for module in model.modules() if isinstance(module, _AUTOCAST_LAYERS)]
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
    received: Tensor,
    *,
    live: LiveBytes,
    copied: list[Tensor],
    saved: list[Tensor],
    is_last: bool,
) -> tuple[int, Tensor]:
    """Forward, loss and backward under the count; gives the bytes that are alive between them.

    The copies that autocast makes are freed when it ends, except for those that autograd saved.
    """
    start, sizes, batch = live.bytes, find_noise_sizes(model), len(received)
    live.add(_half_bytes(copied))
    try:
        with torch.device("meta"), live:
            x = torch.empty_like(received).requires_grad_(received.requires_grad)
            noise = {path: torch.empty(batch, size) for path, size in sizes.items()}
            output = model(x, noise) if noise else model(x)
            live.add(_half_bytes(saved) - _half_bytes(copied))
            between = live.bytes - start
            if is_last:
                labels = torch.empty(batch, dtype=torch.long)
                cross_entropy(output.float(), labels).backward()
            else:
                output.backward(torch.empty_like(output))
    except (RuntimeError, ValueError) as error:
        reason = str(error).rstrip(".")
        if "meta tensor" in reason:  # a plugin's network that looks at values
            raise _cannot_count(error) from error
        raise ConfigError(
            f"a batch of {' x '.join(map(str, received.shape))} cannot be trained on: {reason}; "
            "try another --batch-size or --image-size"
        ) from error
    except Exception as error:  # of a plugin
        raise _cannot_count(error) from error
    return between, output.detach()
