"""One rank of a run: its stage, its share of the work, its links to other ranks, its passes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from phalanx.assemble.prepare import PreparedRun
from phalanx.assemble.rank_launch import find_resume_command
from phalanx.engine.captured_pass import CapturedPass
from phalanx.engine.consensus import Consensus
from phalanx.engine.replica_statistics import ReplicaStatistics
from phalanx.engine.replicas import build_replica_passes, build_turn
from phalanx.engine.stages import build_stage_turn
from phalanx.engine.state import TrainState, checksum_weights
from phalanx.engine.step import (
    ForwardBackward,
    GatherNorms,
    PassParts,
    RunPass,
    StepOptions,
    build_forward_backward,
    build_pass,
)
from phalanx.errors import NetworkError
from phalanx.parallel.gradients import DdpSum, GroupSum, LocalSum, OrderedSum
from phalanx.parallel.ranks import Ranks
from phalanx.parallel.stage_links import StageLinks, StageNorms
from phalanx.parallel.sync_norm import synchronise_norms
from phalanx.parallel.watchdog import Watchdog
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.plan.share import Share
from phalanx.profile.step_profiler import ProfileSpec, StepProfiler

_SPANS_SHOWN = 4


@dataclass(frozen=True)
class RankContext:
    """One rank of a layout, or the single process of a run."""

    layout: Layout
    ranks: Ranks | None = None
    links: StageLinks | None = None  # if it has one stage of the model
    scores_in_stages: bool = False

    @property
    def rank(self) -> int:
        """The number of the rank; 0 without ranks."""
        return 0 if self.ranks is None else self.ranks.rank

    @property
    def train_share(self) -> Share:
        """The share of a step's images that it trains on."""
        return Share(self.layout.replicas_of(self.rank), self.layout.replicas)

    @property
    def valid_share(self) -> Share:
        """The share of the validation batches that it scores."""
        if self.scores_in_stages:
            return Share((self.layout.pipeline_of(self.rank),), self.layout.pipelines)
        return Share((self.rank,), self.layout.ranks)

    @property
    def stage(self) -> int | None:
        """The stage of the model that it has; None if it has the whole model."""
        return None if self.links is None else self.links.stage

    def reads_images(self, *, scoring: bool = False) -> bool:
        """Whether this process reads images; later stages get the outputs of earlier ones."""
        in_stages = self.scores_in_stages if scoring else self.links is not None
        return self.links is None or self.links.is_first or not in_stages

    @cached_property
    def consensus(self) -> Consensus:
        """Common decisions of all ranks."""
        return Consensus(self.ranks)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in order."""
        return self.consensus.gather(value)

    def describe_rank(self) -> str:
        """Which of several ranks it is, after a comma; empty without ranks."""
        if self.ranks is None:
            return ""
        stage = f", stage {self.stage} of {self.layout.stages}" if self.links else ""
        return f", rank {self.rank} of {self.layout.ranks}{stage}"

    @property
    def is_first_rank(self) -> bool:
        """Whether it is the rank that writes the run folder and prints."""
        return self.rank == 0

    def refuse_drift(self, state: TrainState) -> None:
        """Raise NetworkError if the weights of ranks, which make the same updates, differ."""
        if self.ranks is None:
            return
        sums, stages = self.gather(checksum_weights(state.model)), self.layout.stages
        for rank, bits in enumerate(sums):
            first = rank % stages  # the same stage of the first pipeline
            if bits != sums[first]:
                raise NetworkError(
                    f"step {state.step:,}: the weights of rank {rank} differ from those of rank "
                    f"{first}, so this step was not saved. A device or its memory may be faulty: "
                    "resume without it"
                )

    def find_step_indices(self, rows: Sequence[int], plan: Plan) -> tuple[int, ...]:
        """The indices within the step, from 0, of rows in the order of this process's passes."""
        layout, size = self.layout, plan.micro_batch
        slices = [
            number * layout.replicas + replica
            for turn in layout.turns_of(self.rank)
            for number in range(plan.accumulation)
            for replica in turn
        ]
        return tuple(slices[row // size] * size + row % size for row in rows)


def build_rank_context(
    plan: Plan, ranks: Ranks | None, *, scores_in_stages: bool = False
) -> RankContext:
    """The context of this rank; without ranks, one process runs all replicas of the plan."""
    if ranks is None:
        return RankContext(replace(plan.layout, ranks=1, stages=1))
    links = ranks.link_stages(plan.layout)
    return RankContext(plan.layout, ranks, links, scores_in_stages and links is not None)


def build_step_passes(
    model: nn.Module,
    options: StepOptions,
    plan: Plan,
    context: RankContext,
    *,
    bucket_mib: float,
    statistics: Callable[[], ReplicaStatistics | None],
) -> ForwardBackward:
    """A function that runs this process's passes and leaves the gradients of the whole step.

    Whatever wraps the model is made here and seen only by the step: the state and checkpoints
    hold the bare model.
    """
    layout, images = context.layout, plan.global_batch
    if context.ranks is None and layout.replicas == 1:
        run_pass = _build_pass(model, options, plan)
        return build_forward_backward(run_pass, global_batch=images)
    for members in layout.span_groups:
        group = dist.new_group(list(members))
        if context.rank in members:
            synchronise_norms(model, group)
    gradients = _build_gradient_sum(model, plan, context, bucket_mib)
    if context.links is None:
        run_turn = build_turn(_build_pass(gradients.model, options, plan), gradients)
    else:
        parts = PassParts(model, options, global_batch=images)
        assert plan.pipeline is not None
        run_turn = build_stage_turn(parts, context.links, plan.pipeline.order)
    return build_replica_passes(
        run_turn,
        gradients,
        layout,
        rank=context.rank,
        global_batch=images,
        statistics=statistics,
    )


def _build_pass(model: nn.Module, options: StepOptions, plan: Plan) -> RunPass:
    """A pass over concatenated micro-batches, compiled or replayed from CUDA graphs by plan."""
    images = plan.global_batch
    if plan.acceleration.compiles:
        model = cast(nn.Module, torch.compile(model, dynamic=False))
    if plan.acceleration.graph:
        return CapturedPass(model, options, global_batch=images)
    return build_pass(model, options, global_batch=images)


def _build_gradient_sum(
    model: nn.Module, plan: Plan, context: RankContext, bucket_mib: float
) -> LocalSum:
    """How gradients are summed over the ranks that have the same stage of the model."""
    pipelines, links = context.layout.pipelines, context.links
    if plan.determinism == "strict":
        group = links.peers if links else None
        return OrderedSum(model, bucket_mib=bucket_mib, ranks=pipelines, group=group)
    if links is not None and pipelines > 1:
        return GroupSum(model, bucket_mib=bucket_mib, group=links.peers)
    if context.ranks is not None and links is None:
        if plan.acceleration.graph:  # a replayed pass ends before any gradients are sent
            return GroupSum(model, bucket_mib=bucket_mib, group=None)
        return DdpSum(model, bucket_mib=bucket_mib)
    return LocalSum(model)


def build_norm_gatherer(context: RankContext, optimizer: torch.optim.Optimizer) -> GatherNorms:
    """A function that returns the gradient norms of the whole model; call after a first pass."""
    if context.links is None:
        return lambda norms: norms
    counts = [
        sum(weight.grad is not None for weight in group["params"])
        for group in optimizer.param_groups
    ]
    return StageNorms(context.links, counts)


def build_watchdog(
    context: RankContext, prepared: PreparedRun, steps_done: Callable[[], int]
) -> Watchdog | None:
    """A watchdog that ends a rank which waits too long for others, and reports where it was."""
    plan, ranks = prepared.plan, context.ranks
    if ranks is None:
        return None

    def describe() -> str:
        # name the whole step's images: a rank that hangs cannot report its own
        done, size, images = steps_done(), plan.micro_batch, plan.global_batch
        slices = context.train_share.slices(images // size)
        starts = [done * images + number * size for number in slices]
        shown = ", ".join(f"{at:,} to {at + size - 1:,}" for at in starts[:_SPANS_SHOWN])
        more = ", ..." if len(starts) > _SPANS_SHOWN else ""
        return (
            f"step {done + 1:,}, with the images at positions {shown}{more} of the stream, out of "
            f"the step's {done * images:,} to {(done + 1) * images - 1:,}"
        )

    report = prepared.run.path / f"hang-rank-{context.rank}.txt"
    seconds = prepared.config.machine.rank_timeout
    return Watchdog(
        seconds,
        describe,
        rank=ranks.rank,
        ranks=ranks.size,
        report=report,
        find_resume_command=lambda: find_resume_command(ranks.world, prepared),
    )


def build_profiler(
    context: RankContext,
    prepared: PreparedRun,
    state: TrainState,
    *,
    print_line: Callable[[str], None],
) -> StepProfiler | None:
    """The profiler of a step of this process, with --profile.

    All ranks profile the same step, so that none waits for one that is slowed down, and each has
    its own folder.
    """
    plan, config = prepared.plan, prepared.config
    if config.machine.profile == "off":
        return None
    spec = ProfileSpec(
        detail=config.machine.profile,
        folder=prepared.run.path / "profile" / (f"rank-{context.rank}" if context.rank else ""),
        title=f"{config.model.model} on {plan.device} in {plan.precision}{context.describe_rank()}",
        images=plan.global_batch,
        first_step=state.step,
        total_steps=plan.total_steps,
        passes=plan.accumulation * len(context.layout.turns_of(context.rank)),
        ranks=context.layout.ranks,
        graph=plan.acceleration.graph,
        names_units=not plan.acceleration.compiles,
    )
    return StepProfiler(spec, state.model, print_line=print_line)
