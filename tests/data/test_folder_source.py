import numpy as np
import pytest
from PIL import Image

from phalanx.data.pixels import BadImage
from phalanx.data.sources import OPENERS, open_source
from phalanx.errors import ConfigError, DataError


def write_image(path, *, value=100, size=(20, 16)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, 0, 0)).save(path)


@pytest.fixture
def folder(tmp_path):
    for split, count in (("train", 3), ("val", 2)):
        for name in ("cat", "dog"):
            for number in range(count):
                write_image(tmp_path / split / name / f"{number}.png", value=number)
    return tmp_path


def test_a_folder_gives_sorted_classes_and_paths(folder):
    source = open_source("folder", str(folder), "train")
    assert source.classes == ("cat", "dog") and source.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert source.name(4) == "train/dog/1.png"
    assert source.read(4).shape == (16, 20, 3) and source.read(4)[0, 0].tolist() == [1, 0, 0]


def test_validation_labels_are_those_of_training(folder):
    for number in range(2):
        (folder / f"val/cat/{number}.png").unlink()
    (folder / "val/cat").rmdir()
    (folder / "val").rename(folder / "validation")
    source = open_source("folder", str(folder), "valid")
    assert source.classes == ("cat", "dog") and source.labels.tolist() == [1, 1]
    assert source.name(0) == "validation/dog/0.png"


def test_endings_count_in_any_case_and_other_files_do_not(folder):
    write_image(folder / "train/cat/UPPER.JPG")
    write_image(folder / "train/cat/four.JpEg")
    (folder / "train/cat/notes.txt").write_text("no image")
    (folder / "train/cat/._0.png").write_text("no image either")
    (folder / "train/.cache").mkdir()
    assert len(open_source("folder", str(folder), "train")) == 8


def test_class_folders_alone_are_one_validation_split(folder):
    source = open_source("folder", str(folder / "train"), "valid")
    assert len(source) == 6 and source.name(0) == "cat/0.png"


def test_a_fingerprint_follows_paths_sizes_and_labels(folder):
    first = open_source("folder", str(folder), "train").fingerprint()
    assert first == open_source("folder", str(folder), "train").fingerprint()
    assert first["images"] == 6 and first["classes"] == 2
    with (folder / "train/cat/0.png").open("ab") as file:
        file.write(b"more")
    grown = open_source("folder", str(folder), "train").fingerprint()
    (folder / "train/cat/0.png").rename(folder / "train/cat/00.png")
    renamed = open_source("folder", str(folder), "train").fingerprint()
    assert len({print_["sha256"] for print_ in (first, grown, renamed)}) == 3


def test_a_file_that_vanished_is_a_bad_image(folder):
    source = open_source("folder", str(folder), "train")
    (folder / "train/cat/0.png").unlink()
    with pytest.raises(BadImage, match=r"train/cat/0\.png: No such file"):
        source.read(0)
    assert source.fingerprint()["images"] == 6


def test_all_findings_of_a_folder_are_told_together(folder):
    (folder / "val/empty").mkdir()
    for name in ("catt", "zebra"):
        write_image(folder / "val" / name / "0.png")
    (folder / "train/empty").mkdir()
    write_image(folder / "train/empty/0.png")
    with pytest.raises(DataError) as caught:
        open_source("folder", str(folder), "valid")
    text = str(caught.value)
    assert "did you mean 'cat'" in text and "zebra" in text
    assert "val/empty: no .jpg, .jpeg, .png file" in text and "remove them" in text


def remove(folder, name):
    for path in sorted((folder / name).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (folder / name).rmdir()


@pytest.mark.parametrize(
    ("gone", "split", "message"),
    [
        (["train"], "train", r"no train/ folder \(found val\)"),
        (["val"], "valid", r"no val/ or validation/ folder \(found train\)"),
        (["train", "val"], "train", r"no train/ folder \(found no folders at all\)"),
        (["train", "val"], "valid", "no class folders"),
        (["train/cat"], "train", "only one class folder, dog/"),
        (["train/cat", "train/dog"], "train", "no class folders"),
        (["val/cat", "val/dog"], "valid", "val: has no class folders"),
    ],
)
def test_a_folder_without_what_it_needs_is_refused(folder, gone, split, message):
    for name in gone:
        remove(folder, name)
    with pytest.raises(DataError, match=message):
        open_source("folder", str(folder), split)


def test_a_class_without_images_is_refused(folder):
    remove(folder, "train/cat")
    (folder / "train/cat").mkdir()
    with pytest.raises(DataError, match=r"train/cat: no \.jpg"):
        open_source("folder", str(folder), "train")


@pytest.mark.parametrize("data", ["folder", "mnist", "fashion-mnist", "cifar10"])
@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_missing_data_dir_names_the_option(tmp_path, data, split):
    (tmp_path / "file").write_text("")
    for data_dir in (None, str(tmp_path / "nowhere"), str(tmp_path / "file")):
        with pytest.raises(DataError, match=r"--data-dir.* DATA_DIR"):
            open_source(data, data_dir, split)


def test_a_dataset_without_files_is_refused_by_name():
    with pytest.raises(ConfigError, match="'synthetic' has no images"):
        open_source("synthetic", None, "train")
    assert len(OPENERS) == 6


def test_labels_are_int64(folder):
    assert open_source("folder", str(folder), "train").labels.dtype == np.int64


def test_a_folder_without_train_is_there_to_be_scored(folder):
    whole = open_source("folder", str(folder), "valid")
    remove(folder, "train")
    alone = open_source("folder", str(folder), "valid")
    assert alone.classes == whole.classes
    assert alone.labels.tolist() == whole.labels.tolist()
