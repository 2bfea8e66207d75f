"""`phalanx port weights` from the outside: what it says, refuses and leaves behind."""

import json
import os
import random
import sys
from argparse import Namespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import old_programs as old
from old_files import write_keras, write_npz, write_onnx, write_pt
from phalanx.catalog.models import MODELS
from phalanx.cli.main import main
from phalanx.errors import UserError
from phalanx.models.weights import read_norm_layout
from phalanx.port_weights.model_layers import iterate_layers
from phalanx.port_weights.names_popart import POPART_NAMINGS
from phalanx.port_weights.names_pytorch import PYTORCH_NAMINGS
from phalanx.port_weights.names_tensorflow import KERAS_NAMINGS, TENSORFLOW1_NAMINGS
from phalanx.port_weights.read import read_old_file

CONFIG, CHECKPOINT = 2, 4
RESNET8 = {"counts": (1, 1, 1), "filters": (16, 32, 64), "bottleneck": False, "large": False}
IMAGE = np.zeros((1, 8, 8, 3))


@pytest.fixture
def port(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*words):
        code = main(["port", "weights", *map(str, words)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture(scope="module")
def variables():
    """ResNet-8's, of TensorFlow 1."""
    v = old.Variables()
    old.tf1_resnet(v, IMAGE, **RESNET8, norm="batch", shortcut="A")
    return v.arrays


@pytest.fixture(scope="module")
def timm_arrays():
    """ResNet-8's under timm's names."""
    random_numbers = np.random.default_rng(3)
    return {
        f"{layer.path}.{tensor}": random_numbers.normal(size=shape).astype("f4")
        for layer in iterate_layers(MODELS["resnet8"], 10)
        for tensor, shape in layer.shapes.items()
        if shape
    }


def test_it_prints_what_became_of_the_file_and_what_to_do_next(port, variables, tmp_path):
    slots = {f"{name}/Momentum": array for name, array in variables.items()}
    write_npz(tmp_path / "w.npz", {**variables, **slots})
    code, out, _ = port("w.npz")
    assert code == 0
    assert out.splitlines() == [
        "file       w.npz: variables of TensorFlow 1's ResNet and ResNeXt",
        "model      resnet8, 5 classes",
        "used       37 of 74 tensors",
        "left over  37 tensors, optimizer state: all/b0/conv/conv2d/kernel/Momentum, "
        "all/b0/batch_norm/beta/Momentum, all/b0/batch_norm/gamma/Momentum, ...",
        "note       each image was normalised by its own mean and deviation: add --normalization "
        "per-image",
        "written    weights.safetensors, 298.3 KiB",
        "",
        "Score it with the options that make the network the same:",
        "  phalanx validate resnet8 --init-weights weights.safetensors --padding same "
        "--shortcut-type A --data-dir DIR",
    ]


@pytest.mark.slow
def test_the_command_it_prints_runs(port, variables, tmp_path):
    write_npz(tmp_path / "w.npz", variables)
    line = port("w.npz")[1].splitlines()[-1]
    words = line.split()[1:-2]
    assert words[:2] == ["validate", "resnet8"] and line.endswith(" --data-dir DIR")
    assert main([*words, "--data", "generated", "--reset-head"]) == 0


def test_prefixes_of_lightning_and_others(port, timm_arrays, tmp_path):
    wrapped = {f"model.{name}": torch.from_numpy(array) for name, array in timm_arrays.items()}
    torch.save(
        {"state_dict": {**wrapped, "loss.weight": torch.ones(3)}, "epoch": 2}, tmp_path / "a.ckpt"
    )
    code, out, _ = port("a.ckpt", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["model"] == "resnet8" and facts["options"] == {"shortcut-type": "A"}
    assert facts["left_over"] == {"loss.weight": "not a part of the network"}
    assert facts["used"]["model.layer1.0.conv1.weight"] == "layer1.0.conv1.weight"
    ported = load_file(tmp_path / "weights.safetensors")
    assert all((ported[name] == array).all() for name, array in timm_arrays.items())
    counters = set(ported) - set(timm_arrays)
    assert len(counters) == 7 and all(name.endswith("num_batches_tracked") for name in counters)


WRAPPED = {  # what pipeline stages, recomputation and 32-bit norms put into names
    "layer2.0.conv1.weight": "layer2._layer_to_call.0.conv1.layer.weight",
    "layer2.0.bn1.weight": "layer2._layer_to_call.0.bn1.1.weight",
    "layer2.0.bn1.running_var": "layer2._layer_to_call.0.bn1.1.running_var",
    "bn1.bias": "bn1.layer.bias",
    "fc.weight": "fc._layer_to_call.weight",
}


def test_what_the_pytorch_program_put_into_names_is_taken_out(port, timm_arrays, tmp_path):
    arrays = {WRAPPED.get(name, name): array for name, array in timm_arrays.items()}
    assert len(set(arrays) - set(timm_arrays)) == len(WRAPPED)
    write_pt(tmp_path / "w.pt", arrays)
    assert port("w.pt")[0] == 0
    ported = load_file(tmp_path / "weights.safetensors")
    assert all((ported[name] == timm_arrays[name]).all() for name in WRAPPED)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_another_type_of_numbers_is_told(name, port, timm_arrays, tmp_path):
    numbers = {key: torch.from_numpy(array) for key, array in timm_arrays.items()}
    torch.save({key: t.to(getattr(torch, name)) for key, t in numbers.items()}, tmp_path / "w.pt")
    code, out, _ = port("w.pt", "--json")
    notes = json.loads(out)["notes"]
    assert code == 0 and (f"{name} became float32" in notes) == (name != "float32")


def test_a_safetensors_file_with_older_names(port, tmp_path):
    v = old.Variables()
    old.lukemelas_b0(v, np.zeros((1, 32, 32, 3)), eps=1e-3)
    save_file(v.arrays, tmp_path / "b0.safetensors")
    code, out, _ = port("b0.safetensors", "--json", "--model", "efficientnet-b0")
    assert code == 0 and json.loads(out)["model"] == "efficientnet_b0"


@pytest.mark.parametrize(("fast", "layout"), [(True, "interleaved"), (False, "contiguous")])
def test_stored_options_decide_the_layout_of_group_norm(fast, layout, port, timm_arrays, tmp_path):
    grouped = {name: array for name, array in timm_arrays.items() if "running" not in name}
    options = Namespace(norm_num_groups=8, norm_eps=1e-3, enable_fast_groupnorm=fast)
    write_pt(tmp_path / "w.pt", grouped, args=options)
    code, out, _ = port("w.pt", "--json")
    wanted = {"norm-type": "group", "norm-num-groups": "8", "norm-eps": "0.001"}
    assert code == 0
    assert json.loads(out)["options"] == {
        **wanted, "shortcut-type": "A", **({"enable-fast-groupnorm": ""} if fast else {})
    }  # fmt: skip
    assert read_norm_layout(tmp_path / "weights.safetensors") == layout
    assert "how many groups" not in out


def test_the_number_of_groups_is_assumed_where_nothing_says_it(port, timm_arrays, tmp_path):
    grouped = {name: array for name, array in timm_arrays.items() if "running" not in name}
    write_pt(tmp_path / "w.pt", grouped)
    code, out, _ = port("w.pt")
    assert code == 0 and "PyTorch's default of 32 is assumed; else give --norm-num-groups" in out


# --- what does not fit ---


def test_another_model_is_offered_where_the_named_one_does_not_fit(port, variables, tmp_path):
    write_npz(tmp_path / "w.npz", variables)
    code, _, error = port("w.npz", "--model", "resnet20")
    assert code == CHECKPOINT
    assert (
        "w.npz: does not fit resnet20\n  missing in the file: layer1.1.conv1.weight (16," in error
    )
    assert "it fits resnet8: leave out --model, or give --model resnet8" in error
    code, _, error = port("w.npz", "--model", "efficientnet_b0")
    assert code == CHECKPOINT and "efficientnet_b0 is no ResNet, and the file is" in error
    assert not (tmp_path / "weights.safetensors").exists()


def test_every_tensor_is_used_or_named(port, variables, tmp_path):
    cut = {
        name: array for name, array in variables.items() if name != "all/b2/0/2/conv/conv2d/kernel"
    }
    odd = {**variables, "all/fc1/dense/bias": np.ones(6, "f4")}
    more = {**variables, "all/b9/0/1/conv/conv2d/kernel": np.ones((1, 1, 1, 1), "f4")}
    nearest = "does not fit any model; the nearest is resnet8"
    for arrays, problem in (
        (cut, "missing in the file: layer2.0.conv2.weight (32, 32, 3, 3)"),
        (odd, "other shapes: all/fc1/dense/bias is (6,) in the file, fc.bias is (5,)"),
        (more, "left over: all/b9/0/1/conv/conv2d/kernel"),
    ):
        write_npz(tmp_path / "w.npz", arrays)
        code, _, error = port("w.npz")
        assert code == CHECKPOINT and nearest in error and problem in error


def test_proxy_norm_is_named(port, tmp_path):
    v = old.Variables()
    old.tf1_efficientnet_cifar(v, IMAGE, norm="batch", group_dim=16, expand=4)
    proxy = {"all/block0/proxy": np.ones((6, 1, 1, 16), "f4")}
    kept = {name: array for name, array in v.arrays.items() if "block0/batch_norm/beta" not in name}
    write_npz(tmp_path / "w.npz", {**kept, **proxy})
    code, _, error = port("w.npz")
    assert code == CHECKPOINT
    assert "it was trained with proxy norm, which Phalanx does not have" in error


def test_two_networks_in_one_file(port, timm_arrays, tmp_path):
    twice = {
        f"{who}.{name}": a for who in ("student", "teacher") for name, a in timm_arrays.items()
    }
    write_pt(tmp_path / "w.pt", twice)
    code, _, error = port("w.pt")
    assert code == CHECKPOINT
    assert "holds the network more than once, in student. and in teacher.; save one" in error


def test_objects_are_not_unpickled(port, tmp_path):
    np.savez(tmp_path / "w.npz", layers=np.array([{"kernel": 1.0}, None], dtype=object))
    code, _, error = port("w.npz")
    assert code == CHECKPOINT
    assert "holds no numbers, only text or pickled objects, which are not read (layers); " in error


def test_another_network(port, tmp_path):
    write_npz(tmp_path / "w.npz", {"lstm/kernel": np.ones((2, 2), "f4")})
    code, _, error = port("w.npz")
    assert code == CHECKPOINT
    assert "are of no network that older programs had; it holds lstm/kernel" in error


def test_values_that_are_not_finite_are_named(port, variables, tmp_path):
    broken = {**variables, "all/fc1/dense/bias": np.full(5, np.nan, "f4")}
    write_npz(tmp_path / "w.npz", broken)
    code, out, _ = port("w.npz")
    assert code == 0 and "not all values are finite in fc.bias" in out


# --- files ---


@pytest.mark.parametrize(
    ("given", "named"),
    [("logs", "logs"), ("logs/ckpt-12", "logs/ckpt-12"), ("logs/ckpt-12.index", "logs/ckpt-12"),
     ("logs/ckpt-12.data-00000-of-00001", "logs/ckpt-12"), ("logs/ckpt-12.meta", "logs/ckpt-12"),
     ("logs/checkpoint", "logs")],
)  # fmt: skip
def test_a_tensorflow_1_checkpoint_is_refused_with_two_lines(given, named, port, tmp_path):
    (tmp_path / "logs").mkdir()
    for suffix in (".index", ".meta", ".data-00000-of-00001"):
        (tmp_path / f"logs/ckpt-12{suffix}").touch()
    (tmp_path / "logs/checkpoint").touch()
    code, _, error = port(given)
    first, *lines = error.strip().splitlines()
    assert code == CHECKPOINT
    assert first.startswith(f"phalanx port weights: {given}: is a TensorFlow 1 checkpoint")
    assert lines == [
        f"  import numpy, tensorflow; reader = tensorflow.train.load_checkpoint('{named}')",
        '  numpy.savez("weights.npz", **{name: reader.get_tensor(name) for name in '
        "reader.get_variable_to_shape_map()})",
    ]
    for line in lines:
        compile(line.strip(), "line", "exec")


def test_of_a_folder_that_does_not_say_which_is_the_latest_the_newest_is_taken(port, tmp_path):
    for number, age in ((9, 50), (10, 5)):
        (tmp_path / f"ckpt-{number}.index").touch()
        os.utime(tmp_path / f"ckpt-{number}.index", (age, age))
    code, _, error = port(".")
    assert code == CHECKPOINT and "load_checkpoint('ckpt-9')" in error
    code, _, error = port("ckpt-11.index")
    assert code == CHECKPOINT and "ckpt-11.index: no such file" in error


def test_those_two_lines_make_a_file_that_ports(port, variables, tmp_path, monkeypatch):
    (tmp_path / "ckpt-1.index").touch()
    lines = port("ckpt-1")[2].strip().splitlines()[1:]
    reader = Namespace(
        get_variable_to_shape_map=lambda: {name: a.shape for name, a in variables.items()},
        get_tensor=variables.__getitem__,
    )
    fake = Namespace(train=Namespace(load_checkpoint={"ckpt-1": reader}.__getitem__))
    monkeypatch.setitem(sys.modules, "tensorflow", fake)
    exec("\n".join(line.strip() for line in lines), {})
    assert port("weights.npz")[0] == 0


@pytest.mark.parametrize(
    ("name", "content", "code", "text"),
    [
        ("none.h5", None, CHECKPOINT, "no such file; old weights are .pt, .pth, .ckpt, .saf"),
        (".", None, CHECKPOINT, "is a folder; name the file with the weights in it"),
        ("a.h5", b"<html>", CHECKPOINT, "begins with b'<html>', which no .pt, .pth"),
        ("a.npz", b"", CHECKPOINT, "is empty, which no .pt"),
        ("a.npz", b"PK\x03\x04cut", CHECKPOINT, "is truncated or damaged; make it again"),
        ("a.h5", b"\x89HDF\r\n\x1a\ncut", CHECKPOINT, "is truncated or damaged"),
        ("a.pt", b"PK\x03\x04cut", CHECKPOINT, "is truncated or damaged; download it again"),
        ("a.onnx", b"not onnx", CHECKPOINT, "is not a whole ONNX file; copy it again"),
        ("a.safetensors", b"cut", CHECKPOINT, "is not a whole safetensors file"),
    ],
)
def test_files_that_are_none(name, content, code, text, port, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    found, _, error = port(name)
    assert found == code and text in error


def test_a_file_that_runs_code_is_refused(port, tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save(
        {"model_state_dict": {"conv1.weight": torch.ones(1)}, "opts": Bomb()}, tmp_path / "w.pt"
    )
    code, _, error = port("w.pt")
    assert code == CHECKPOINT and "wants to run code (posix.mkdir)" in error
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("module", "write"), [("h5py", write_keras), ("onnx", write_onnx)])
def test_a_missing_package_is_named_with_the_line_that_installs_it(
    module, write, port, tmp_path, monkeypatch
):
    path = write(
        tmp_path / f"w.{ {'h5py': 'h5'}.get(module, module) }", {"a/kernel": np.ones(1, "f4")}
    )
    monkeypatch.setitem(sys.modules, module, None)
    code, _, error = port(path)
    assert code == CONFIG
    assert f"needs {module}, which is not installed; pip install 'phalanx[port]'" in error


def test_keras_3_files_are_named(port, tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "w.weights.h5", "w") as file:
        file.create_dataset("layers/conv2d/vars/0", data=np.ones((3, 3, 3, 4)))
    code, _, error = port("w.weights.h5")
    assert code == CHECKPOINT and "has no layer_names, as Keras' save_weights to an .h5" in error


def test_options_that_cannot_be(port, variables, tmp_path):
    write_npz(tmp_path / "w.npz", variables)
    (tmp_path / "there.safetensors").write_text("mine")
    for words, text in (
        ((), "name the file with the old weights: phalanx port weights FILE"),
        (("w.npz", "--model", "resnet9"), "--model resnet9: no older program had it"),
        (("w.npz", "--model", "resnet21"), "--model: no model is called 'resnet21'; did you mean"),
        (("w.npz", "--out", "there.safetensors"), "exists already; remove it, or name another"),
        (("w.npz", "--out", "w.pth"), "which ends in .safetensors"),
        (("w.npz", "--modle", "x"), "--modle: no such option; did you mean '--model'?"),
    ):
        code, _, error = port(*words)
        assert code == CONFIG and text in error
    assert (tmp_path / "there.safetensors").read_text() == "mine"


def test_damaged_files_never_end_in_a_traceback(variables, tmp_path):
    chance = random.Random(5)
    v = old.Variables()
    old.keras_cifar_resnet8(v, IMAGE)
    good = [
        write_npz(tmp_path / "w.npz", variables),
        write_keras(tmp_path / "w.h5", v.arrays),
        write_onnx(tmp_path / "w.onnx", v.arrays),
        write_pt(tmp_path / "w.pt", v.arrays),
    ]
    refused = 0
    for path in good:
        whole = path.read_bytes()
        for _ in range(40):
            damaged = bytearray(whole)
            for _ in range(chance.randint(1, 9)):
                place = chance.choice((0, len(damaged) - 4096))
                damaged[max(0, place) + chance.randrange(4096) % len(damaged)] = chance.randrange(
                    256
                )
            cut = len(damaged) if chance.random() < 0.5 else chance.randrange(len(damaged))
            path.write_bytes(damaged[:cut])
            try:
                read_old_file(path)
            except UserError:
                refused += 1
    assert refused > 80, "the damage went unnoticed everywhere"


def test_a_name_that_is_no_text_is_shown_escaped(port, tmp_path):
    pytest.importorskip("onnx")
    path = write_onnx(tmp_path / "w.onnx", {"weird": np.ones(1, "f4")})
    path.write_bytes(path.read_bytes().replace(b"weird", b"we\xffrd"))
    code, _, error = port(path)
    assert code == CHECKPOINT and "no network that older programs had; it holds we\ufffdrd" in error


def test_a_keras_model_inside_another_one(port, tmp_path):
    h5py = pytest.importorskip("h5py")
    v = old.Variables()
    old.keras_cifar_resnet8(v, IMAGE)
    with h5py.File(tmp_path / "w.h5", "w") as file:
        file.attrs["layer_names"] = [b"cifar_resnet_model"]
        group = file.create_group("cifar_resnet_model")
        group.attrs["weight_names"] = [f"{name}:0".encode() for name in v.arrays]
        for name, array in v.arrays.items():
            group.create_dataset(f"{name}:0", data=array)
    code, out, _ = port("w.h5", "--json")
    assert code == 0 and len(json.loads(out)["used"]) == len(v.arrays)


# --- the tables ---


def test_every_table_names_every_layer_of_its_family():
    tables = (*PYTORCH_NAMINGS, *TENSORFLOW1_NAMINGS, *KERAS_NAMINGS, *POPART_NAMINGS)
    assert len(tables) == 12
    names = {"ResNet": "resnet26", "EfficientNet": "efficientnet_b0"}
    for naming in tables:
        layers = list(iterate_layers(MODELS[names[naming.family]], 10))
        rows = {(layer.kind, layer.part) for layer in layers}
        if naming.program == "keras_small":  # whose shortcuts have no weights
            rows = {(kind, part) for kind, part in rows if part != "projection"}
        assert set(naming.layers) == rows, naming.title
        named = [
            naming.name_tensor(layer, tensor, "batch")
            for layer in layers
            for tensor in layer.shapes
        ]
        given = [name for name in named if name]
        assert len(given) == len(set(given)), f"{naming.title}: one name for two tensors"
