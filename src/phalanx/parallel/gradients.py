"""Sums the gradients of all replicas, over the ranks that have the same weights.

If a model is split into stages, those are the ranks with the same stage.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_MIB = 2**20


class LocalSum:
    """The gradient sum in one process: autograd accumulates it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def pass_context(self, *, last: bool) -> AbstractContextManager[Any]:
        """The context of a pass; last: whether it is the rank's last pass of the step."""
        return nullcontext()

    def end_round(self, ranks: int) -> None:
        """Called when the first `ranks` ranks have run one turn each."""

    def finish(self, totals: Tensor) -> Tensor:
        """Leave the sums in the parameters' gradients; returns [loss, correct] of all turns."""
        return totals


class DdpSum(LocalSum):
    """DistributedDataParallel with sums instead of means, overlapped with the last pass."""

    def __init__(self, model: nn.Module, *, bucket_mib: float) -> None:
        device = next(model.parameters()).device
        with warnings.catch_warnings():
            # torch 2.11 does not have what 2.13 recommends instead of broadcast_buffers
            warnings.simplefilter("ignore", FutureWarning)
            wrapped = DistributedDataParallel(
                model,
                device_ids=[device] if device.type == "cuda" else None,
                bucket_cap_mb=bucket_mib,
                broadcast_buffers=False,  # each replica has its own
                init_sync=False,  # all ranks start with the same weights
                gradient_as_bucket_view=True,
            )
        wrapped.register_comm_hook(None, _sum_bucket)
        super().__init__(wrapped)
        self._wrapped = wrapped

    def pass_context(self, *, last: bool) -> AbstractContextManager[Any]:
        """Gradients are sent in a rank's last pass, when its sum is complete."""
        return nullcontext() if last else self._wrapped.no_sync()

    def finish(self, totals: Tensor) -> Tensor:
        """The [loss, correct] of all turns; the gradients are already summed."""
        return _gather_rounds(totals)


def _sum_bucket(
    _: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """The sum of a bucket over all ranks."""
    started = _PendingAllReduce(bucket.buffer(), None)
    return started.work.get_future().then(lambda _: started.take())


class _PendingAllReduce:
    """A running all-reduce over the ranks of a group."""

    def __init__(self, buffer: Tensor, group: Any) -> None:
        self._buffer = buffer
        # gloo cannot sum bfloat16, and sums float16 inaccurately
        self._narrow = not buffer.is_cuda and buffer.element_size() < 4
        self._wide = buffer.float() if self._narrow else buffer
        self.work: Any = dist.all_reduce(self._wide, group=group, async_op=True)

    def wait(self) -> None:
        """Wait for the sum, and write it to the buffer."""
        self.work.wait()
        self.take()

    def take(self) -> Tensor:
        """The buffer, with the sum in it."""
        return self._buffer.copy_(self._wide) if self._narrow else self._buffer


class GroupSum(LocalSum):
    """Sums over the ranks of a group, after all passes of a step.

    A stage has several micro-batches in flight, which DistributedDataParallel does not support.
    """

    def __init__(self, model: nn.Module, *, bucket_mib: float, group: Any) -> None:
        super().__init__(model)
        self._bytes, self._group = int(bucket_mib * _MIB), group
        self._buckets: list[_Bucket] = []

    def finish(self, totals: Tensor) -> Tensor:
        """Sum the gradients, all buckets at the same time."""
        if not self._buckets:
            self._buckets = _fill_buckets(self.model, self._bytes)
        works = [bucket.start_sum(self._group) for bucket in self._buckets]
        for bucket, work in zip(self._buckets, works, strict=True):
            work.wait()
            bucket.assign_gradients()
        return _gather_rounds(totals, self._group)


class OrderedSum(LocalSum):
    """Sums in the order of replicas, with the same bits on any number of ranks.

    After every round the gradients of all ranks are gathered, bucket by bucket, and added one
    after the other.
    """

    def __init__(
        self, model: nn.Module, *, bucket_mib: float, ranks: int, group: Any = None
    ) -> None:
        super().__init__(model)
        self._bytes, self._ranks, self._group = int(bucket_mib * _MIB), ranks, group
        self._buckets: list[_Bucket] = []
        self._has_sum = False

    def end_round(self, ranks: int) -> None:
        """Add the gradients of the round's turns, which the first `ranks` ranks have run."""
        if not self._buckets:
            self._buckets = _fill_buckets(self.model, self._bytes)
        for bucket in self._buckets:
            bucket.add(ranks, self._gather, first=not self._has_sum)
        self._has_sum = True

    def finish(self, totals: Tensor) -> Tensor:
        """Make the sums the gradients of the weights."""
        for bucket in self._buckets:
            bucket.assign_gradients()
        self._has_sum = False
        return _gather_rounds(totals, self._group) if self._ranks > 1 else totals

    def _gather(self, own: Tensor) -> Tensor:
        """The values of all ranks, [ranks, n]."""
        if self._ranks == 1:
            return own[None]
        gathered = torch.empty(self._ranks, len(own), dtype=own.dtype, device=own.device)
        dist.all_gather(list(gathered), own, group=self._group)
        return gathered


class _Bucket:
    """Weights of one dtype whose gradients are summed in one contiguous buffer."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = list(weights)
        size, like = sum(w.numel() for w in weights), weights[0]
        self._sum = torch.zeros(size, dtype=like.dtype, device=like.device)

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat buffer in the shapes and layouts of the weights."""
        parts = flat.split([weight.numel() for weight in self._weights])
        return [
            part.as_strided(weight.shape, weight.stride(), part.storage_offset())
            for part, weight in zip(parts, self._weights, strict=True)
        ]

    @torch.no_grad()
    def add(self, ranks: int, gather: Callable[[Tensor], Tensor], *, first: bool) -> None:
        """Take the weights' gradients, gather all ranks', and add those of the first `ranks`."""
        own = torch.zeros_like(self._sum)
        self._take_gradients(own)
        gathered = gather(own)
        for rank in range(ranks):
            if first and rank == 0:
                self._sum.copy_(gathered[0])
            else:
                self._sum.add_(gathered[rank])

    @torch.no_grad()
    def start_sum(self, group: Any) -> "_PendingAllReduce":
        """Take the weights' gradients and start their all-reduce over a group."""
        self._sum.zero_()
        self._take_gradients(self._sum)
        return _PendingAllReduce(self._sum, group)

    def _take_gradients(self, flat: Tensor) -> None:
        """Move the weights' gradients into a flat buffer."""
        found = [w.grad for w in self._weights]
        if all(gradient is not None for gradient in found):  # else this rank had no turn
            torch._foreach_copy_(self._views(flat), [g for g in found if g is not None])
        for weight in self._weights:
            weight.grad = None

    def assign_gradients(self) -> None:
        """Make the sum the gradients of the weights."""
        for weight, view in zip(self._weights, self._views(self._sum), strict=True):
            weight.grad = view


def _fill_buckets(model: nn.Module, size: int) -> list[_Bucket]:
    """The weights in buckets of about that many bytes, each of one dtype."""
    buckets: list[list[Tensor]] = []
    taken = 0
    trained = [w for w in model.parameters() if w.grad is not None]  # the others never get one
    for weight in sorted(trained, key=lambda w: str(w.dtype)):
        own = weight.numel() * weight.element_size()
        if not buckets or buckets[-1][0].dtype != weight.dtype or taken + own > size:
            buckets.append([])
            taken = 0
        buckets[-1].append(weight)
        taken += own
    return [_Bucket(bucket) for bucket in buckets]


def _gather_rounds(totals: Tensor, group: Any = None) -> Tensor:
    """The rows of all ranks, [rounds, n] each, in the order of turns: [rounds * W, n]."""
    gathered = [torch.empty_like(totals) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, totals, group=group)
    return torch.stack(gathered, dim=1).flatten(0, 1)
