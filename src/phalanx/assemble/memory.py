"""The memory of a run: what a step is predicted to need, and what the process used."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from phalanx.assemble.build import is_offloaded
from phalanx.assemble.torch_setup import find_rank_device
from phalanx.config.schema import Config
from phalanx.errors import ConfigError
from phalanx.models.stage_cost import StageCost, StageSpec, list_units, predict_stages
from phalanx.models.step_memory import (
    HALF_BYTES,
    BytesPerWeight,
    Memory,
    PassSpec,
    count_statistics_bytes,
    predict_memory,
)
from phalanx.models.units import UnitModel
from phalanx.optim.build import OPTIMIZERS
from phalanx.plan.exchange import Exchange, count_exchange
from phalanx.plan.model import build_variant
from phalanx.plan.pipeline import count_in_flight
from phalanx.plan.plan import Plan
from phalanx.report.summary import MemoryNote

_FULL_BYTES = 4
_KIB = 1024


def predict_step_memory(config: Config, plan: Plan, *, stage: int | None = None) -> Memory:
    """The memory of this run's largest step on each device; ConfigError if it cannot be predicted.

    stage: that of one stage; if None, that of the stage which needs most. Replicas that share a
    pass are one larger batch, with one set of running statistics. If gradients are added in the
    order of replicas (strict determinism), their sum is kept besides the gradients of a pass.
    """
    if plan.layout.stages > 1:
        found = [one.memory for one in predict_stage_costs(config, plan)]
        return max(found, key=lambda memory: memory.peak) if stage is None else found[stage]
    variant, one_pass = build_variant(config), _build_pass_spec(plan)
    memory = predict_memory(variant, one_pass, per_weight=_count_bytes_per_weight(config, plan))
    own = count_statistics_bytes(variant, num_classes=plan.num_classes)
    return _add_replicas(memory, own, config, plan)


def _build_pass_spec(plan: Plan) -> PassSpec:
    """A pass with the largest images of the run."""
    return PassSpec(
        num_classes=plan.num_classes,
        batch=plan.micro_batch * plan.layout.turn_size,
        image_size=plan.image_size,
        half=plan.precision.startswith("16"),
        stored=plan.recompute_patterns,
        fuse=_fuse_without_values if plan.acceleration.own_kernels else None,
    )


def _fuse_without_values(model: UnitModel) -> None:
    """Replace units by fused ones on a model without values, to see what they would store."""
    from phalanx.fused.enable import fuse_units

    fuse_units(model, torch.bfloat16, interpreted=True)


def _add_replicas(memory: Memory, statistics: int, config: Config, plan: Plan) -> Memory:
    """The memory plus what a rank keeps for its replicas; statistics: bytes for one replica."""
    if plan.replicas == 1:
        return memory
    statistics *= plan.layout.rounds * (2 if config.optim.ema_decay else 1)
    sums = memory.gradients if plan.determinism == "strict" else 0
    peak = memory.peak + sums + statistics
    return replace(memory, sums=sums, statistics=statistics, peak=peak)


def predict_stage_costs(config: Config, plan: Plan) -> list[StageCost]:
    """The cost of each pipeline stage; memory as if each had its own device."""
    pipeline, variant = plan.pipeline, build_variant(config)
    assert pipeline is not None
    units = list_units(variant, num_classes=plan.num_classes, image_size=plan.image_size)
    specs = tuple(
        StageSpec(
            units=names, in_flight=count_in_flight(pipeline.order(stage, passes=plan.accumulation))
        )
        for stage, names in enumerate(pipeline.split_units(units))
    )
    found = predict_stages(
        variant,
        _build_pass_spec(plan),
        per_weight=_count_bytes_per_weight(config, plan),
        stages=specs,
    )
    return [
        replace(one, memory=_add_replicas(one.memory, one.statistics, config, plan))
        for one in found
    ]


def predict_exchanges(config: Config, plan: Plan, memory: Memory) -> list[Exchange]:
    """What a rank sends and receives in a step, by stage; memory: as predicted."""
    if plan.layout.stages == 1:
        own = count_statistics_bytes(build_variant(config), num_classes=plan.num_classes)
        return [count_exchange(plan, gradients=memory.gradients, statistics=own)]
    return [
        count_exchange(
            plan,
            gradients=one.memory.gradients,
            statistics=one.statistics,
            activations=one.received + one.sent,
        )
        for one in predict_stage_costs(config, plan)
    ]


def _begins_with_gradients(plan: Plan) -> bool:
    """Whether gradients are allocated before a pass: by earlier passes, or by DDP."""
    if plan.determinism == "strict":
        return plan.accumulation > 1
    return plan.accumulation * plan.layout.rounds > 1 or plan.layout.pipelines > 1


def _count_bytes_per_weight(config: Config, plan: Plan) -> BytesPerWeight:
    """The bytes that each weight needs on the device, independent of the batch."""
    options, rule = config.optim, OPTIMIZERS[config.optim.optimizer].footprint
    halved = plan.precision == "16.16"  # except the few parameters of norms
    width, slots = HALF_BYTES if halved else _FULL_BYTES, rule.count_state(options.momentum)
    # 16-bit weights, gradients and optimizer slots have 32-bit copies during the update
    update = _FULL_BYTES * (rule.temporary + (2 + slots if halved else 0))
    offloaded = is_offloaded(config, torch.device(find_rank_device(plan.device)).type)
    return BytesPerWeight(
        weight=width,
        gradient=width,
        optimizer=0 if offloaded else width * slots,
        update=update + (width * slots if offloaded else 0),
        average=_FULL_BYTES if options.ema_decay else 0,
        accumulates=_begins_with_gradients(plan),
    )


def read_resident_memory(name: str) -> int | None:
    """A value of /proc/self/status in bytes (VmRSS: now, VmHWM: peak); None if not on Linux.

    Unlike getrusage it does not include the memory of the parent or of worker processes.
    """
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.is_file() else ():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * _KIB
    return None


def read_peak_memory() -> int:
    """The peak resident memory of this process, in bytes."""
    peak = read_resident_memory("VmHWM")
    if peak is not None:
        return peak
    import resource  # not on every system

    unit = 1 if sys.platform == "darwin" else _KIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def read_memory_shares(device: torch.device) -> dict[str, float]:
    """The share of the host's memory in use, and of the GPU's used by this process, in percent.

    Quick, and does not wait for the device. Values that are not known are left out.
    """
    shares = {}
    with suppress(OSError, KeyError, ValueError, IndexError):  # systems other than Linux
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {name: int(rest.split()[0]) for name, _, rest in (s.partition(":") for s in lines)}
        shares["memory/host_percent"] = 100 * (1 - sizes["MemAvailable"] / sizes["MemTotal"])
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        shares["memory/device_percent"] = 100 * torch.cuda.memory_reserved(device) / total
    return {name: round(share, 2) for name, share in shares.items()}


class MemoryMeter:
    """Measures how far memory use rises from the moment the meter is created."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._start = torch.cuda.memory_allocated(device)
        else:
            self._start = read_peak_memory()

    def reset_peak(self) -> None:
        """On a GPU, measure the peak from now on only: what came before was not training."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def measure_rise(self) -> int | None:
        """The peak in bytes above the start; None if it is not known."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self._start
        # 0 says nothing: the peak was before the start
        return read_peak_memory() - self._start or None if self.device.type == "cpu" else None


def describe_memory(
    rises: Sequence[int | None], config: Config, plan: Plan
) -> tuple[MemoryNote, ...]:
    """The predicted and the measured memory of each stage; rises: measured, by rank.

    With several pipelines, the largest of a stage counts.
    """
    notes = []
    for stage in range(plan.layout.stages):
        measured = [rise for rise in rises[stage :: plan.layout.stages] if rise is not None]
        try:
            predicted = predict_step_memory(config, plan, stage=stage).peak
        except ConfigError:  # a plugin's network that does not run on meta tensors
            predicted = None
        notes.append(MemoryNote(predicted=predicted, measured=max(measured, default=None)))
    return tuple(notes)
