"""The folder that timm.create_model and the Hugging Face hub read."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import phalanx
from phalanx.assemble.dataset_summary import Preprocessing
from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import Norm
from phalanx.errors import CheckpointError, ConfigError
from phalanx.export.metadata import ModelMetadata
from phalanx.export.timm_config import format_timm_config, refuse_unknown_to_timm
from phalanx.export.weights_file import serialise_weights
from phalanx.models.build import build_model, initialise_weights

PHOTOS = Preprocessing(
    image_size=64, augment="resized-crop", mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.25), eval_crop=0.9
)


def describe(model, preprocessing=PHOTOS):
    return ModelMetadata(
        name="photos",
        model=model,
        classes=("cat", "dog", "größer"),
        preprocessing=preprocessing,
        preprocessing_fingerprint=preprocessing.fingerprint,
    )


def read_config(model, variant=None, **preprocessing):
    about = describe(model, replace(PHOTOS, **preprocessing))
    return json.loads(format_timm_config(variant or MODELS[model], about))


CASES = {  # ours, and what timm calls it
    "resnet50": (MODELS["resnet50"], "resnet50", {}),
    "resnet10": (MODELS["resnet10"], "resnet18", {"layers": [1, 1, 1, 1]}),
    "resnext14_32x4d": (
        MODELS["resnext14_32x4d"],
        "resnet50",
        {"layers": [1, 1, 1, 1], "cardinality": 32, "base_width": 4},
    ),
    "resnet18": (
        replace(MODELS["resnet18"], norm=Norm(type="group")),
        "resnet18",
        {"norm_layer": "groupnorm"},
    ),
    "efficientnet_b0": (
        replace(MODELS["efficientnet_b0"], padding="same", norm=Norm(eps=1e-3)),
        "efficientnet_b0",
        {"bn_eps": 1e-3, "pad_type": "same"},
    ),
    "efficientnet_lite0": (MODELS["efficientnet_lite0"], "efficientnet_lite0", {}),
}


@pytest.mark.parametrize("model", CASES)
def test_networks_under_timms_names(model):
    variant, name, args = CASES[model]
    refuse_unknown_to_timm(model, variant, "mean-std")
    config = read_config(model, variant)
    assert (config["architecture"], config["model_args"]) == (name, args)
    assert (config["num_classes"], config["label_names"]) == (3, ["cat", "dog", "größer"])
    assert config["pretrained_cfg"]["classifier"] == variant.head


def test_images_are_prepared_as_ours():
    crop = read_config("resnet50")["pretrained_cfg"]
    assert (crop["input_size"], crop["crop_pct"], crop["crop_mode"]) == ([3, 64, 64], 0.9, "center")
    assert (crop["mean"], crop["std"]) == ([0.5, 0.4, 0.3], [0.2, 0.3, 0.25])
    whole = read_config("resnet50", augment="none", normalization="mean")["pretrained_cfg"]
    assert (whole["crop_pct"], whole["crop_mode"]) == (1.0, "squash")
    assert (whole["mean"], whole["std"]) == ([0.5, 0.4, 0.3], [1 / 255] * 3)
    bare = read_config("resnet50", normalization="none")["pretrained_cfg"]
    assert (bare["mean"], bare["std"]) == ([0.0] * 3, [1.0] * 3)


@pytest.mark.parametrize(
    ("model", "change", "problem"),
    [
        ("resnet8", {}, "timm has no network with its stem for small images"),
        ("airbench94", {}, "timm has no such network"),
        ("efficientnet_b0", {"expand_ratio": 4}, "timm widens 6 times"),
        ("efficientnet_b0", {"norm": Norm(type="group")}, "timm's EfficientNets have batch norms"),
        ("resnet50", {"stride_in": "1x1"}, "timm strides in the 3x3 alone"),
        ("resnet50", {"shortcut": "C"}, "timm has no shortcuts of type C"),
        ("resnet50", {"padding": "same"}, "timm pads its ResNets evenly"),
        ("resnet50", {"norm": Norm(type="none")}, "its norm is none"),
        ("resnet50", {"norm": Norm(eps=1e-3)}, "timm's norms have an epsilon of 1e-05"),
        ("resnet50", {"norm": Norm(type="group", groups=8)}, "timm's group norms have 32 groups"),
        (
            "resnet50",
            {"norm": Norm(type="group", interleaved=True)},
            "its group norms are interleaved",
        ),
    ],
)
def test_what_timm_has_not_is_refused(model, change, problem):
    with pytest.raises(ConfigError) as error:
        refuse_unknown_to_timm(model, replace(MODELS[model], **change), "mean-std")
    assert str(error.value) == (
        f"--format timm: {model}: {problem}; use --format safetensors or onnx"
    )


def test_images_normalised_one_by_one_are_refused():
    with pytest.raises(ConfigError, match="images are normalised one by one"):
        refuse_unknown_to_timm("resnet50", MODELS["resnet50"], "per-image")


def test_a_run_of_a_small_network_is_refused_before_anything_is_written(run, tmp_path):
    with pytest.raises(ConfigError, match="resnet8: timm has no network with its stem"):
        phalanx.export(run, format="timm", out=tmp_path / "folder")
    assert not [*tmp_path.iterdir()]


@pytest.fixture(scope="module")
def photos(digits, tmp_path_factory):
    """A run of a network that timm has."""
    folder = tmp_path_factory.mktemp("photos") / "run"
    options = {"data": "mnist", "data_dir": digits, "run_dir": folder, "image_size": 20}
    phalanx.train(**options, model="resnet10", batch_size=16, steps=1, device="cpu")
    return folder


class StandIn:
    """What the check asks of timm, where that cannot be imported."""

    __version__ = "0.0"
    bias = 0.0  # which it adds to every logit
    classes = 10

    def create_model(self, name, *, pretrained):
        folder = Path(name.removeprefix("local-dir:"))
        config = json.loads((folder / "config.json").read_text())
        if config["num_classes"] != self.classes or not pretrained:
            raise ValueError("no such model")
        model = build_model(MODELS["resnet10"], num_classes=10)
        model.load_state_dict(load_file(folder / "model.safetensors"))
        model.fc.bias.data += self.bias
        return model.eval()


def export_timm(run, out):
    return phalanx.export(run, format="timm", out=out, check_images=2, max_batch=2)


def test_the_folder_is_checked_by_timm(photos, tmp_path, monkeypatch):
    theirs = StandIn()
    monkeypatch.setitem(sys.modules, "timm", theirs)
    for _ in range(2):  # the second replaces the first
        done = export_timm(photos, tmp_path / "out")
    assert done.notes == () and "timm itself was not run" not in done.card.read_text()
    files = {"config.json", "model.safetensors", "README.md"}
    assert {file.name for file in done.path.iterdir()} == files
    theirs.bias = 0.1
    with pytest.raises(CheckpointError, match=r"disagrees .*differs by 0.1.*; use another --for"):
        export_timm(photos, tmp_path / "new")
    theirs.classes = 9
    with pytest.raises(
        CheckpointError, match=r"timm 0.0 refuses it \(no such model\); update timm"
    ):
        export_timm(photos, tmp_path / "new")


def test_a_folder_that_timm_has_not_seen_says_so(photos, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    done = export_timm(photos, tmp_path / "out")
    assert done.notes[0].startswith("timm itself was not run, since it could not be imported: ")
    assert "Note: timm itself was not run" in done.card.read_text()


@pytest.mark.parametrize("model", CASES)
@torch.no_grad()
def test_timm_gives_the_same_logits(timm, model, tmp_path):
    variant, about = CASES[model][0], describe(model)
    ours = build_model(variant, num_classes=3).eval()
    initialise_weights(ours, 5, zero_residual=False)
    (tmp_path / "config.json").write_text(format_timm_config(variant, about))
    weights = serialise_weights(ours, about, variant.norm.layout)
    (tmp_path / "model.safetensors").write_bytes(weights)
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(theirs(images), ours(images), rtol=1e-4, atol=1e-5)
    assert list(theirs.pretrained_cfg["label_names"]) == ["cat", "dog", "größer"]
