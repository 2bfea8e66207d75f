"""What lies in a folder is told by its names, however deep it is nested."""

import bz2
import gzip
import lzma
import os

import numpy as np
import pytest
from PIL import Image

from phalanx.assemble.find_data import read_settings_with_data
from phalanx.data.formats.detect import describe_no_dataset, detect_datasets, locate_dataset
from phalanx.data.formats.sources import DATA_FORMATS
from phalanx.data.formats.tfrecord import open_tfrecord
from phalanx.data.formats.webdataset import open_tar
from phalanx.data.layouts.listing import LayoutOptions
from phalanx.errors import ConfigError, DataError
from small_samples import make_samples, write_split

SYNSETS = ("n02100735", "n02119789")


def write_images(root, *classes, splits=("train", "val")):
    for split in splits:
        for name in classes:
            (root / split / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(root / split / name / "0.png")


def write_idx(root, *, labels=b"", ending=""):
    root.mkdir(parents=True, exist_ok=True)
    (root / f"train-images-idx3-ubyte{ending}").write_bytes(b"")
    data = gzip.compress(labels) if ending else labels
    (root / f"t10k-labels-idx1-ubyte{ending}").write_bytes(data)


def write_files(root, *names):
    root.mkdir(parents=True, exist_ok=True)
    for name in names:
        (root / name).write_bytes(np.zeros(3073 * 2, np.uint8))


def test_every_form_is_found_by_what_lies_there(tmp_path):
    write_images(tmp_path / "pets", "cat", "dog")
    write_images(tmp_path / "loose", "cat", "dog", splits=(".",))
    write_images(tmp_path / "imagenet", *SYNSETS)
    (tmp_path / "k/ILSVRC/Data/CLS-LOC").mkdir(parents=True)
    write_files(tmp_path / "official", "ILSVRC2012_img_val.tar")
    write_files(tmp_path / "tf", "train-00000-of-00001", "validation-00000-of-00001")
    write_files(tmp_path / "web", "train-000000.tar", "validation-000000.tar")
    write_files(tmp_path / "ten", "data_batch_1.bin")
    write_files(tmp_path / "hundred", "cifar-100-binary.tar.gz")
    write_idx(tmp_path / "digits")
    write_idx(tmp_path / "FashionMNIST/raw", ending=".gz")
    write_files(tmp_path / "notes", "readme.txt")
    found = detect_datasets(tmp_path)
    assert len(found) == 11
    assert {f.folder.relative_to(tmp_path).as_posix(): f.data for f in found} == {
        "pets": "folder",
        "loose": "folder",
        "imagenet": "imagenet",
        "k": "imagenet-kaggle",
        "official": "imagenet-official",
        "tf": "tfrecord",
        "web": "tar",
        "ten": "cifar10",
        "hundred": "cifar100",
        "digits": "mnist",
        "FashionMNIST/raw": "fashion-mnist",
    }


def test_parquet_and_packed_are_found(tmp_path):
    write_files(tmp_path / "hub/data", "train-00000-of-00001.parquet")
    write_files(tmp_path / "fast", "train.phx", "valid.phx")
    assert {finding.data for finding in detect_datasets(tmp_path)} == {"parquet", "packed"}


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files_are_told_apart_by_their_labels(tmp_path, ending):
    embedded = "/usr/share/datasets/fashion-mnist/t10k-labels-idx1-ubyte.gz"
    if not os.path.exists(embedded):
        pytest.skip("Debian's dataset-fashion-mnist is not installed")
    with gzip.open(embedded) as file:
        write_idx(tmp_path / "clothes", labels=file.read(), ending=ending)
    assert [finding.data for finding in detect_datasets(tmp_path)] == ["fashion-mnist"]


@pytest.mark.parametrize(("depth", "found"), [("", True), ("a/b/c", True), ("a/b/c/d", False)])
def test_folders_are_searched_three_levels_down(tmp_path, depth, found):
    write_images(tmp_path / depth, "cat", "dog")
    assert [finding.folder for finding in detect_datasets(tmp_path)] == [tmp_path / depth] * found


def test_a_tree_of_images_is_one_finding(tmp_path):
    write_images(tmp_path, "cat", "dog")
    write_files(tmp_path / "train/cat", "data_batch_1.bin")
    (finding,) = detect_datasets(tmp_path)
    assert (finding.data, finding.folder) == ("folder", tmp_path)
    assert len(DATA_FORMATS[finding.data].open(finding.folder, "valid")) == 2


def test_an_archive_beside_its_own_files_is_one_finding(tmp_path):
    write_files(tmp_path, "cifar-10-binary.tar.gz")
    write_files(tmp_path / "cifar-10-batches-bin", "data_batch_1.bin")
    assert [finding.folder for finding in detect_datasets(tmp_path)] == [tmp_path]


def test_hidden_and_unreadable_folders_are_passed_by(tmp_path):
    write_images(tmp_path / ".trash", "cat", "dog")
    (tmp_path / "locked").mkdir(mode=0)
    assert detect_datasets(tmp_path) == []


def test_several_findings_are_listed_with_the_way_to_choose(tmp_path):
    write_images(tmp_path / "pets", "cat", "dog")
    write_files(tmp_path / "ten", "data_batch_1.bin")
    with pytest.raises(ConfigError) as caught:
        read_settings_with_data(None, {"data-dir": str(tmp_path)})
    text = str(caught.value)
    assert "there are several datasets here" in text
    assert f"--data folder --data-dir {tmp_path / 'pets'} " in text
    assert f"--data cifar10 --data-dir {tmp_path / 'ten'} " in text


def test_nothing_found_and_nothing_there_are_mistakes(tmp_path):
    assert detect_datasets(tmp_path) == []
    with pytest.raises(DataError, match="no such folder"):
        detect_datasets(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is a file, not a folder"):
        detect_datasets(tmp_path / "file")


def test_images_without_two_classes_are_told_apart(tmp_path):
    write_images(tmp_path / "one", "cat", splits=(".",))
    write_files(tmp_path / "loose", "a.jpg")
    only = describe_no_dataset(tmp_path / "one")
    assert only.startswith(
        f"{tmp_path / 'one/cat'}: found images in only one folder, but a classifier needs two "
        "classes; move them into folders named after their classes, or give"
    )
    assert ": found images but no class folders; move" in describe_no_dataset(tmp_path / "loose")


@pytest.mark.parametrize("name", ["train-000000.tgz", "train-00000-of-00001.gz", "val-0.tar.zst"])
@pytest.mark.parametrize("preset", [None, "imagenet-resnet50", "folder-resnet18"])
def test_shards_that_are_compressed_by_name_are_to_be_decompressed(tmp_path, name, preset):
    write_files(tmp_path, name, "classes.txt")
    with pytest.raises(DataError, match=rf"{name}: is compressed, .*; decompress this file and"):
        read_settings_with_data(preset, {"data-dir": str(tmp_path)})


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bz2.compress])
def test_shards_that_are_compressed_under_their_plain_name_are_told(tmp_path, pack):
    for to, open_split in (("tar", open_tar), ("tfrecord", open_tfrecord)):
        write_split(to, make_samples(3), tmp_path / to)
        (shard,) = (tmp_path / to).glob("train-*")
        shard.write_bytes(pack(shard.read_bytes()))
        with pytest.raises(DataError, match=rf"{shard}: is compressed \(\w+\), .*; decompress it"):
            open_split(tmp_path / to, "train")


@pytest.mark.parametrize("preset", [None, "imagenet-resnet50", "folder-resnet18"])
def test_imagenet_as_it_is_handed_out_is_to_be_built_first(tmp_path, preset):
    write_files(tmp_path, "ILSVRC2012_img_train.tar")
    with pytest.raises(DataError, match=r"imagenet-official as it is distributed.*data build"):
        read_settings_with_data(preset, {"data-dir": str(tmp_path)})


def test_what_is_handed_out_does_not_hide_what_was_built_of_it(tmp_path):
    write_files(tmp_path / "archives", "ILSVRC2012_img_train.tar")
    write_files(tmp_path / "built", "train.phx", "valid.phx")
    data = read_settings_with_data("imagenet-resnet50", {"data-dir": str(tmp_path)}).config.data
    assert (data.data, data.data_dir) == ("packed", str(tmp_path / "built"))


@pytest.mark.parametrize("flag", ["labels", "class_from"])
def test_options_of_folders_are_not_taken_to_mean_that_a_packed_set_is_one(tmp_path, flag):
    write_files(tmp_path, "train.phx", "valid.phx")
    layout = LayoutOptions(**{flag: "labels.csv" if flag == "labels" else "prefix"})
    shown = f"--{flag.replace('_', '-')}"
    with pytest.raises(DataError, match=f"in the format packed.*give {shown} none"):
        locate_dataset("packed", tmp_path, layout)
    assert locate_dataset("packed", tmp_path, LayoutOptions()) == ("packed", tmp_path)
