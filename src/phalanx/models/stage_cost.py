"""The cost of the stages of a model: share of the time, and memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from phalanx.catalog.variant import Variant
from phalanx.models.cost import UnitCost, count_units
from phalanx.models.recompute import enable_recomputation
from phalanx.models.step_memory import HALF_BYTES, BytesPerWeight, Memory, PassSpec, trace_pass
from phalanx.models.units import ModelPart, to_unit_model

# Time per number saved for the backward pass, relative to a multiply-add. Norms and activations are
# bound by memory; without this term the first layers would seem cheap. Measured on a CPU:
# docs/pipelines.md.
_MACS_PER_ACTIVATION = 24
_COUNTED_BATCH = 2  # the least that batch norm accepts
_FULL_BYTES = 4


@lru_cache(maxsize=64)
def _count_units(variant: Variant, num_classes: int, image_size: int) -> tuple[UnitCost, ...]:
    return tuple(
        count_units(variant, num_classes=num_classes, batch=_COUNTED_BATCH, image_size=image_size)
    )


def estimate_costs(variant: Variant, *, num_classes: int, image_size: int) -> dict[str, float]:
    """The cost of each unit for one image, in multiply-adds of a forward pass."""
    kept = _FULL_BYTES * _COUNTED_BATCH
    return {
        unit.name: unit.macs + _MACS_PER_ACTIVATION * unit.activation_bytes / kept
        for unit in _count_units(variant, num_classes, image_size)
    }


def list_units(variant: Variant, *, num_classes: int, image_size: int) -> list[str]:
    """The names of a network's units in order, also for a plugin's network."""
    return [unit.name for unit in _count_units(variant, num_classes, image_size)]


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """A stage whose cost is wanted."""

    units: tuple[str, ...]
    in_flight: int  # most micro-batches between their forward and backward passes


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """The figures of one stage; bytes are those of one micro-batch."""

    units: tuple[str, ...]
    parameters: int
    share: float  # of the time that the whole model takes
    in_flight: int
    received: int  # bytes of activations from the previous stage
    sent: int  # ... to the next stage
    statistics: int  # bytes of its batch norms' running means and variances
    memory: Memory


@lru_cache(maxsize=64)
def predict_stages(
    variant: Variant,
    one_pass: PassSpec,
    *,
    per_weight: BytesPerWeight,
    stages: Sequence[StageSpec],
) -> tuple[StageCost, ...]:
    """The figures of every stage, each on its own device."""
    costs = estimate_costs(
        variant, num_classes=one_pass.num_classes, image_size=one_pass.image_size
    )
    whole, x = to_unit_model(one_pass.build(variant)), one_pass.make_images()
    found: list[StageCost] = []
    for place, spec in enumerate(stages):
        part, is_last = ModelPart(whole, spec.units).train(), place == len(stages) - 1
        if one_pass.stored is not None:
            enable_recomputation(part, one_pass.stored, variant=variant)
        memory, output = trace_pass(
            part,
            x,
            per_weight=per_weight,
            copied=one_pass.half and per_weight.weight != HALF_BYTES,
            recomputes=one_pass.stored is not None,
            is_last=is_last,
            in_flight=spec.in_flight,
        )
        found.append(
            StageCost(
                units=spec.units,
                parameters=sum(weight.numel() for weight in part.parameters()),
                share=sum(costs[unit] for unit in spec.units) / sum(costs.values()),
                in_flight=spec.in_flight,
                received=x.nbytes if place else 0,
                sent=0 if is_last else output.nbytes,
                statistics=sum(t.nbytes for t in part.buffers() if t.is_floating_point()),
                memory=memory,
            )
        )
        x = output.requires_grad_()
    return tuple(found)
