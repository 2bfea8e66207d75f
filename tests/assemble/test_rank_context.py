from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from phalanx.assemble.rank_context import RankContext
from phalanx.engine.state import TrainState, checksum_weights
from phalanx.errors import NetworkError
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan


@dataclass
class Neighbours:
    """Ranks beside ours whose answers are known."""

    rank: int = 0
    answers: list = field(default_factory=list)

    def gather(self, mine):
        return [mine, *self.answers]


def state_of(model: nn.Module) -> TrainState:
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), step=7)


def test_weights_that_drift_apart_are_found_before_they_are_saved():
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    ours = checksum_weights(model)
    RankContext(Layout(2, 2), Neighbours(answers=[ours])).refuse_drift(state_of(model))
    with torch.no_grad():
        model.weight[0, 0, 0, 0] += 1e-6
    assert checksum_weights(model) != ours
    with pytest.raises(NetworkError, match="step 7: the weights of rank 1 differ"):
        RankContext(Layout(2, 2), Neighbours(answers=[ours])).refuse_drift(state_of(model))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_type_of_weights_has_a_checksum(dtype):
    model = nn.Linear(5, 4).to(dtype)
    before = checksum_weights(model)
    with torch.no_grad():
        model.bias[0].neg_()
    assert checksum_weights(model) != before


def test_rows_of_passes_are_found_among_the_images_of_the_step():
    plan = object.__new__(Plan)
    object.__setattr__(plan, "micro_batch", 2)
    object.__setattr__(plan, "accumulation", 2)
    alone = RankContext(Layout(replicas=1))
    assert alone.find_step_indices(range(4), plan) == (0, 1, 2, 3)
    # replica 0 has slices 0 and 3, replica 1 slices 1 and 4, replica 2 slices 2 and 5
    folded = RankContext(Layout(replicas=3))
    assert folded.find_step_indices(range(12), plan) == (0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11)
    side_by_side = RankContext(Layout(replicas=2, bn_span=2))
    assert side_by_side.find_step_indices(range(8), plan) == tuple(range(8))
    second = RankContext(Layout(replicas=3, ranks=2), Neighbours(rank=1))
    assert second.find_step_indices([0, 3], plan) == (2, 9)
