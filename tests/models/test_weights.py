"""Weights from elsewhere are read without running anything, renamed, and checked by name."""

import pickle
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import NORM_LAYOUT_KEY
from phalanx.errors import CheckpointError
from phalanx.models.build import build_model, initialise_weights
from phalanx.models.units import UnitModel
from phalanx.models.weights import (
    load_tensors,
    read_norm_layout,
    read_weights,
    to_timm_names,
)

SHORT = replace(MODELS["efficientnet_cifar"], depth=0.5)  # ten blocks, some stages of two


def drawn(name: str = "resnet8", *, seed: int = 1, classes: int = 10) -> UnitModel:
    model = build_model(SHORT if name == "short" else MODELS[name], num_classes=classes)
    initialise_weights(model, seed, zero_residual=False)
    return model


def saved(content: object, path: Path) -> Path:
    torch.save(content, path)
    return path


def assert_same(a: nn.Module, b: nn.Module) -> None:
    first, second = a.state_dict(), b.state_dict()
    assert list(first) == list(second)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_weights(path, ())
    return str(caught.value)


# --- files ---


@pytest.mark.parametrize("name", ["resnet8", "short"])
@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt"])
def test_weights_come_back_as_they_were(name, suffix, tmp_path):
    source, target = drawn(name), drawn(name, seed=2)
    path = tmp_path / f"mine{suffix}"
    if suffix == ".safetensors":
        save_file(source.state_dict(), path)
    else:
        saved(source.state_dict(), path)
    load_tensors(target, read_weights(path, target.state_dict()), where=str(path))
    assert_same(source, target)


@pytest.mark.parametrize(
    "prefix",
    [
        "module.",
        "_orig_mod.",
        "module._orig_mod.",
        "_orig_mod.module.",
        "model.",
        "backbone.",
        "net.",
        "encoder.",
        "model.backbone.",
        "learner.0.",
    ],
)
@pytest.mark.parametrize("name", ["resnet8", "short"])
def test_prefixes_of_wrappers_are_taken_off(name, prefix, tmp_path):
    source, target = drawn(name), drawn(name, seed=2)
    path = tmp_path / "mine.safetensors"
    theirs = torchvisions(source) if name == "short" else source.state_dict()
    save_file({prefix + name: value for name, value in theirs.items()}, path)
    load_tensors(target, read_weights(path, target.state_dict()), where="mine")
    assert_same(source, target)


def test_what_is_outside_the_wrapper_is_left_out_unless_the_model_knows_it(tmp_path):
    source, target = drawn(), drawn(seed=2)
    theirs = {f"backbone.{name}": value for name, value in source.state_dict().items()}
    theirs |= {"projector.weight": torch.ones(3, 64), "criterion.weight": torch.ones(10)}
    theirs |= {f"fc.{leaf}": theirs.pop(f"backbone.fc.{leaf}") for leaf in ("weight", "bias")}
    path = saved(theirs, tmp_path / "a.pth")
    load_tensors(target, read_weights(path, target.state_dict()), where="a")
    assert_same(source, target)


def test_a_network_in_two_copies_is_refused(tmp_path):
    model = drawn().state_dict()
    both = {
        f"{who}.{name}": value for who in ("student", "teacher") for name, value in model.items()
    }
    path = saved(both, tmp_path / "a.pth")
    with pytest.raises(
        CheckpointError, match=r"more than once, in student\. and in teacher\.; save"
    ):
        read_weights(path, model)


def test_another_network_is_not_searched_for_a_wrapper(tmp_path):
    # bn1 and bn2 of its blocks are names of EfficientNet, too
    model = drawn("resnet20").state_dict()
    found = read_weights(saved(model, tmp_path / "a.pth"), drawn("short").state_dict())
    assert list(found) == list(model)


def test_a_prefix_is_taken_off_only_at_the_front(tmp_path):
    path = saved({"body.module.weight": torch.ones(2)}, tmp_path / "a.pth")
    assert list(read_weights(path, ["other"])) == ["body.module.weight"]


@pytest.mark.parametrize("wrapper", ["state_dict", "model", "model_state_dict"])
def test_the_weights_are_found_among_what_a_script_saved(wrapper, tmp_path):
    source, target = drawn(), drawn(seed=2)
    content = {"epoch": 3, wrapper: source.state_dict(), "optimizer": {"state": torch.zeros(3)}}
    path = saved(content, tmp_path / "a.pth")
    load_tensors(target, read_weights(path, target.state_dict()), where="a")
    assert_same(source, target)


def test_older_files_of_torch_are_read(tmp_path):
    path = tmp_path / "old.pth"
    torch.save(drawn().state_dict(), path, _use_new_zipfile_serialization=False)
    assert_same_tensors(read_weights(path, ()), drawn().state_dict())


def assert_same_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


class Touch:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("shell", ["torch", "bare pickle"])
def test_code_in_a_file_is_refused_and_not_run(shell, tmp_path):
    trace, path = tmp_path / "trace", tmp_path / "mine.pth"
    content = {"conv1.weight": torch.ones(2), "more": Touch(trace)}
    if shell == "torch":
        saved(content, path)
    else:
        path.write_bytes(pickle.dumps(content, protocol=2))
    said = refused(path)
    assert not trace.exists()
    if shell == "torch":
        assert said.startswith(f"{path}: wants to run code (")
        assert "Phalanx never does" in said and ".safetensors" in said
    pickle.loads(pickle.dumps(Touch(trace)))
    assert trace.exists(), "the trap would have worked"


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_protocol_that_torch_does_not_read_is_named(zipped, tmp_path):
    path, content = tmp_path / "mine.pth", {"conv1.weight": torch.ones(2)}
    way = {"_use_new_zipfile_serialization": zipped}
    torch.save(content, path, pickle_protocol=4, **way)
    said = refused(path)  # a warning would be an error
    assert said.startswith(f"{path}: has pickle protocol 4, which torch's tensors-only reader ")
    assert "with torch.save's default protocol or as .safetensors" in said
    torch.save(content, path, pickle_protocol=3, **way)
    assert list(read_weights(path, ["conv1.weight"])) == ["conv1.weight"]


DAMAGED = {
    "empty.pth": lambda whole: b"",
    "half.pth": lambda whole: whole[: len(whole) // 2],
    "old.pth": lambda whole: whole[: len(whole) // 2],
    "text.pth": lambda whole: b"hello world\n",
    "page.pth": lambda whole: b"<!DOCTYPE html><html></html>",
    "zeros.pth": lambda whole: bytes(500),
    "empty.safetensors": lambda whole: b"",
    "half.safetensors": lambda whole: whole[: len(whole) // 2],
    "stump.safetensors": lambda whole: whole[:5],
    "torch.safetensors": lambda whole: b"PK\x03\x04" + bytes(200),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_by_name(name, tmp_path):
    path = tmp_path / name
    if path.suffix == ".pth":
        torch.save(drawn().state_dict(), path, _use_new_zipfile_serialization=name != "old.pth")
    else:
        save_file(drawn().state_dict(), path)
    path.write_bytes(DAMAGED[name](path.read_bytes()))
    assert refused(path).startswith(f"{path}: ")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_torch_cut_anywhere_is_refused(zipped, tmp_path):
    path = tmp_path / "cut.pth"
    torch.save({"a": torch.arange(4.0)}, path, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        assert refused(path).startswith(f"{path}: ")


@pytest.mark.parametrize("content", [{}, {"epoch": 3}, {"state_dict": {}}, torch.ones(3), [1]])
def test_a_file_without_weights_is_refused(content, tmp_path):
    path = saved(content, tmp_path / "a.pth")
    assert refused(path).startswith(f"{path}: holds no weights, only a ")


@pytest.mark.parametrize(
    ("suffix", "what"), [(".onnx", "an ONNX model"), (".pt2", "a model of torch.export")]
)
def test_an_exported_model_is_refused_with_the_way_to_its_weights(suffix, what, tmp_path):
    path = tmp_path / f"shoes{suffix}"
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError) as caught:
        read_weights(path, ["fc.weight"])
    assert str(caught.value) == (
        f"{path}: is {what}, not a file of weights; `phalanx export RUN --format safetensors` "
        "writes those of a run, `phalanx port weights` those of an older program"
    )


def test_the_layout_of_group_norms_is_read_from_the_file(tmp_path):
    ours, plain = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"a": torch.ones(1)}, ours, metadata={NORM_LAYOUT_KEY: "interleaved"})
    save_file({"a": torch.ones(1)}, plain)
    pickled = saved({"a": torch.ones(1)}, tmp_path / "c.pth")
    assert [read_norm_layout(p) for p in (ours, plain, pickled)] == ["interleaved"] + 2 * [
        "contiguous"
    ]


# --- torchvision's EfficientNet ---


def torchvisions(model: UnitModel) -> dict[str, Tensor]:
    """Our tensors under torchvision's names: by what each part does, not by its name."""
    found: dict[str, Tensor] = {}

    def take(path: str, module: nn.Module) -> None:
        found.update({f"{path}.{leaf}": value for leaf, value in module.state_dict().items()})

    take("features.0.0", model.conv_stem)
    take("features.0.1", model.bn1)
    for stage, blocks in enumerate(model.blocks, start=1):
        for index, block in enumerate(blocks):
            squeeze = {"fc1": block.se.conv_reduce, "fc2": block.se.conv_expand}
            if stage == 1:
                steps = [(block.conv_dw, block.bn1), squeeze, (block.conv_pw, block.bn2)]
            else:
                steps = [(block.conv_pw, block.bn1), (block.conv_dw, block.bn2), squeeze]
                steps.append((block.conv_pwl, block.bn3))
            for step, parts in enumerate(steps):
                named = parts if isinstance(parts, dict) else dict(enumerate(parts))
                for part, module in named.items():
                    take(f"features.{stage}.{index}.block.{step}.{part}", module)
    take("features.8.0", model.conv_head)
    take("features.8.1", model.bn2)
    take("classifier.1", model.classifier)
    return found


def test_torchvisions_efficientnet_is_renamed(tmp_path):
    source, target = drawn("short"), drawn("short", seed=2)
    for tensor in source.state_dict().values():  # each tensor different from every other
        if tensor.is_floating_point():
            tensor.normal_()
    theirs = torchvisions(source)
    assert len(theirs) == len(source.state_dict())
    path = saved(theirs, tmp_path / "a.pth")
    load_tensors(target, read_weights(path, target.state_dict()), where="a")
    assert_same(source, target)


@pytest.mark.parametrize(
    "name",
    [
        "features.2.0.block.2.0.weight",  # EfficientNet has the squeeze in this place
        "features.1.block.0.0.weight",  # MobileNet V3
        "features.1.conv.0.0.weight",  # MobileNet V2
    ],
)
def test_other_networks_of_torchvision_are_refused_by_their_names(name):
    tensors = to_timm_names({"features.0.0.weight": torch.ones(1), name: torch.ones(1)})
    assert list(tensors) == ["conv_stem.weight", name]


# --- filling ---


MISFIT = "mine.pth: does not fit the model\n  "


def said_of(model: nn.Module, tensors: dict[str, Tensor], skip: str = "") -> str:
    with pytest.raises(CheckpointError) as caught:
        load_tensors(model, tensors, where="mine.pth", skip=skip)
    return str(caught.value)


def test_missing_extra_and_misshapen_tensors_are_named():
    model, good = drawn(), drawn(seed=2).state_dict()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    less = {name: value for name, value in good.items() if name != "layer2.0.bn1.weight"}
    assert said_of(model, less) == f"{MISFIT}not in the file: layer2.0.bn1.weight (32,)"
    more = {**good, "layer9.weight": torch.ones(1)}
    assert said_of(model, more) == f"{MISFIT}not in the model: layer9.weight (1,)"
    other = {**good, "fc.weight": torch.ones(5, 64)}
    assert said_of(model, other) == (
        f"{MISFIT}other shapes: fc.weight is (5, 64) in the file, (10, 64) in the model"
    )
    assert_same_tensors(model.state_dict(), before)


def test_of_many_problems_three_are_shown_and_the_rest_counted():
    said = said_of(drawn(), {})
    # 44 tensors, of which 7 count batches
    first = "conv1.weight (16, 3, 3, 3), bn1.weight (16,), bn1.bias (16,)"
    assert said == f"{MISFIT}not in the file: {first} and 34 more"


def test_the_counters_of_batches_may_be_missing():
    source, target = drawn(), drawn(seed=2)
    old = {n: v for n, v in source.state_dict().items() if "num_batches_tracked" not in n}
    load_tensors(target, old, where="mine")
    assert_same(source, target)


def test_a_skipped_head_stays_whatever_the_file_has():
    source, target = drawn(classes=1000), drawn(seed=2)
    head = target.fc.weight.clone()
    assert "fc.bias is (1000,) in the file, (10,) in the model" in said_of(
        target, source.state_dict()
    )
    load_tensors(target, source.state_dict(), where="mine", skip="fc")
    assert torch.equal(target.fc.weight, head)
    assert torch.equal(target.conv1.weight, source.conv1.weight)
    headless = {n: v for n, v in source.state_dict().items() if not n.startswith("fc.")}
    load_tensors(target, headless, where="mine", skip="fc")
    renamed = {**headless, "fc2.weight": torch.ones(1)}
    assert said_of(target, renamed, "fc") == f"{MISFIT}not in the model: fc2.weight (1,)"


def test_a_pickle_that_calls_something_wrongly_is_damaged(tmp_path):
    path = tmp_path / "w.pth"
    path.write_bytes(b"\x80\x02ccollections\nOrderedDict\nK\x01K\x02\x86R.")  # two arguments
    with pytest.raises(CheckpointError, match="is truncated or damaged"):
        read_weights(path, [])


def test_the_options_that_a_script_stored_beside_the_weights_do_no_harm(tmp_path):
    state = {"a": torch.ones(2)}
    torch.save({"model_state_dict": state, "opts": Namespace(lr=0.1)}, tmp_path / "w.pt")
    assert read_weights(tmp_path / "w.pt", ["a"])["a"].tolist() == [1, 1]
