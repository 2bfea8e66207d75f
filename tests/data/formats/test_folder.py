import os

import numpy as np
import pytest
from PIL import Image

from phalanx.data.formats.decode import BadImage
from phalanx.data.formats.folder import open_with_first_val_split
from phalanx.data.formats.sources import open_source
from phalanx.data.layouts import snapshot
from phalanx.data.layouts.listing import LayoutOptions
from phalanx.data.layouts.snapshot import snapshot_folder
from phalanx.data.layouts.split_folders import has_class_folders
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


def test_class_folders_alone_are_scored_as_one_split(folder):
    source = open_source(
        "folder", str(folder / "train"), "valid", layout=LayoutOptions(scoring=True)
    )
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
    assert "val/empty: no image in this class folder" in text and "remove them" in text


def remove(folder, name):
    for path in sorted((folder / name).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (folder / name).rmdir()


@pytest.mark.parametrize(
    ("gone", "split", "message"),
    [
        (["train"], "train", r"no training data \(found val/\)"),
        (["val"], "valid", r"no validation data \(found train/\); .*--val-split 10%"),
        (["train", "val"], "train", "has no class folders"),
        (["train", "val"], "valid", "no class folders; give the folder that holds them"),
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
    with pytest.raises(DataError, match="train/cat: no image in this class folder"):
        open_source("folder", str(folder), "train")


@pytest.mark.parametrize("data", ["folder", "mnist", "fashion-mnist", "cifar10"])
@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_missing_data_dir_names_the_option(tmp_path, data, split):
    (tmp_path / "file").write_text("")
    for data_dir in (None, str(tmp_path / "nowhere"), str(tmp_path / "file")):
        with pytest.raises(DataError, match=r"--data-dir.* DATA_DIR"):
            open_source(data, data_dir, split)


def test_a_dataset_without_files_is_refused_by_name():
    known = (
        "embedded, generated, folder, imagenet, tfrecord, tar, parquet, packed, cifar10, cifar100"
    )
    with pytest.raises(
        ConfigError,
        match=f"'synthetic' has no images to read; choose from {known}, mnist, fashion-mnist$",
    ):
        open_source("synthetic", None, "train")


def test_labels_are_int64(folder):
    assert open_source("folder", str(folder), "train").labels.dtype == np.int64


def test_a_folder_without_train_is_there_to_be_scored(folder):
    whole = open_source("folder", str(folder), "valid")
    remove(folder, "train")
    alone = open_source("folder", str(folder), "valid")
    assert alone.classes == whole.classes
    assert alone.labels.tolist() == whole.labels.tolist()


# --- the kept index ---


def kept(root, key):
    return root / ".phalanx" / f"{key}.index"


def test_an_index_is_kept_and_used_again(folder):
    open_source("folder", str(folder), "train")
    made = kept(folder, "folder-train").stat()
    source = open_source("folder", str(folder), "train")
    assert kept(folder, "folder-train").stat().st_ino == made.st_ino
    assert source.read(4)[0, 0].tolist() == [1, 0, 0] and len(source) == 6


def test_an_index_is_built_anew_when_an_image_comes_goes_or_is_written_over(folder):
    open_source("folder", str(folder), "train")
    write_image(folder / "train/cat/new.png")
    assert len(open_source("folder", str(folder), "train")) == 7
    (folder / "train/cat/new.png").unlink()
    assert len(open_source("folder", str(folder), "train")) == 6
    before = kept(folder, "folder-train").stat().st_ino
    os.utime(folder / "train/dog/2.png", ns=(1, 1))
    open_source("folder", str(folder), "train")
    assert kept(folder, "folder-train").stat().st_ino != before


def test_a_new_training_class_shifts_the_labels_of_validation(folder):
    assert open_source("folder", str(folder), "valid").labels.tolist() == [0, 0, 1, 1]
    write_image(folder / "train/bird/0.png")
    assert open_source("folder", str(folder), "valid").labels.tolist() == [1, 1, 2, 2]


def test_a_large_folder_is_known_by_a_sample_of_its_files(folder, monkeypatch):
    monkeypatch.setattr(snapshot, "SMALL_SET", 3)
    monkeypatch.setattr(snapshot, "_FILES_SAMPLED", 2)

    def snapshot_split(known=None):
        return snapshot_folder(folder / "train", known, rule=2)

    before = snapshot_split()
    os.utime(folder / "train/dog/2.png", ns=(1, 1))
    assert snapshot_split(before[:-1]) == before, "the third file of a class is not in the sample"
    os.utime(folder / "train/dog/0.png", ns=(1, 1))
    assert snapshot_split(before[:-1]) != before
    before = snapshot_split(before[:-1])
    (folder / "train/dog/2.png").unlink()
    assert snapshot_split(before[:-1]) != before, "the folder's own time tells"


def test_a_file_that_changed_is_a_bad_image_with_both_sizes(folder):
    source = open_source("folder", str(folder), "train")
    size = (folder / "train/cat/1.png").stat().st_size
    with (folder / "train/cat/1.png").open("ab") as file:
        file.write(b"more")
    with pytest.raises(
        BadImage, match=rf"train/cat/1\.png: has changed: {size + 4} bytes, {size} "
    ):
        source.read(1)


def test_a_dangling_link_is_a_bad_image_and_not_the_end(folder):
    (folder / "train/cat/9.png").symlink_to("nowhere.png")
    source = open_source("folder", str(folder), "train")
    assert len(source) == 7
    with pytest.raises(BadImage, match=r"9\.png: No such file"):
        source.read(3)


def test_strange_names_are_read(folder):
    for name in ("with space.png", "Ä ö.png", os.fsdecode(b"bad\xff.png")):
        write_image(folder / "train/cat" / name, value=77)
    source = open_source("folder", str(folder), "train")
    names = [source.name(place).rpartition("/")[2] for place in range(6)]
    assert set(names[3:]) == {"with space.png", "Ä ö.png", os.fsdecode(b"bad\xff.png")}
    assert all(source.read(place)[0, 0, 0] == 77 for place in (3, 4, 5))


def test_a_valid_folder_is_a_validation_split(folder):
    (folder / "val").rename(folder / "valid")
    assert open_source("folder", str(folder), "valid").name(0) == "valid/cat/0.png"


# --- a folder that is split by chance, as in older runs ---


@pytest.fixture
def classes_only(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(200):
            (tmp_path / name / f"{number}.png").write_bytes(b"x")
    return tmp_path


def names_of(source):
    return {source.name(place) for place in range(len(source))}


def split(root, side, share=0.1, seed=0):
    return open_with_first_val_split(root, side, share=share, seed=seed)


def test_a_split_gives_every_image_to_one_side(classes_only):
    train, valid = split(classes_only, "train"), split(classes_only, "valid")
    assert not names_of(train) & names_of(valid)
    assert len(names_of(train) | names_of(valid)) == 400
    counts = np.bincount(valid.labels)
    assert len(counts) == 2 and all(8 <= count <= 33 for count in counts)
    assert train.classes == valid.classes == ("cat", "dog")


def test_a_split_follows_seed_and_share(classes_only):
    first = names_of(split(classes_only, "valid"))
    assert names_of(split(classes_only, "valid", seed=1)) != first
    assert first < names_of(split(classes_only, "valid", share=0.3))
    assert first == names_of(split(classes_only, "valid"))


def test_images_keep_their_side_when_others_are_added(classes_only):
    train, valid = names_of(split(classes_only, "train")), names_of(split(classes_only, "valid"))
    for number in range(200, 400):
        (classes_only / "cat" / f"{number}.png").write_bytes(b"x")
    (classes_only / "bird").mkdir()
    (classes_only / "bird/0.png").write_bytes(b"x")
    assert train < names_of(split(classes_only, "train"))
    assert valid < names_of(split(classes_only, "valid"))


def test_a_small_class_has_an_image_on_each_side(folder):
    (folder / "train/dog/2.png").unlink()
    for share in (0.001, 0.999):
        for side in ("train", "valid"):
            assert set(split(folder / "train", side, share=share).labels.tolist()) == {0, 1}
    remove(folder, "val")
    assert names_of(split(folder, "valid", share=0.001)) == {
        f"train/{name}" for name in names_of(split(folder / "train", "valid", share=0.001))
    }


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5])
def test_a_share_of_nothing_or_all_is_refused(classes_only, share):
    with pytest.raises(ConfigError, match="--val-split: expected a share between"):
        split(classes_only, "train", share=share)


def test_a_folder_with_its_own_validation_is_not_split(folder):
    with pytest.raises(
        ConfigError, match=r"the data has a validation split, .*val; leave the option out"
    ):
        split(folder, "train")


def test_a_folder_is_told_from_other_folders(folder, tmp_path_factory):
    assert has_class_folders(folder) and has_class_folders(folder / "train")
    assert not has_class_folders(folder / "train/cat")
    other = tmp_path_factory.mktemp("other")
    (other / "a").mkdir()
    write_image(other / "b/0.png")
    assert not has_class_folders(other)


def test_an_index_is_not_kept_where_nobody_may_write_nor_without_a_home(
    folder, tmp_path_factory, monkeypatch
):
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    folder.chmod(0o555)  # which root is free to ignore
    try:
        kept = open_source("folder", str(folder), "train")
        assert kept.index.save_error == "" and not (folder / ".phalanx").exists()
        assert len(list(cache.rglob("*.index"))) == 1
        monkeypatch.setattr("phalanx.data.formats.index.find_user_cache", lambda: None)
        unsaved = open_source("folder", str(folder), "train")
        assert unsaved.index.save_error == "Permission denied"
        assert unsaved.fingerprint() == kept.fingerprint()
    finally:
        folder.chmod(0o755)
