"""Passes that run as a CUDA graph: the host launches one graph instead of a thousand kernels.

The first passes of a kind run without a graph, and libraries choose their kernels in them. The next
is captured, and replayed from then on. Everything that changes from pass to pass is copied into
memory that the graph reads: images, targets, positions in the stream, the loss scale.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phalanx.engine.mixing import Targets, WeightedLabels
from phalanx.engine.step import MicroBatch, PassParts, Scale, StepOptions
from phalanx.errors import ConfigError, is_out_of_memory
from phalanx.ranges import RANGES

_PLAIN_PASSES = 2  # of each kind, before it is captured


class _PassInput(NamedTuple):
    """Everything that a pass depends on besides the model."""

    images: Tensor
    targets: list[Targets]  # of each micro-batch
    firsts: list[Tensor]  # positions in the training stream, int64
    factor: Tensor | None  # for the loss, from `PassParts.find_loss_factor`

    def tensors(self) -> list[Tensor]:
        """Every tensor, always in the same order."""
        labelled = [part for target in self.targets for labels in target for part in labels]
        found = [self.images, *labelled, *self.firsts, self.factor]
        return [part for part in found if isinstance(part, Tensor)]

    @property
    def signature(self) -> tuple[Any, ...]:
        """What decides which graph is replayed: the shapes, and which tensors are present."""
        targets = tuple(
            tuple(len(labels) - labels.count(None) for labels in target) for target in self.targets
        )
        return (tuple(self.images.shape), targets, self.factor is None)

    def clone(self) -> "_PassInput":
        """A copy in new memory."""
        return _PassInput(
            self.images.clone(memory_format=torch.channels_last),
            [tuple(WeightedLabels(*map(_clone, part)) for part in t) for t in self.targets],
            [first.clone() for first in self.firsts],
            _clone(self.factor),
        )

    def copy_from(self, other: "_PassInput") -> None:
        """Overwrite the values with those of another pass."""
        for own, new in zip(self.tensors(), other.tensors(), strict=True):
            own.copy_(new, non_blocking=True)


def _clone(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.clone()


class _Capture(NamedTuple):
    """A graph and the memory that its replays read and write."""

    graph: Any
    input: _PassInput
    totals: Tensor
    gradients: list[Tensor | None]  # of each weight


class CapturedPass:
    """A `RunPass` that replays graphs: one writes the gradients, another adds to them.

    Gradients stay in the same memory from step to step. If the weights have gradients in other
    memory than the graph's, the pass runs without a graph.
    """

    def __init__(self, model: nn.Module, options: StepOptions, *, global_batch: int) -> None:
        self._parts = PassParts(model, options, global_batch=global_batch)
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._plain: dict[Any, int] = {}  # passes that ran without a graph, by kind
        self._captures: dict[Any, _Capture] = {}
        self._pool: Any = None
        self._stream: Any = None

    def __call__(self, batches: Sequence[MicroBatch], loss_scale: Scale) -> Tensor:
        """Run one pass; returns [loss, correct predictions] summed over its images."""
        given = self._prepare(batches, loss_scale)
        held = [weight.grad for weight in self._weights]
        adds = any(gradient is not None for gradient in held)
        kind = (given.signature, adds)
        if kind not in self._captures:
            self._plain[given.signature] = self._plain.get(given.signature, 0) + 1
            if self._plain[given.signature] <= _PLAIN_PASSES:
                return self._run(given)
            if adds and not self._owns(held):
                return self._run(given)
            self._captures[kind] = self._capture(given)
        capture = self._captures[kind]
        if adds and not all(a is b for a, b in zip(held, capture.gradients, strict=True)):
            return self._run(given)
        capture.input.copy_from(given)
        with RANGES("replay"):
            capture.graph.replay()
        for weight, gradient in zip(self._weights, capture.gradients, strict=True):
            weight.grad = gradient
        return capture.totals.clone()  # the next replay writes over it

    def _prepare(self, batches: Sequence[MicroBatch], loss_scale: Scale) -> _PassInput:
        """The input of the model and all other values of a pass, on the device."""
        parts, device = self._parts, batches[0].labels.device
        mixes = parts.draw_mixes(batches)
        firsts = torch.tensor([batch.first for batch in batches]).pin_memory()
        factor = parts.find_loss_factor(loss_scale)
        if isinstance(factor, float):
            factor = torch.full((), factor, device=device)
        return _PassInput(
            parts.join_images(batches, mixes),
            parts.mix_targets(batches, mixes),
            list(firsts.to(device, non_blocking=True).unbind()),
            factor,
        )

    def _run(self, given: _PassInput) -> Tensor:
        """Run forward and backward, directly or while a graph is being captured."""
        logits = self._parts.forward(given.images, given.firsts)
        with RANGES("loss"):
            loss, totals = self._parts.compute_loss(logits, given.targets, given.factor)
        with RANGES("backward"):
            loss.backward()
        return totals

    def _owns(self, held: Sequence[Tensor | None]) -> bool:
        """Whether these gradients are the memory that one of the graphs writes to."""
        return any(
            all(a is b for a, b in zip(held, capture.gradients, strict=True))
            for capture in self._captures.values()
        )

    def _capture(self, given: _PassInput) -> _Capture:
        """Capture a pass; nothing is computed, so running statistics do not change."""
        kept, graph = given.clone(), torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._stream = self._stream or torch.cuda.Stream()
        capturing = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        try:
            with capturing:
                totals = self._run(kept)
        except RuntimeError as failure:
            if is_out_of_memory(failure):
                raise
            reason = str(failure).partition("\n")[0]
            raise ConfigError(
                f"--graph: a pass of this network cannot be replayed ({reason}); give --graph false"
            ) from failure
        return _Capture(graph, kept, totals, [weight.grad for weight in self._weights])
