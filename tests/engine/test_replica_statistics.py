"""Running statistics of several replicas of a model."""

import pytest
import torch
from torch import nn

from phalanx.engine.replica_statistics import ReplicaStatistics
from phalanx.plan.layout import Layout


@pytest.mark.parametrize(
    ("layout", "begin"),
    [
        (Layout(4, 1, 4), [0]),
        (Layout(4, 2, 4), [0, 0]),  # the ranks share statistics
        (Layout(4, 4, 2), [0, 0, 2, 2]),
        (Layout(4, 4, 1), [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_replicas_that_now_share_statistics_begin_with_those_of_the_first(layout, begin):
    model = nn.BatchNorm1d(1)
    stored = {
        f"{replica}/{name}": torch.full_like(buffer, replica)
        for replica in range(4)
        for name, buffer in model.named_buffers()
    }
    found = []
    for rank in range(layout.ranks):
        own = ReplicaStatistics(model, layout, rank=rank, average=None, gather=lambda mine: [mine])
        own.load(stored, where="replicas.safetensors")
        own.enter(0)
        assert model.running_mean is not None
        found.append(int(model.running_mean))
    assert found == begin
