"""What stages are predicted to cost, beside what real stages take."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import Variant
from phalanx.models.build import build_model
from phalanx.models.cost import count_units
from phalanx.models.recompute import enable_recomputation
from phalanx.models.stage_cost import (
    StageCost,
    StageSpec,
    estimate_costs,
    list_units,
    predict_stages,
)
from phalanx.models.step_memory import BytesPerWeight, LiveBytes, PassSpec, predict_memory
from phalanx.models.units import ModelPart, UnitModel
from phalanx.plan.pipeline import Pass, Pipeline, count_in_flight

BARE = BytesPerWeight(weight=0, optimizer=0, accumulates=True)
BATCH, SIZE, CLASSES = 4, 32, 10
RESNET8 = MODELS["resnet8"]


def predict(
    variant: Variant, pipeline: Pipeline, *, passes: int, stored: Sequence[str] | None
) -> tuple[StageCost, ...]:
    units = list_units(variant, num_classes=CLASSES, image_size=SIZE)
    specs = [
        StageSpec(units=own, in_flight=count_in_flight(pipeline.order(stage, passes=passes)))
        for stage, own in enumerate(pipeline.split_units(units))
    ]
    one_pass = PassSpec(
        num_classes=CLASSES,
        batch=BATCH,
        image_size=SIZE,
        stored=None if stored is None else tuple(stored),
    )
    return predict_stages(variant, one_pass, per_weight=BARE, stages=tuple(specs))


class RealStage:
    """A stage that gets from its neighbours whatever it wants, one pass ahead of time."""

    def __init__(self, part: nn.Module, received: Tensor, sent: Tensor | None):
        self.part, self.received, self.sent = part, received, sent
        self.sending: list[Tensor] = []

    def receive(self, one: Pass) -> Tensor | None:
        if one.kind == "forward":
            return torch.rand_like(self.received)
        return None if self.sent is None else torch.rand_like(self.sent)

    def run(self, order: Sequence[Pass]) -> None:
        held: dict[int, tuple[Tensor, Tensor]] = {}
        incoming = self.receive(order[0])
        for place, one in enumerate(order):
            arrived = incoming
            incoming = self.receive(order[place + 1]) if place + 1 < len(order) else None
            if one.kind == "forward":
                assert arrived is not None
                x = arrived.requires_grad_(self.received.requires_grad)
                output = self.part(x)
                if self.sent is None:
                    output = F.cross_entropy(output, torch.arange(BATCH) % CLASSES)
                held[one.number] = x, output
            else:
                x, output = held.pop(one.number)
                torch.autograd.backward(output, arrived)
                self.sending = [] if x.grad is None else [x.grad]


def measure_peaks(
    variant: Variant, pipeline: Pipeline, stored: Sequence[str] | None, *, passes: int
) -> list[int]:
    """The most bytes that tensors of each stage have at once, weights apart."""
    whole = build_model(variant, num_classes=CLASSES).train()
    assert isinstance(whole, UnitModel)
    x, peaks = torch.rand(BATCH, 3, SIZE, SIZE), []
    stages = pipeline.split_units([*whole.units])
    for stage, units in enumerate(stages):
        part = ModelPart(whole, units).train()
        output = part(x).detach()
        if stored is not None:
            enable_recomputation(part, stored, variant=variant)
        real = RealStage(part, x, None if units is stages[-1] else output)
        with LiveBytes() as live:
            for tensor in (*part.parameters(), *part.buffers()):
                live.ignore(tensor)
            real.run(pipeline.order(stage, passes=passes))
        peaks.append(live.peak)
        x = output.requires_grad_()
    return peaks


CUTS = {
    "resnet8": ("layer2/0",),
    "resnet20": ("layer1/2", "layer2/1", "layer3/0"),
    "efficientnet_b0": ("blocks/2/0", "blocks/4/0", "blocks/5/0"),
}


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("schedule", ["Grouped", "Interleaved", "Sequential"])
@pytest.mark.parametrize(
    "name", ["resnet8", *(pytest.param(name, marks=pytest.mark.slow) for name in [*CUTS][1:])]
)
def test_a_real_stage_takes_what_is_predicted(name, schedule, recomputes):
    variant = MODELS[name]
    pipeline = Pipeline(starts=CUTS[name], schedule=schedule)
    units = list_units(variant, num_classes=CLASSES, image_size=SIZE)
    stored = [own[-1] for own in pipeline.split_units(units)[:-1]] if recomputes else None
    passes = 4 * pipeline.stages + 1  # two groups and one more
    found = predict(variant, pipeline, passes=passes, stored=stored)
    real = measure_peaks(variant, pipeline, stored, passes=passes)
    for stage, peak in zip(found, real, strict=True):
        buffers = stage.memory.weights
        assert stage.memory.peak - buffers == pytest.approx(peak, rel=0.1)


def test_a_stage_keeps_as_much_as_it_has_micro_batches_in_flight():
    def activations(schedule: str, passes: int) -> list[int]:
        pipeline = Pipeline(starts=CUTS["resnet20"], schedule=schedule)
        found = predict(MODELS["resnet20"], pipeline, passes=passes, stored=None)
        return [stage.memory.activations for stage in found]

    one = activations("Sequential", 64)
    assert activations("Grouped", 64) == activations("Grouped", 8) == [8 * kept for kept in one]
    four = zip((4, 3, 2, 1), one, strict=True)
    assert activations("Interleaved", 64) == [most * kept for most, kept in four]


def test_stages_have_the_models_figures_between_them():
    pipeline = Pipeline(starts=("layer2/0",), schedule="Sequential")
    first, last = predict(RESNET8, pipeline, passes=9, stored=None)
    assert (first.units, last.units) == (
        ("stem", "layer1/0"),
        ("layer2/0", "layer3/0", "head"),
    )
    one_pass = PassSpec(num_classes=CLASSES, batch=BATCH, image_size=SIZE)
    whole = predict_memory(RESNET8, one_pass, per_weight=BARE)
    assert first.parameters + last.parameters == whole.gradients // 4 == 75_290
    assert first.memory.weights + last.memory.weights == whole.weights, "the buffers"
    assert first.share + last.share == pytest.approx(1)
    border = 16 * SIZE * SIZE * BATCH * 4  # the output of layer1/0, in 32 bits
    assert (first.received, first.sent, last.received, last.sent) == (0, border, border, 0)
    assert (first.memory.transfers, last.memory.transfers) == (border, 2 * border)
    for memory in (first.memory, last.memory):
        parts = memory.weights + memory.gradients + memory.activations + memory.transfers
        assert memory.peak == parts + memory.working


def test_what_stages_send_has_16_bits_where_convolutions_compute_with_them():
    stages = (
        StageSpec(units=("stem", "layer1/0"), in_flight=1),
        StageSpec(units=("layer2/0", "layer3/0", "head"), in_flight=1),
    )
    full, half = (
        predict_stages(
            RESNET8,
            PassSpec(num_classes=CLASSES, batch=BATCH, image_size=SIZE, half=half),
            per_weight=BARE,
            stages=stages,
        )[0].sent
        for half in (False, True)
    )
    assert full == 2 * half == 16 * SIZE * SIZE * BATCH * 4


def test_the_cost_of_a_unit_is_its_multiply_adds_and_what_it_keeps():
    counts = count_units(RESNET8, num_classes=CLASSES, batch=1, image_size=SIZE)
    costs = estimate_costs(RESNET8, num_classes=CLASSES, image_size=SIZE)
    assert [*costs] == [unit.name for unit in counts]
    for unit in counts:
        kept = unit.activation_bytes / 4
        assert costs[unit.name] == pytest.approx(unit.macs + 24 * kept, rel=0.01)
