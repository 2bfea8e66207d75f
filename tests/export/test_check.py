"""An export that is wrong is never left behind, and the message says where it parts."""

from dataclasses import replace
from importlib import import_module

import numpy as np
import onnx
import pytest
from PIL import Image

import phalanx
from phalanx.errors import CheckpointError, ConfigError, DataError
from phalanx.export import drafts, fold, network, parity
from phalanx.export.check_images import CheckImages
from phalanx.export.destination import refuse_existing
from phalanx.export.parity import ParityCase, check_parity
from phalanx.export.weights_file import serialise_weights


@pytest.fixture
def out(tmp_path):
    return tmp_path / "new" / "model.onnx"


def refuse(run, out, **options):
    """The message of an export that fails; nothing may be left of it."""
    with pytest.raises(CheckpointError) as error:
        phalanx.export(run, out=out, **options)
    assert not out.parent.exists()
    return str(error.value)


def test_a_file_with_a_wrong_weight_is_told_by_its_unit(run, out, built_model):
    for weight in built_model.graph.initializer:
        if weight.name == "model.layer2.0.conv2.weight":
            wrong = 1.5 * onnx.numpy_helper.to_array(weight)
            weight.CopyFrom(onnx.numpy_helper.from_array(wrong, weight.name))
    message = refuse(run, out)
    assert "the export disagrees with the checkpoint, so nothing was written: in a batch" in message
    assert "t10k-images-idx3-ubyte[" in message  # which image
    assert message.endswith(
        "layer2/0 is the first unit to differ in the file; use another --format"
    )


def test_a_wrong_fold_is_told_by_its_unit(run, out, monkeypatch):
    right = fold._fold_pair

    def fold_wrong(conv, norm):
        right(conv, norm)
        if conv.in_channels == 32 and conv.out_channels == 64:
            conv.bias += 3

    monkeypatch.setattr(fold, "_fold_pair", fold_wrong)
    for dtype in ("float32", "bfloat16"):
        message = refuse(run, out.with_suffix(".pt2"), format="pt2", dtype=dtype)
        assert message.endswith(
            "layer3/0 is the first unit to differ, with folded norms; use --format safetensors, "
            "which keeps them"
        )


def test_what_16_bits_change_is_told_with_the_way_out(run, out, monkeypatch):
    monkeypatch.setitem(parity._ROUNDING, "bfloat16", 1e-5)
    message = refuse(run, out.with_suffix(".pt2"), format="pt2", dtype="bfloat16")
    assert message.endswith("use --dtype float32") and "folded" not in message
    weights = out.with_suffix(".safetensors")
    message = refuse(run, weights, format="safetensors", dtype="bfloat16")
    assert message.endswith("; use --dtype float32")


def test_a_unit_that_16_bits_change_is_named(run, out, monkeypatch):
    right = network.convert_weights

    def convert_wrong(model, dtype):
        right(model, dtype)
        model.get_submodule("layer2.0.conv2").weight *= 1.5

    monkeypatch.setattr(network, "convert_weights", convert_wrong)
    message = refuse(run, out.with_suffix(".pt2"), format="pt2", dtype="float16")
    assert message.endswith("layer2/0 is the first unit to differ, in float16; use --dtype float32")


def test_a_batch_that_became_fixed_is_found(run, out, built_model):
    built_model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    message = refuse(run, out)
    assert message.startswith("the export cannot run a batch of 2, so nothing was written: ")
    assert "Got: 2 Expected: 1" in message


def test_weights_alone_are_checked_as_they_were_written(run, out, monkeypatch):
    def write_wrong(model, *rest):
        model.fc.bias.data += 1
        content = serialise_weights(model, *rest)
        model.fc.bias.data -= 1
        return content

    monkeypatch.setattr(drafts, "serialise_weights", write_wrong)
    message = refuse(run, out.with_suffix(".safetensors"), format="safetensors")
    assert "differs by 1, allowed are 0.0001" in message


def test_a_file_that_cannot_be_opened_is_told(run, out, built_model):
    built_model.graph.node[0].op_type = "NoSuchOperator"
    message = refuse(run, out)
    assert message.startswith("the export cannot be opened, so nothing was written: ")
    assert "NoSuchOperator" in message


def test_an_earlier_export_outlives_one_that_fails(run, tmp_path, monkeypatch):
    path = tmp_path / "model.pt2"
    phalanx.export(run, format="pt2", out=path, check_images=2)
    before = path.read_bytes()
    monkeypatch.setattr(fold, "_fold_pair", lambda conv, norm: None)
    with pytest.raises(CheckpointError):
        phalanx.export(run, format="pt2", out=path)
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["README.md", "model.pt2"]


def test_images_are_the_runs_then_those_given_then_our_own(run, tmp_path, digits, monkeypatch):
    options = {"format": "safetensors", "out": tmp_path / "w.safetensors"}
    checked = phalanx.export(run, **options).checked
    assert checked.source == "40 validation images of its data (mnist)"
    assert (checked.images, checked.batches, checked.top1_equal) == (40, (1, 2, 32), 40)
    for number in range(3):
        Image.new("RGB", (20, 30), (90 * number, 0, 0)).save(tmp_path / f"{number}.png")
    given = phalanx.export(run, images=tmp_path, check_images=2, max_batch=5, **options).checked
    assert (given.source, given.batches) == ("2 images given by --images", (1, 2, 5))
    digits.rename(digits.with_name("away"))
    try:
        ours = phalanx.export(run, check_images=7, **options).checked
        assert ours.source == "7 images that come with Phalanx (its data is not on this machine)"
        with pytest.raises(DataError, match="no such folder"):
            phalanx.export(run, data_dir=tmp_path / "nowhere", **options)
    finally:
        digits.with_name("away").rename(digits)


def test_a_run_without_validation_images_is_checked_on_training_images(tmp_path):
    for place in range(6):
        image = tmp_path / "data/train" / "ab"[place % 2] / f"{place}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 30), (40 * place, 90, 0)).save(image)
    image.write_text("no image")
    run, options = tmp_path / "run", {"model": "resnet8", "image_size": 16, "batch_size": 2}
    options |= {"data": "folder", "data_dir": tmp_path / "data", "validation_mode": "none"}
    phalanx.train(run_dir=run, steps=1, workers=0, **options)
    path = tmp_path / "w.safetensors"
    checked = phalanx.export(run, format="safetensors", out=path).checked
    assert checked.source == "5 training images of its data (folder)"
    for place in range(2):
        image = tmp_path / "other/val" / "ab"[place] / f"{place}.png"
        image.parent.mkdir(parents=True)
        Image.new("RGB", (20, 30), (40 * place, 90, 0)).save(image)
    checked = phalanx.export(run, format="safetensors", out=path, data_dir=tmp_path / "other")
    assert checked.checked.source == "2 validation images of its data (folder)"
    checked = phalanx.export(run, format="safetensors", out=path, data_dir=tmp_path / "data")
    assert checked.checked.source == "5 training images of its data (folder)"
    (tmp_path / "data").rename(tmp_path / "away")
    checked = phalanx.export(run, format="safetensors", out=path, check_images=1).checked
    assert checked.source == "1 image that comes with Phalanx (its data is not on this machine)"


def test_a_run_whose_validation_images_are_gone_is_checked_on_training_images(tmp_path):
    for split, images in (("train", 6), ("val", 2)):
        for place in range(images):
            image = tmp_path / "data" / split / "ab"[place % 2] / f"{place}.png"
            image.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (20, 30), (40 * place, 90, 0)).save(image)
    run, options = tmp_path / "run", {"model": "resnet8", "image_size": 16, "batch_size": 2}
    options |= {"data": "folder", "data_dir": tmp_path / "data", "workers": 0}
    phalanx.train(run_dir=run, steps=1, **options)
    out = {"format": "safetensors", "out": tmp_path / "w.safetensors"}
    (tmp_path / "data/val").rename(tmp_path / "val")
    for given in ({}, {"data_dir": tmp_path / "data"}):
        checked = phalanx.export(run, **out, **given).checked
        assert checked.source == "6 training images of its data (folder)"
    (tmp_path / "data/train").rename(tmp_path / "train")
    checked = phalanx.export(run, check_images=7, **out).checked
    assert checked.source == "7 images that come with Phalanx (its data cannot be read any more)"


def test_a_run_on_class_folders_alone_is_checked_on_their_images(tmp_path):
    for place in range(6):
        image = tmp_path / "data" / "ab"[place % 2] / f"{place}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 30), (40 * place, 90, 0)).save(image)
    run, options = tmp_path / "run", {"model": "resnet8", "image_size": 16, "batch_size": 2}
    options |= {"data": "folder", "data_dir": tmp_path / "data", "validation_mode": "none"}
    phalanx.train(run_dir=run, steps=1, workers=0, **options)
    checked = phalanx.export(run, format="safetensors", out=tmp_path / "w.safetensors").checked
    assert checked.source == "6 training images of its data (folder)"


def make_case(logits):
    """Images of 1x1 pixels that a checkpoint gives these logits."""
    count = len(logits)
    names = ("a.png", "b.png", *(f"{number}.png" for number in range(2, count)))
    images = CheckImages(np.zeros((count, 1, 1, 3), np.uint8), names, f"{count} images")
    return ParityCase(
        images=images,
        inputs=np.arange(count, dtype=np.float32),
        outputs=(np.array(logits, np.float32),),
        classes=("cat", "dog"),
    )


def check(case, answers, dtype="float32", max_batch=4):
    table = np.array(answers, np.float32)
    return check_parity(
        lambda batch: (table[batch.astype(int)],),
        case,
        dtype=dtype,
        max_batch=max_batch,
        explain=lambda row: f"row {row}",
    )


def test_rounding_is_allowed_and_no_more():
    case = make_case([[1.0, 2.0], [3.0, 0.0]])
    report = check(case, [[1.00005, 2.0], [3.0, 0.0]])
    assert report.logits_differ_by == pytest.approx(5e-5, rel=0.1)
    assert (report.allowed, report.top1_equal) == (1e-4, 2)
    with pytest.raises(CheckpointError) as error:
        check(case, [[1.0, 2.0], [3.0, 0.001]])
    assert str(error.value) == (
        "the export disagrees with the checkpoint, so nothing was written: in a batch of 1, b.png "
        "gets 0.001 for dog instead of 0 (differs by 0.001, allowed are 0.0001); row 1"
    )
    assert check(case, [[1.0, 2.0], [3.0, 0.001]], dtype="float16").top1_equal == 2


def test_the_likeliest_class_may_not_change_in_32_bits():
    with pytest.raises(CheckpointError) as error:
        check(make_case([[1.0, 1.00001], [3.0, 0.0]]), [[1.0, 0.99999], [3, 0]])
    assert str(error.value).endswith(
        "written: the most likely class differs for 1 of 2 images (0 allowed): a.png becomes cat "
        "instead of dog, for which the checkpoint gives 1 and 1.00001; row 0"
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_likeliest_class_may_change_for_few_images_in_16_bits(dtype):
    logits, turned = [[1.0, 1.001]] * 100, [[1.001, 1.0]] * 100
    report = check(make_case(logits), turned[:2] + logits[2:], dtype)
    assert report.top1_equal == 98
    assert report.describe_top1() == "98 of 100 (2 may change in 16 bits)"
    with pytest.raises(CheckpointError, match=r"for 3 of 100 images \(2 allowed\): a.png"):
        check(make_case(logits), turned[:3] + logits[3:], dtype)


@pytest.mark.parametrize(
    ("largest", "words"),
    [(1, "batches of 1"), (2, "batches of 1 and 2"), (4, "batches of 1, 2 and 4")],
)
def test_batches_in_words(largest, words):
    logits = [[1.0, 2.0], [3.0, 0.0]]
    assert check(make_case(logits), logits, max_batch=largest).describe_batches() == words


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_no_number_is_refused(wrong):
    with pytest.raises(CheckpointError, match=r"a.png gets (nan|inf) for dog instead of 2"):
        check(make_case([[1.0, 2.0], [3.0, 0.0]]), [[1.0, wrong], [3.0, 0.0]])


def test_another_shape_is_refused():
    case = make_case([[1.0, 2.0], [3.0, 0.0]])
    with pytest.raises(CheckpointError, match=r"has shape \[1, 2\] instead of \[1, 3\]"):
        check(replace(case, outputs=(np.zeros((2, 3), np.float32),)), [[1.0, 2.0], [3.0, 0.0]])


def test_a_place_that_is_taken_is_left_alone(run, tmp_path):
    (tmp_path / "model.pt2").write_text("mine")
    with pytest.raises(ConfigError, match="exists, and is not known to be an export"):
        phalanx.export(run, format="pt2", out=tmp_path / "model.pt2")
    assert (tmp_path / "model.pt2").read_text() == "mine"


@pytest.mark.parametrize("suffix", ["onnx", "pt2", "safetensors"])
def test_a_file_of_somebody_else_beside_an_export_is_left_alone(run, tmp_path, suffix):
    phalanx.export(run, format="safetensors", out=tmp_path / "ours.safetensors", check_images=1)
    (tmp_path / f"mine.{suffix}").write_text("mine")
    with pytest.raises(ConfigError, match="exists, and is not known to be an export"):
        phalanx.export(run, format=suffix, out=tmp_path / f"mine.{suffix}")
    assert (tmp_path / f"mine.{suffix}").read_text() == "mine"


def test_a_folder_with_more_than_an_export_is_left_alone(run, tmp_path, built_model):
    box = tmp_path / "box"
    phalanx.export(run, out=box / "m.onnx", check_images=1)
    options = {"format": "triton", "out": tmp_path, "name": "box", "check_images": 1}
    for name in ("a.txt", "b.txt", "c.txt"):
        (box / name).write_text("precious")
    with pytest.raises(ConfigError) as error:
        phalanx.export(run, **options)
    assert str(error.value) == (
        f"--out {box}: holds files that no export wrote (a.txt, b.txt, c.txt and 1 more), "
        "and would be replaced; choose another --out, or move them away"
    )
    assert (box / "m.onnx").is_file() and (box / "c.txt").read_text() == "precious"


def test_a_folder_with_the_names_of_an_export_alone_is_left_alone(tmp_path):
    files = ("model.safetensors", "config.json")
    for name in (*files, "README.md"):
        (tmp_path / name).write_text("---\n- phalanx-export\n---\n")
    with pytest.raises(ConfigError, match="is not known to be an export"):
        refuse_existing(tmp_path, files)


def test_what_comes_while_an_export_is_checked_is_left_alone(run, tmp_path, monkeypatch):
    def check_slowly(*args, **kwargs):
        (tmp_path / "w.safetensors").write_text("mine")
        return check_parity(*args, **kwargs)

    module = import_module("phalanx.export.run")  # phalanx.export is a function, too
    monkeypatch.setattr(module, "check_parity", check_slowly)
    with pytest.raises(ConfigError, match="is not known to be an export"):
        phalanx.export(run, format="safetensors", out=tmp_path / "w.safetensors", check_images=1)
    assert (tmp_path / "w.safetensors").read_text() == "mine"


def test_each_file_of_a_folder_has_its_card(run, tmp_path):
    options = {"format": "safetensors", "check_images": 1}
    for _ in range(2):
        for name, card in (("one", "README.md"), ("two", "two.safetensors.md")):
            done = phalanx.export(run, out=tmp_path / f"{name}.safetensors", name=name, **options)
            assert done.card == tmp_path / card
    assert "# one" in (tmp_path / "README.md").read_text()
    (tmp_path / "three.safetensors.md").write_text("my notes")
    with pytest.raises(ConfigError, match=r"three\.safetensors\.md, which no export wrote"):
        phalanx.export(run, out=tmp_path / "three.safetensors", **options)


def test_a_readme_of_somebody_else_is_left_alone(run, tmp_path):
    (tmp_path / "README.md").write_text("my project")
    out = tmp_path / "weights.safetensors"
    for _ in range(2):  # the second replaces the first
        done = phalanx.export(run, format="safetensors", out=out, check_images=1)
    assert done.card == tmp_path / "weights.safetensors.md"
    assert done.card.is_file() and (tmp_path / "README.md").read_text() == "my project"
