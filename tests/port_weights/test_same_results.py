"""A network with ported weights gives what the older program gave, to the last digits."""

import json
from argparse import Namespace

import numpy as np
import pytest
import torch

import old_programs as old
from old_files import write_keras, write_npz, write_onnx, write_pt
from phalanx.cli.main import main
from phalanx.config.read import read_settings
from phalanx.models.build import build_model
from phalanx.models.weights import load_tensors, read_norm_layout, read_weights
from phalanx.plan.model import build_variant


@pytest.fixture
def port(tmp_path, capsys):
    """Ports a file; gives what is said of it, and a function from images to logits."""

    def port_file(path, *words):
        out = tmp_path / "ported.safetensors"
        code = main(["port", "weights", str(path), "--out", str(out), "--json", *words])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        facts = json.loads(printed.out)
        flags = {name: value or "true" for name, value in facts["options"].items()}
        config = read_settings(None, {"data": "generated", "model": facts["model"], **flags}).config
        variant = build_variant(config)
        model = build_model(variant, num_classes=facts["classes"])
        load_tensors(model, read_weights(out, model.state_dict()), where=str(out))
        assert read_norm_layout(out) == variant.norm.layout
        return facts, model.double().eval()

    return port_file


def images(size, batch=2):
    return np.random.default_rng(1).normal(size=(batch, size, size, 3))


def run(model, x):
    with torch.no_grad():
        return model(torch.from_numpy(x.transpose(0, 3, 1, 2).copy())).numpy()


def check(model, x, logits, *, tolerance=1e-6):
    found, largest = run(model, x), np.abs(logits).max()
    assert np.abs(logits[0] - logits[1]).max() > 0.1 * largest, "hardly depends on the image"
    np.testing.assert_allclose(found, logits, rtol=tolerance, atol=tolerance * largest)


# --- TensorFlow 1 ---

SMALL = {"filters": (16, 32, 64), "large": False}
LARGE = {"filters": (64, 128, 256, 512), "large": True}
TF1_RESNETS = {
    "resnet8 batch A": (
        "resnet8", {"shortcut-type": "A"},
        {"counts": (1, 1, 1), **SMALL, "bottleneck": False, "norm": "batch", "shortcut": "A"},
    ),
    "resnet8 batch A earlier": (
        "resnet8", {"shortcut-type": "A", "padding": "symmetric"},
        {"counts": (1, 1, 1), **SMALL, "bottleneck": False, "norm": "batch", "shortcut": "A",
         "earlier": True},
    ),
    "resnet8 group B later": (
        "resnet8",
        {"shortcut-type": "B", "stage1-projection": "", "norm-num-groups": "16",
         "enable-fast-groupnorm": "", "norm-eps": "1.53e-05", "norm-type": "group"},
        {"counts": (1, 1, 1), **SMALL, "bottleneck": False, "norm": "group", "later": True},
    ),
    "resnet10 batch": (
        "resnet10", {"stage1-projection": ""},
        {"counts": (1, 1, 1, 1), **LARGE, "bottleneck": False, "norm": "batch"},
    ),
    "resnext11 group": (
        "resnext11_32x4d",
        {"norm-type": "group", "norm-num-groups": "16", "enable-fast-groupnorm": "",
         "norm-eps": "1.53e-05"},
        {"counts": (1, 1, 1), **SMALL, "bottleneck": True, "norm": "group", "groups": 32,
         "factor": 8},
    ),
    "resnet11 batch later": (
        "resnet11", {},
        {"counts": (1, 1, 1), **SMALL, "bottleneck": True, "norm": "batch", "later": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TF1_RESNETS)
def test_variables_of_tensorflow_1s_resnets(case, port, tmp_path):
    model, options, network = TF1_RESNETS[case]
    v, x = old.Variables(), images(64 if network["large"] else 16)
    logits = old.tf1_resnet(v, x, **network)
    facts, ours = port(write_npz(tmp_path / "w.npz", v.arrays))
    assert facts["model"] == model and facts["classes"] == 5
    wanted = {"padding": "same", **options}
    assert facts["options"] == {k: v for k, v in wanted.items() if v != "symmetric"}
    assert len(facts["used"]) == len(v.arrays) and not facts["left_over"]
    check(ours, x, logits)


@pytest.mark.parametrize(
    ("norm", "group_dim", "expand", "later"), [("group", 16, 4, False), ("batch", 1, 6, True)]
)
def test_variables_of_tensorflow_1s_efficientnet(norm, group_dim, expand, later, port, tmp_path):
    v, x = old.Variables(), images(16)
    logits = old.tf1_efficientnet_cifar(
        v, x, norm=norm, group_dim=group_dim, expand=expand, later=later
    )
    facts, ours = port(write_npz(tmp_path / "w.npz", v.arrays))
    assert facts["model"] == "efficientnet_cifar"
    grouped = {"efficientnet-group-dim": "16", "efficientnet-expand-ratio": "4"}
    normed = {"norm-type": "group", "norm-num-groups": "4", "enable-fast-groupnorm": ""}
    wanted = {"padding": "same", "norm-eps": "0.001"} | (
        {**grouped, **normed} if norm == "group" else {}
    )
    assert facts["options"] == wanted
    check(ours, x, logits)


def test_a_padded_stem_and_optimizer_state_of_tensorflow_1(port, tmp_path):
    v, x = old.Variables("float16"), images(16)
    network = TF1_RESNETS["resnet8 batch A"][2]
    padded = np.pad(x, ((0, 0), (0, 0), (0, 0), (0, 1)))
    logits = old.tf1_resnet(v, padded, **network)
    slots = {f"{name}/Momentum": array for name, array in v.arrays.items()}
    more = {"global_step": np.array(7), "names": np.array(["a"])}
    colons = {f"{name}:0": array for name, array in v.arrays.items()}
    facts, ours = port(write_npz(tmp_path / "w.npz", {**colons, **slots, **more}))
    assert facts["left_over"] == {
        **dict.fromkeys(slots, "optimizer state"), "global_step": "a counter", "names": "no numbers"
    }  # fmt: skip
    assert "float16 became float32" in facts["notes"]
    assert (
        "conv1.weight: its fourth input channel saw only zeros, and is left out" in facts["notes"]
    )
    check(ours, x, logits)


# --- Keras ---


@pytest.mark.parametrize(("norm", "whole"), [("bn", False), ("gn", True)])
def test_keras_layers_of_a_small_resnet(norm, whole, port, tmp_path):
    v, x = old.Variables(), images(16)
    logits = old.keras_cifar_resnet8(v, x, norm=norm)
    path = write_keras(tmp_path / "epoch_9.0.h5", v.arrays, whole=whole, scope="_1" * whole)
    facts, ours = port(path)
    assert facts["model"] == "resnet8" and len(facts["used"]) == len(v.arrays)
    grouped = {"norm-type": "group", "norm-num-groups": "16", "enable-fast-groupnorm": ""}
    wanted = {"padding": "same", "norm-eps": "1.001e-05", "shortcut-type": "A"}
    assert facts["options"] == {**wanted, **(grouped if norm == "gn" else {})}
    check(ours, x, logits)


RESNET50 = (3, 4, 6, 3)
DEPTHS = [
    pytest.param("resnet14", (1, 1, 1, 1)),
    pytest.param("resnet50", RESNET50, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "counts"), DEPTHS)
def test_keras_layers_of_resnet(model, counts, port, tmp_path):
    v, x = old.Variables(), images(64)
    logits = old.keras_resnet(v, x, counts, stem="SAME")
    facts, ours = port(write_keras(tmp_path / "w.h5", v.arrays))
    assert facts["model"] == model and facts["classes"] == 6
    assert facts["options"] == {"padding": "same", "norm-eps": "1.001e-05"}
    check(ours, x, logits)


@pytest.mark.slow
def test_the_stem_of_keras_resnet_sees_the_image_three_pixels_further(port, tmp_path):
    """Its own stem is padded evenly: away from the edges the same image is only shifted."""
    v, wide = old.Variables(), images(134, batch=1)
    stem = old.relu(old.keras_layer(v, "conv1_conv", wide[:, 3:-3, 3:-3], 7, 2, 64, padding="3"))
    theirs = old.max_pool(stem, "1")
    everything = old.Variables()
    old.keras_resnet(everything, images(32), (1, 1, 1, 1), stem="SAME")
    _, ours = port(write_keras(tmp_path / "w.h5", {**everything.arrays, **v.arrays}))
    shifted = torch.from_numpy(wide[:, :-6, :-6].transpose(0, 3, 1, 2).copy())
    with torch.no_grad():
        found = ours.run_unit("stem", shifted).numpy().transpose(0, 2, 3, 1)
    inner = slice(3, -3)
    np.testing.assert_allclose(found[:, inner, inner], theirs[:, inner, inner], atol=1e-5)


@pytest.mark.parametrize(("model", "counts"), DEPTHS)
def test_biases_before_batch_norm_go_into_its_mean(model, counts, port, tmp_path):
    v, x = old.Variables(), images(64)
    logits = old.keras_resnet(v, x, counts, stem="3", inner="1", early=True, bias="yes")
    facts, ours = port(write_keras(tmp_path / "w.h5", v.arrays))
    assert facts["options"] == {"norm-eps": "1.001e-05", "stride-in": "1x1"}
    biases = 3 * sum(counts) + 5  # of blocks, projections and the stem
    note = f"{biases} biases of convolutions went into the means of the norms after them"
    assert facts["model"] == model and note in facts["notes"]
    check(ours, x, logits, tolerance=1e-4)  # mean less bias is rounded once more


def test_keras_layers_of_efficientnet(port, tmp_path):
    v, x = old.Variables(), images(32)
    logits = old.keras_efficientnet_b0(v, x)
    more = {f"normalization/{name}": np.ones(3, "f4") for name in ("mean", "variance")}
    facts, ours = port(write_keras(tmp_path / "w.h5", {**v.arrays, **more}))
    assert facts["model"] == "efficientnet_b0"
    assert facts["options"] == {"padding": "same", "norm-eps": "0.001"}
    assert facts["left_over"] == dict.fromkeys(more, "the input's normalisation")
    check(ours, x, logits)


# --- PyTorch ---


def test_efficientnet_pytorchs_names(port, tmp_path):
    v, x = old.Variables(), images(32)
    logits = old.lukemelas_b0(v, x, eps=1e-3)
    facts, ours = port(write_pt(tmp_path / "w.pt", v.arrays))
    assert facts["model"] == "efficientnet_b0"
    assert facts["options"] == {"padding": "same", "norm-eps": "0.001"}
    check(ours, x, logits)


def test_a_checkpoint_of_the_pytorch_program_with_its_options(port, tmp_path):
    v, x = old.Variables("float16"), images(32)
    logits = old.lukemelas_b0(v, x, eps=1e-5, wrap=".layer")
    options = Namespace(model="efficientnet-b0", norm_type="batch", pipeline_splits=[], lr=0.1)
    path = write_pt(tmp_path / "efficientnet-b0_imagenet_9.pt", v.arrays, opts=options)
    facts, ours = port(path)
    assert facts["options"] == {
        "padding": "same"
    }  # eps 1e-5: the program's norms, not the package's
    check(ours, x, logits)


# --- PopART ---

POPART = {
    "20 A": ("resnet20", {"shortcut-type": "A"},
             {"counts": (3, 3, 3), **SMALL, "bottleneck": False, "norm": "BATCH", "shortcut": "A"}),
    "8 C": ("resnet8", {"shortcut-type": "B", "stage1-projection": ""},
            {"counts": (1, 1, 1), **SMALL, "bottleneck": False, "norm": "BATCH", "shortcut": "C"}),
    "14 C": ("resnet14_small", {"shortcut-type": "C", "norm-type": "none"},
             {"counts": (2, 2, 2), **SMALL, "bottleneck": False, "norm": "NONE", "shortcut": "C"}),
    "10": ("resnet10", {"norm-type": "group"},
           {"counts": (1, 1, 1, 1), **LARGE, "bottleneck": False, "norm": "GROUP"}),
    "x11": ("resnext11_32x4d", {"stride-in": "1x1"},
            {"counts": (1, 1, 1), **SMALL, "bottleneck": True, "norm": "BATCH", "groups": 32,
             "factor": 8}),
}  # fmt: skip


@pytest.mark.parametrize("case", POPART)
def test_initializers_of_popart(case, port, tmp_path):
    model, options, network = POPART[case]
    v, x = old.Variables(), images(64 if network["large"] else 16)
    logits = old.popart_resnet(v, x, **network)
    state = {"Accl___b1/0/1/conv/weights": np.ones(3, "f4")}
    facts, ours = port(write_onnx(tmp_path / "ckpt.onnx", {**v.arrays, **state}))
    assert facts["model"] == model and facts["options"] == options
    assert facts["left_over"] == dict.fromkeys(state, "optimizer state")
    check(ours, x, logits)


@pytest.mark.slow
def test_initializers_of_popart_as_large_as_it_had_them(port, tmp_path):
    network = {**POPART["x11"][2], **LARGE, "factor": 2, "counts": RESNET50}
    v, x = old.Variables(), images(64)
    logits = old.popart_resnet(v, x, **network)
    facts, ours = port(write_onnx(tmp_path / "ckpt.onnx", v.arrays))
    assert facts["model"] == "resnext50_32x4d"
    check(ours, x, logits)


@pytest.mark.parametrize("packed", [False, True])
def test_half_precision_initializers_of_popart(packed, port, tmp_path):
    v, x = old.Variables("float16"), images(16)
    logits = old.popart_resnet(v, x, **POPART["20 A"][2])
    _, ours = port(write_onnx(tmp_path / "ckpt.onnx", v.arrays, packed=packed))
    check(ours, x, logits)
