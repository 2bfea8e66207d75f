"""A kept index is used until the folder changes, however deep."""

import os

import pytest

from phalanx.data.formats.folder import open_folder
from phalanx.data.layouts import image_files
from phalanx.data.layouts.listing import LayoutOptions
from small_layouts import (
    write_classes,
    write_image,
    write_prefixes,
    write_splits,
    write_tiny_imagenet,
)


def test_changes_far_below_are_seen(tmp_path):
    write_splits(tmp_path, {"train": 2}, below="a/b")
    assert len(open_folder(tmp_path, "train")) == 4
    write_image(tmp_path / "train/cat/a/b/new.png")
    assert len(open_folder(tmp_path, "train")) == 5
    write_image(tmp_path / "train/cat/a/c/new.png")
    assert len(open_folder(tmp_path, "train")) == 6
    (tmp_path / "train/cat/a/c/new.png").unlink()
    (tmp_path / "train/cat/a/c").rmdir()
    assert len(open_folder(tmp_path, "train")) == 5
    write_image(tmp_path / "train/cat/a/b/new.png")  # other bytes under the same name
    assert open_folder(tmp_path, "train").read(0).shape == (36, 40, 3)


def test_a_large_folder_is_not_listed_when_its_index_is_kept(tmp_path, monkeypatch):
    names = [f"c{number:02}" for number in range(60)]
    write_classes(tmp_path / "train", 1, names=names, below="deep")
    open_folder(tmp_path, "train")
    monkeypatch.setattr("phalanx.data.layouts.snapshot.SMALL_SET", 2)
    monkeypatch.setattr("phalanx.data.layouts.snapshot._FOLDERS_SAMPLED", 2)
    listed = []
    real = image_files.list_images
    spied = lambda folder, **options: listed.append(folder) or real(folder, **options)  # noqa: E731
    open_folder(tmp_path, "train")  # kept anew, by a sample
    monkeypatch.setattr("phalanx.data.layouts.snapshot.list_images", spied)
    monkeypatch.setattr("phalanx.data.layouts.listing.list_images", spied)
    assert len(open_folder(tmp_path, "train")) == 60
    assert len(listed) <= 6, "three folders to see that it is large, two of the sample"
    write_image(tmp_path / "train/c40/deep/new.jpg")
    assert len(open_folder(tmp_path, "train")) == 61


@pytest.mark.parametrize(
    ("write", "layout", "new"),
    [
        (write_prefixes, LayoutOptions(class_from="prefix"), "train/more/dog_7.png"),
        (write_tiny_imagenet, LayoutOptions(), "train/n01443537/images/new.JPEG"),
    ],
)
def test_other_layouts_are_listed_anew_when_they_change(tmp_path, write, layout, new):
    write(tmp_path)
    before = len(open_folder(tmp_path, "train", layout))
    write_image(tmp_path / new)
    assert len(open_folder(tmp_path, "train", layout)) == before + 1


def test_rules_have_an_index_each_and_older_ones_are_not_taken_for_new(tmp_path):
    write_splits(tmp_path, {"train": 4}, suffixes=("jpg", "webp"))
    first, today = (open_folder(tmp_path, "train", LayoutOptions(rule=rule)) for rule in (1, 2))
    assert (len(first), len(today)) == (4, 8)
    folder = tmp_path / ".phalanx"
    os.replace(folder / "folder-train-rule1.index", folder / "folder-train.index")
    assert len(open_folder(tmp_path, "train")) == 8
    assert len(open_folder(tmp_path, "train", LayoutOptions(rule=1))) == 4


def test_a_plain_folder_has_the_fingerprint_of_the_first_rule(tmp_path):
    write_splits(tmp_path, {"train": 4, "val": 2})
    for split in ("train", "valid"):
        first, today = (open_folder(tmp_path, split, LayoutOptions(rule=r)) for r in (1, 2))
        assert first.fingerprint() == today.fingerprint()
