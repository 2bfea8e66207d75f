"""Networks of a plugin's that cannot be cut are refused, and not changed in silence."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from phalanx.assemble.build import _build_stage
from phalanx.assemble.dataset_summary import plan_new_run
from phalanx.config.read import read_settings
from phalanx.errors import ConfigError
from phalanx.models.units import UnitModel


class Scaled(UnitModel):
    """Three units, and a weight that belongs to none of them."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("stem", "layer2", "head"):
            self.add_module(name, nn.Linear(2, 2))
            self.units[name] = (name,)
        self.gain = nn.Parameter(torch.ones(()))


class Forwarded(UnitModel):
    """A forward pass that is not that of its units."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layer2 = nn.Linear(2, 2), nn.Linear(2, 2)
        self.units |= {"stem": ("stem",), "layer2": ("layer2",)}

    def forward(self, x, noise=None):
        return super().forward(x, noise) * 2


class Bare(UnitModel):
    """A unit without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layer2 = nn.Linear(2, 2), nn.ReLU()
        self.units |= {"stem": ("stem",), "layer2": ("layer2",)}


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (Scaled(), "gain belongs to none of its units"),
        (Forwarded(), "it has a forward of its own"),
        (Bare(), "the stage of layer2 has no weights"),
    ],
)
def test_a_network_that_is_more_than_its_units_is_not_cut(model, problem):
    flags = {"data": "synthetic", "steps": "1", "gradient-accumulation": "2", "device": "cpu"}
    settings = read_settings(None, {"model": "resnet8", **flags, "pipeline-splits": "layer2"})
    _, plan, _ = plan_new_run(settings)
    plan = replace(plan, pipeline=replace(plan.pipeline, starts=("layer2",)))
    with pytest.raises(ConfigError, match=f"--pipeline-splits: the model cannot be cut: {problem}"):
        _build_stage(model, plan, 0)
