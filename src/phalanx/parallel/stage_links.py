"""The communication between the stages of a pipeline.

torch.distributed.pipelining permanently keeps two buffers for every micro-batch of a step, of which
there may be 1,024. Here a stage has buffers only for the passes in flight.
"""

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.plan.layout import Layout

_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_DIMENSIONS = 8
_Group = Any  # of torch.distributed, which hides it from type checkers


class _Spec(NamedTuple):
    """The shape and dtype of a tensor that is received."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class IncomingTensor:
    """A tensor that is being received."""

    def __init__(self, spec: _Spec, device: torch.device, source: int, group: _Group) -> None:
        self._buffer = torch.empty(_to_sent_shape(spec.shape), dtype=spec.dtype, device=device)
        self._work = dist.irecv(self._buffer, source, group=group)

    def wait(self) -> Tensor:
        """Wait for the tensor; it has the memory layout that it had at its sender."""
        assert self._work is not None
        self._work.wait()
        return self._buffer.permute(0, 3, 1, 2) if self._buffer.dim() == 4 else self._buffer


def _to_sent_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the memory that is sent: images are channels_last."""
    return (shape[0], *shape[2:], shape[1]) if len(shape) == 4 else shape


def _to_sent(tensor: Tensor) -> Tensor:
    return (tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor).contiguous()


class StageLinks:
    """One stage's links to the others of its pipeline, and to the same stage of other pipelines.

    Activations go down to the next stage and gradients up to the previous one. Each direction has
    its own process group: in a single one, two ranks that send to each other would deadlock on a
    GPU. All ranks must create theirs at the same time.
    """

    def __init__(
        self, layout: Layout, rank: int, device: torch.device, *, timeout: timedelta
    ) -> None:
        self._device = device
        new_group = partial(dist.new_group, timeout=timeout)
        self.stage, self._members = layout.stage_of(rank), layout.ranks_of(layout.pipeline_of(rank))
        for pipeline in range(layout.pipelines):
            members = list(layout.ranks_of(pipeline))
            groups = new_group(members), new_group(members)
            host = new_group(members, backend="gloo")
            if rank in members:
                (self._down, self._up), self._host = groups, host
        for stage in range(layout.stages):
            group = new_group(list(layout.peers_of(stage)))
            if stage == self.stage:
                self.peers: _Group = group  # the same stage of all pipelines
        self._input: _Spec | None = None
        self._output: _Spec | None = None
        self._sending: dict[_Group, tuple[Any, Tensor]] = {}  # the last in each direction

    @property
    def is_first(self) -> bool:
        """Whether it is the stage that gets the images."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it is the stage that computes the logits."""
        return self.stage == len(self._members) - 1

    # --- activations and gradients ---

    def begin_passes(self) -> None:
        """Prepare for passes whose tensors may have new shapes and dtypes."""
        self._input = self._output = None

    def send_output(self, output: Tensor) -> None:
        """Send an output to the next stage; before the first one, send shape and dtype."""
        target = self._members[self.stage + 1]
        if self._output is None:
            self._output = _Spec(tuple(output.shape), output.dtype)
            numbers = [_TYPES.index(output.dtype), output.dim(), *output.shape]
            header = torch.tensor(numbers + [0] * (_MOST_DIMENSIONS - len(numbers)))
            dist.send(header, target, group=self._host)
        self._send(output, target, self._down)

    def receive_input(self) -> IncomingTensor:
        """Start receiving an input from the previous stage."""
        source = self._members[self.stage - 1]
        if self._input is None:
            header = torch.zeros(_MOST_DIMENSIONS, dtype=torch.int64)
            dist.recv(header, source, group=self._host)
            dtype, dimensions, *shape = header.tolist()
            self._input = _Spec(tuple(shape[:dimensions]), _TYPES[dtype])
        return IncomingTensor(self._input, self._device, source, self._down)

    def send_gradient(self, gradient: Tensor) -> None:
        """Send the gradient of an input to the previous stage."""
        self._send(gradient, self._members[self.stage - 1], self._up)

    def receive_gradient(self) -> IncomingTensor | None:
        """Start receiving the gradient of an output; None before the first output was sent."""
        if self._output is None:
            return None
        return IncomingTensor(self._output, self._device, self._members[self.stage + 1], self._up)

    def _send(self, tensor: Tensor, target: int, group: _Group) -> None:
        """Send asynchronously; one tensor at a time in each direction."""
        self._wait_until_sent(group)
        sent = _to_sent(tensor.detach())
        self._sending[group] = dist.isend(sent, target, group=group), sent

    def _wait_until_sent(self, group: _Group) -> None:
        if group in self._sending:
            self._sending.pop(group)[0].wait()

    def flush(self) -> None:
        """Wait until everything that was sent has arrived."""
        for group in (self._down, self._up):
            self._wait_until_sent(group)

    # --- exchange among all stages ---

    def send_labels(self, labels: Tensor) -> Tensor:
        """The labels of the first stage, in the last one; other stages keep theirs."""
        if self.is_first:
            dist.send(labels, self._members[-1], group=self._down)
        elif self.is_last:
            labels = torch.empty_like(labels)
            dist.recv(labels, self._members[0], group=self._down)
        return labels

    def broadcast(self, numbers: Tensor, *, stage: int) -> Tensor:
        """The numbers of one stage, in all stages; the shape must be the same in all."""
        numbers = numbers.contiguous()
        dist.broadcast(numbers, self._members[stage], group=self._down)
        return numbers

    def sum_over_stages(self, numbers: Tensor) -> Tensor:
        """The sum over all stages."""
        dist.all_reduce(numbers, group=self._down)
        return numbers

    def gather(self, value: Any) -> list[Any]:
        """The values of all stages, in order."""
        values: list[Any] = [None] * len(self._members)
        dist.all_gather_object(values, value, group=self._host)
        return values

    def gather_to_first(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of all stages, in the first stage; empty in the others."""
        parts: list[Any] | None = [None] * len(self._members) if self.is_first else None
        dist.gather_object(dict(tensors), parts, dst=self._members[0], group=self._host)
        return {name: tensor for part in parts or () for name, tensor in part.items()}


class StageNorms:
    """Gathers the gradient norms of a whole model from its stages, in the model's order.

    counts: the number of gradients of this stage in each of its optimizer's groups.
    """

    def __init__(self, links: StageLinks, counts: list[int]) -> None:
        self._links = links
        everybody = links.gather(counts)
        self._indices: list[int] = []
        first = 0
        for group in range(len(counts)):
            for stage, theirs in enumerate(everybody):
                if stage == links.stage:
                    self._indices += range(first, first + theirs[group])
                first += theirs[group]
        self._all = first

    def __call__(self, norms: Tensor) -> Tensor:
        """The norms of all stages; adding zeros is exact, so the order of the sum is irrelevant."""
        everywhere = torch.zeros(self._all, dtype=norms.dtype, device=norms.device)
        everywhere[self._indices] = norms
        return self._links.sum_over_stages(everywhere)
