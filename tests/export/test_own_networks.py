"""Networks of a plugin: of any shape, and some that cannot be exported."""

import numpy as np
import pytest
import torch
from torch import nn

from phalanx.assemble.dataset_summary import Preprocessing
from phalanx.errors import CheckpointError
from phalanx.export.metadata import ModelMetadata
from phalanx.export.network import ExportNetwork, find_head
from phalanx.export.torch_program import open_program, serialise_program
from phalanx.models.units import to_unit_model

IMAGES = Preprocessing(image_size=8, augment="none", mean=(0.5,) * 3, std=(0.2,) * 3)
ABOUT = ModelMetadata(
    name="own",
    model="tiny",
    classes=("a", "b"),
    preprocessing=IMAGES,
    preprocessing_fingerprint=IMAGES.fingerprint,
)


class Undecided(nn.Module):
    """A network that looks at values to choose its way."""

    def forward(self, x):
        return x.mean((2, 3)) if x.sum() > 0 else x.amax((2, 3))


def freeze(model):
    return to_unit_model(model.eval().requires_grad_(False))


def test_a_network_without_our_head_gives_logits_alone(tmp_path):
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    model = freeze(nn.Sequential(*layers, nn.Linear(4, 2)))
    images = torch.randn(3, 3, 8, 8)
    expected = model(images).numpy()
    network = ExportNetwork(model, ABOUT, fold=True)
    assert find_head(model) is None and network.folded == ["model.1"]
    (tmp_path / "own.pt2").write_bytes(serialise_program(network, ABOUT))
    (found,) = open_program(tmp_path / "own.pt2")(images.numpy())
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_network_that_looks_at_values_cannot_be_traced(capfd):
    network = ExportNetwork(freeze(Undecided()), ABOUT, fold=True)
    with pytest.raises(CheckpointError) as error:
        serialise_program(network, ABOUT)
    message = str(error.value)
    assert message.startswith("tiny: torch.export cannot trace it (Could not guard on data-dep")
    assert message.endswith("or use --format safetensors")
    assert capfd.readouterr() == ("", "")  # torch would print whole graphs
