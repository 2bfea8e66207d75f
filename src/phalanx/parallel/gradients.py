"""How the gradients of all replicas become their sum, on every rank that has them.

Where a model is cut into stages, those are the ranks with the same stage.
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
    """One process: passes add to the gradients by themselves."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def pass_context(self, *, last: bool) -> AbstractContextManager[Any]:
        """What a pass runs in; `last` is a rank's last of a step."""
        return nullcontext()

    def end_round(self, ranks: int) -> None:
        """So many ranks have run a turn each."""

    def finish(self, totals: Tensor) -> Tensor:
        """Leave the sums in the model's parameters; gives the [loss, right] of all turns."""
        return totals


class ReducedSum(LocalSum):
    """DistributedDataParallel with sums in place of means, sent while the last pass goes on."""

    def __init__(self, model: nn.Module, *, bucket_mib: float) -> None:
        devices = [next(model.parameters()).device] if _is_cuda(model) else None
        with warnings.catch_warnings():
            # what torch 2.13 recommends in place of broadcast_buffers is unknown to 2.11
            warnings.simplefilter("ignore", FutureWarning)
            wrapped = DistributedDataParallel(
                model,
                device_ids=devices,
                bucket_cap_mb=bucket_mib,
                broadcast_buffers=False,  # each replica has its own
                init_sync=False,  # all ranks begin with the same weights
                gradient_as_bucket_view=True,
            )
        wrapped.register_comm_hook(None, _sum_bucket)
        super().__init__(wrapped)
        self._wrapped = wrapped

    def pass_context(self, *, last: bool) -> AbstractContextManager[Any]:
        """Gradients travel in a rank's last pass, when its sum is complete."""
        return nullcontext() if last else self._wrapped.no_sync()

    def finish(self, totals: Tensor) -> Tensor:
        """The gradients are summed up already."""
        return _gather_rounds(totals)


def _sum_bucket(
    _: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """The sum of a bucket over all ranks."""
    started = _Sum(bucket.buffer(), None)
    return started.work.get_future().then(lambda _: started.take())


class _Sum:
    """A sum over the ranks of a group that is under way."""

    def __init__(self, buffer: Tensor, group: Any) -> None:
        self._buffer = buffer
        # gloo sums no bfloat16, and 16 bits badly
        self._narrow = not buffer.is_cuda and buffer.element_size() < 4
        self._wide = buffer.float() if self._narrow else buffer
        self.work: Any = dist.all_reduce(self._wide, group=group, async_op=True)

    def wait(self) -> None:
        """Return once it is there."""
        self.work.wait()
        self.take()

    def take(self) -> Tensor:
        """The sum, in the place of what was to be added."""
        return self._buffer.copy_(self._wide) if self._narrow else self._buffer


class StageSum(LocalSum):
    """Sums over the ranks of a group, sent when a step's passes are done.

    A stage has several micro-batches under way, which DistributedDataParallel cannot follow.
    """

    def __init__(self, model: nn.Module, *, bucket_mib: float, group: Any) -> None:
        super().__init__(model)
        self._bytes, self._group = int(bucket_mib * _MIB), group
        self._buckets: list[_Bucket] = []

    def finish(self, totals: Tensor) -> Tensor:
        """Add up the gradients, all buckets at the same time."""
        if not self._buckets:
            self._buckets = _fill_buckets(_find_trained(self.model), self._bytes)
        works = [bucket.start_sum(self._group) for bucket in self._buckets]
        for bucket, work in zip(self._buckets, works, strict=True):
            work.wait()
            bucket.hand_over()
        return _gather_rounds(totals, self._group)


class OrderedSum(LocalSum):
    """Sums in the order of replicas, which are the same bits on any number of ranks.

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
        """Add the gradients of the round's turns, those of the first so many ranks."""
        if not self._buckets:
            self._buckets = _fill_buckets(_find_trained(self.model), self._bytes)
        for bucket in self._buckets:
            bucket.add(ranks, self._gather, first=not self._has_sum)
        self._has_sum = True

    def finish(self, totals: Tensor) -> Tensor:
        """Hand over the sums as the weights' gradients."""
        for bucket in self._buckets:
            bucket.hand_over()
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
    """Weights of one type whose gradients lie one behind the other in memory."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = list(weights)
        size, like = sum(w.numel() for w in weights), weights[0]
        self._sum = torch.zeros(size, dtype=like.dtype, device=like.device)

    def _views(self, flat: Tensor) -> list[Tensor]:
        """The parts of such memory in the shapes and layouts of the weights."""
        parts = flat.split([weight.numel() for weight in self._weights])
        return [
            part.as_strided(weight.shape, weight.stride(), part.storage_offset())
            for part, weight in zip(parts, self._weights, strict=True)
        ]

    @torch.no_grad()
    def add(self, ranks: int, gather: Callable[[Tensor], Tensor], *, first: bool) -> None:
        """Take the weights' gradients and add those of the first ranks, of all."""
        own = torch.zeros_like(self._sum)
        self._take_gradients(own)
        gathered = gather(own)
        for rank in range(ranks):
            if first and rank == 0:
                self._sum.copy_(gathered[0])
            else:
                self._sum.add_(gathered[rank])

    @torch.no_grad()
    def start_sum(self, group: Any) -> "_Sum":
        """Take the weights' gradients and begin to add up those of a group."""
        self._sum.zero_()
        self._take_gradients(self._sum)
        return _Sum(self._sum, group)

    def _take_gradients(self, flat: Tensor) -> None:
        """Move the weights' gradients into such memory."""
        found = [w.grad for w in self._weights]
        if all(gradient is not None for gradient in found):  # else none is left for this rank
            torch._foreach_copy_(self._views(flat), [g for g in found if g is not None])
        for weight in self._weights:
            weight.grad = None

    def hand_over(self) -> None:
        """Make the sum the gradients of the weights."""
        for weight, view in zip(self._weights, self._views(self._sum), strict=True):
            weight.grad = view


def _find_trained(model: nn.Module) -> list[Tensor]:
    """The weights that have gradients; one that has none now never has one."""
    return [weight for weight in model.parameters() if weight.grad is not None]


def _fill_buckets(weights: Sequence[Tensor], size: int) -> list[_Bucket]:
    """The weights in buckets of about that many bytes, each of one type."""
    buckets: list[list[Tensor]] = []
    taken = 0
    for weight in sorted(weights, key=lambda w: str(w.dtype)):
        own = weight.numel() * weight.element_size()
        if not buckets or buckets[-1][0].dtype != weight.dtype or taken + own > size:
            buckets.append([])
            taken = 0
        buckets[-1].append(weight)
        taken += own
    return [_Bucket(bucket) for bucket in buckets]


def _gather_rounds(totals: Tensor, group: Any = None) -> Tensor:
    """Everybody's rows, [rounds, n] each, as they come when ranks take turns: [rounds * W, n]."""
    gathered = [torch.empty_like(totals) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, totals, group=group)
    return torch.stack(gathered, dim=1).flatten(0, 1)


def _is_cuda(model: nn.Module) -> bool:
    return next(model.parameters()).is_cuda
