"""Where splits lie, and what is a class and not a split or a dataset."""

import pytest

from phalanx.data.layouts.split_folders import find_split_folders, has_class_folders
from phalanx.errors import ConfigError


def write_files(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")


def find(root, **options):
    found = find_split_folders(root, **options)
    names = [
        folder and folder.relative_to(root).as_posix() for folder in (found.train, found.valid)
    ]
    return [*names, *found.unused_folders]


@pytest.mark.parametrize(
    ("folders", "found"),
    [
        (["train", "val"], ["train", "val"]),
        (["Training", "DEV"], ["Training", "DEV"]),
        (["train", "test", "eval"], ["train", "eval", "test"]),
        (["train", "validation", "valid", "extra"], ["train", "valid", "extra", "validation"]),
        (["train"], ["train", None]),
        (["val"], [None, "val"]),
        (["cat", "dog"], [".", None]),
    ],
)
def test_the_first_of_the_usual_names_is_the_validation_split(tmp_path, folders, found):
    for folder in folders:
        below = () if folder in ("cat", "dog") else ("cat", "dog")
        for name in below or ("",):
            write_files(tmp_path / folder / name, "a.jpg")
    assert find(tmp_path) == found
    assert has_class_folders(tmp_path)


def test_a_split_is_chosen_by_name(tmp_path):
    write_files(tmp_path, "train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg", "Odd/a/1.jpg")
    assert find(tmp_path, valid_split="odd") == ["train", "Odd", "val"]
    for wrong in ("test", "train"):
        with pytest.raises(ConfigError, match=f"--valid-split {wrong}: no such folder"):
            find(tmp_path, valid_split=wrong)


def test_an_unlabelled_test_folder_is_left_over(tmp_path):
    write_files(tmp_path, "train/a/1.jpg", "train/b/1.jpg", "test/1.jpg")
    assert find(tmp_path) == ["train", None, "test"]


def test_pictures_of_trains_are_a_class(tmp_path):
    write_files(tmp_path, "train/1.jpg", "bus/1.jpg", "tram/1.jpg")
    assert find_split_folders(tmp_path).flat and has_class_folders(tmp_path)


def test_images_in_split_folders_alone_are_no_classes(tmp_path):
    write_files(tmp_path, "train/cat.1.jpg", "test/1.jpg")
    assert not has_class_folders(tmp_path)
    assert find(tmp_path, loose=True) == ["train", None, "test"]


@pytest.mark.parametrize(
    ("files", "are_classes"),
    [
        (["cat/1.jpg", "dog/2020/1.jpg"], True),
        (["cat/images/1.jpg", "dog/images/1.jpg"], True),
        (["cat/x/1.jpg", "cat/y/1.jpg", "dog/x/1.jpg", "dog/y/1.jpg"], True),
        (["pets/cat/1.jpg", "pets/dog/1.jpg", "cars/bus/1.jpg", "cars/tram/1.jpg"], False),
        (["pets/train/cat/1.jpg", "cars/train/bus/1.jpg"], False),
        (["cat/1.jpg", "empty/notes.txt"], False),
        (["cat/1.jpg"], False),
    ],
)
def test_class_folders_are_told_from_datasets_side_by_side(tmp_path, files, are_classes):
    write_files(tmp_path, *files)
    assert has_class_folders(tmp_path) == are_classes
