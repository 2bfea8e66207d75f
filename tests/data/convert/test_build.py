"""Data from one form into another: nothing lost, nothing twice, whatever happens on the way."""

import os

import numpy as np
import pytest

from phalanx.data.convert import build as building
from phalanx.data.convert.build import BuildOptions, build_dataset
from phalanx.data.convert.folder_writer import name_class_folders
from phalanx.data.convert.source_splits import (
    find_source_splits,
    read_sample,
)
from phalanx.data.convert.writer import BLOCK_IMAGES
from phalanx.data.formats.decode import EncodedImage, encode_png
from phalanx.data.formats.imagenet import BOXES_FILE
from phalanx.data.formats.sources import ValSplit, find_portable_name, open_format
from phalanx.errors import ConfigError, DataError, DiskError
from small_layouts import write_classes, write_image
from small_photos import CLASSES, encode, photo, tree_bytes, write_photos
from small_runs import make_digits

FORMS = ("folder", "tar", "tfrecord", "packed")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_photos(tmp_path_factory.mktemp("photos"))


def everything(root):
    """All images of both splits: bytes, labels, names and classes, in order."""
    return {
        split.name: (
            split.classes,
            [read_sample(split.source, number) for number in range(split.images)],
        )
        for split in find_source_splits(root)
    }


def run(src, out, to, *, workers=1, on_progress=lambda *_: None, max_bad=None, **options):
    chosen = BuildOptions(to=to, **options)
    return build_dataset(
        src, out, chosen, workers=workers, on_progress=on_progress, max_bad=max_bad
    )


@pytest.mark.parametrize("to", FORMS)
def test_every_form_holds_the_same_bytes_labels_names_and_order(photos, tmp_path, to):
    outcomes = run(photos, tmp_path / "there", to)
    assert everything(tmp_path / "there") == everything(photos)
    run(tmp_path / "there", tmp_path / "back", "folder")
    assert everything(tmp_path / "back") == everything(photos)
    assert outcomes["train"].written == outcomes["train"].images == 48
    assert outcomes["train"].encoded == 0 and outcomes["valid"].images == 15


@pytest.mark.parametrize("to", FORMS)
def test_the_number_of_processes_does_not_show(photos, tmp_path, to):
    for workers in (1, 2, 3):
        run(photos, tmp_path / str(workers), to, workers=workers, short_side=50)
    first = tree_bytes(tmp_path / "1")
    assert first == tree_bytes(tmp_path / "2") == tree_bytes(tmp_path / "3")


class Break(Exception):
    pass


def break_at(split, image):
    def progress(now, done, _count):
        if now == split and done >= image:
            raise Break

    return progress


@pytest.mark.parametrize("to", [*FORMS, "parquet"])
@pytest.mark.parametrize(("split", "image"), [("train", 1), ("train", 33), ("valid", 2)])
def test_a_build_that_broke_off_goes_on_to_the_same_bytes(
    photos, tmp_path, to, split, image, monkeypatch
):
    monkeypatch.setattr("phalanx.data.convert.writer.BLOCK_IMAGES", 7)
    options = {"shards": 12} if to in ("tar", "tfrecord", "parquet") else {}
    run(photos, tmp_path / "whole", to, **options)
    with pytest.raises(Break):
        run(photos, tmp_path / "broken", to, on_progress=break_at(split, image), **options)
    before = tree_bytes(tmp_path / "broken")
    assert before != tree_bytes(tmp_path / "whole")
    outcomes = run(photos, tmp_path / "broken", to, **options)
    assert tree_bytes(tmp_path / "broken") == tree_bytes(tmp_path / "whole")
    written = sum(outcome.written for outcome in outcomes.values())
    assert written == 63 if (split, image) == ("train", 1) else written < 63


def test_finished_shards_are_not_written_again(photos, tmp_path):
    with pytest.raises(Break):
        run(photos, tmp_path, "tar", shards=6, on_progress=break_at("train", 40))
    kept = {path: path.stat().st_ino for path in tmp_path.glob("*.tar")}
    assert len(kept) >= 4
    run(photos, tmp_path, "tar", shards=6)
    assert all(path.stat().st_ino == number for path, number in kept.items())


def test_a_build_that_broke_off_is_not_read_as_if_it_were_whole(photos, tmp_path):
    for to in FORMS:
        options = {"shards": 6} if to in ("tar", "tfrecord") else {}
        with pytest.raises(Break):
            run(photos, tmp_path / to, to, on_progress=break_at("train", 40), **options)
        with pytest.raises(DataError):
            [len(split.source) for split in find_source_splits(tmp_path / to)]


def test_a_second_run_has_nothing_to_do(photos, tmp_path):
    run(photos, tmp_path, "packed")
    outcomes = run(photos, tmp_path, "packed")
    assert [outcome.written for outcome in outcomes.values()] == [0, 0]


# --- another size ---


def test_only_images_that_are_too_large_are_shrunk(tmp_path):
    src = write_photos(tmp_path / "src", {"train": 2, "val": 1})
    large = src / "train/cat/large.jpg"
    large.write_bytes(encode(photo(900, size=(200, 100))))
    outcomes = run(src, tmp_path / "out", "folder", short_side=72)
    before, after = tree_bytes(src / "train"), tree_bytes(tmp_path / "out/train")
    assert [name for name in before if before[name] != after[name]] == ["cat/large.jpg"]
    assert EncodedImage(after["cat/large.jpg"], "").decode().shape == (72, 144, 3)
    assert outcomes["train"].encoded == 1 and outcomes["valid"].encoded == 0


def test_quality_decides_the_size_of_what_is_encoded_anew(photos, tmp_path):
    sizes = []
    for quality in (30, 90, None):
        run(photos, tmp_path / str(quality), "packed", short_side=40, quality=quality)
        sizes.append((tmp_path / str(quality) / "train.phx").stat().st_size)
    assert sizes[0] < sizes[1] == sizes[2]


def test_raw_pixels_are_those_of_the_source(photos, tmp_path):
    run(photos, tmp_path, "packed", raw=True)
    (train, _), (raw, _) = find_source_splits(photos), find_source_splits(tmp_path)
    assert raw.source.raw
    for number in range(train.images):
        assert np.array_equal(train.source.read(number), raw.source.read(number))


def test_a_png_stays_one_where_it_may_and_is_called_a_jpeg_where_it_becomes_one(tmp_path):
    src = write_photos(tmp_path / "src", {"train": 1, "val": 1})
    (src / "train/cat/x.png").write_bytes(encode(photo(901), "PNG"))
    run(src, tmp_path / "tar", "tar")
    run(src, tmp_path / "records", "tfrecord")
    tar, records = (find_source_splits(tmp_path / name)[0].source for name in ("tar", "records"))
    assert find_portable_name(tar, 1) == "cat/x.png"
    assert tar.read_encoded(1) == (src / "train/cat/x.png").read_bytes()
    assert find_portable_name(records, 1) == "cat/x.jpg" and records.read_encoded(1).startswith(
        b"\xff\xd8"
    )


# --- other sources ---


def test_array_files_become_folders_with_the_same_labels_and_order(tmp_path):
    digits = make_digits(tmp_path / "digits", train=30, valid=20)
    run(digits, tmp_path / "out", "folder")
    before, after = find_source_splits(digits), find_source_splits(tmp_path / "out")
    for old, new in zip(before, after, strict=True):
        order = np.argsort(old.labels, kind="stable")
        assert new.labels.tolist() == old.labels[order].tolist()
        for place, number in enumerate(order):
            assert np.array_equal(new.source.read(place), old.source.read(int(number)))


def test_classes_that_folders_would_sort_otherwise_are_numbered():
    assert name_class_folders(("a", "b")) == ("a", "b")
    assert name_class_folders(("b", "a")) == ("0_b", "1_a")
    assert name_class_folders(("a", "b/c", *"defghijklm"))[1] == "01_b_c"


def test_kaggles_tree_becomes_a_folder_with_boxes(tmp_path, monkeypatch):
    src, images = tmp_path / "kaggle", tmp_path / "kaggle/ILSVRC/Data/CLS-LOC"
    (images / "val").mkdir(parents=True)
    for seed, synset in enumerate(("n00000001", "n00000002")):
        (images / "train" / synset).mkdir(parents=True)
        for number in range(12):
            data = encode(photo(100 * seed + number, size=(100, 50)))
            (images / "train" / synset / f"{synset}_{number}.JPEG").write_bytes(data)
        (images / "val" / f"v{seed}.JPEG").write_bytes(encode(photo(500 + seed)))
    lines = ["ImageId,PredictionString", "v0,n00000002 0 0 48 36", "v1,n00000001 0 0 10 10"]
    (src / "LOC_val_solution.csv").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr("phalanx.data.convert.writer.BLOCK_IMAGES", 1)
    with pytest.raises(Break):
        run(src, tmp_path / "out", "folder", on_progress=break_at("valid", 2))
    part = tmp_path / "out/.phalanx/blocks-valid/000001.part"
    part.write_text("half a li")  # as a kill leaves it: written, but not renamed
    run(src, tmp_path / "out", "folder", workers=2)
    train, valid = find_source_splits(tmp_path / "out")
    assert (train.data, train.images, train.classes) == ("imagenet", 24, ("n00000001", "n00000002"))
    assert [valid.source.name(n) for n in (0, 1)] == [
        "val/n00000001/v1.JPEG",
        "val/n00000002/v0.JPEG",
    ]
    assert valid.source.box(1) == (0, 0, 0.5, 0.5)
    table = (tmp_path / "out" / BOXES_FILE).read_text().splitlines()
    assert [line.partition(",")[0] for line in table] == ["v0.JPEG", "v1.JPEG"]
    assert table[0] == "v0.JPEG,0.0,0.0,0.5,0.5"


def test_names_that_would_meet_in_one_folder_are_numbered(tmp_path):
    src = write_photos(tmp_path / "src", {"train": 8, "val": 1})
    run(src, tmp_path / "tar", "tar")
    for shard in (tmp_path / "tar").glob("train-*.tar"):
        content = shard.read_bytes()
        shard.write_bytes(content.replace(b" 001.jpg", b" 000.jpg"))
    run(tmp_path / "tar", tmp_path / "out", "folder")
    names = sorted(path.name for path in (tmp_path / "out/train/cat").iterdir())
    assert names[:2] == ["00000000_cat 000.jpg", "00000001_cat 000.jpg"] and len(names) == 8


# --- what goes wrong ---


def spoil(root, *names):
    for name in names:
        path = root / name
        path.write_bytes(path.read_bytes()[:-200])


@pytest.mark.parametrize("to", FORMS)
def test_bad_images_are_left_out_and_named(tmp_path, to):
    src = write_photos(tmp_path / "src")
    spoil(src, "train/cat/cat 003.jpg", "train/fish/fish 015.jpg", "val/dög/dög 000.jpg")
    (src / "train/cat/cat 005.jpg").write_bytes(b"")
    (src / "train/cat/cat 006.jpg").unlink()
    (src / "train/cat/cat 006.jpg").symlink_to("nowhere")
    outcomes = run(src, tmp_path / "out", to, workers=2)
    assert [text.partition(":")[0] for text in outcomes["train"].bad] == [
        "train/cat/cat 003.jpg",
        "train/cat/cat 005.jpg",
        "train/cat/cat 006.jpg",
        "train/fish/fish 015.jpg",
    ]
    assert outcomes["train"].images == 44 and len(outcomes["valid"].bad) == 1
    train, valid = find_source_splits(tmp_path / "out")
    assert (train.images, valid.images) == (44, 14)
    good = write_photos(tmp_path / "good")
    for text in outcomes["train"].bad + outcomes["valid"].bad:
        (good / text.partition(":")[0]).unlink()
    assert everything(tmp_path / "out") == everything(good)
    again = run(src, tmp_path / "out", to)
    assert again["train"].bad == outcomes["train"].bad and again["train"].written == 0


def test_more_bad_images_than_allowed_are_an_error_that_names_them(tmp_path):
    src = write_photos(tmp_path / "src")
    spoil(src, "train/cat/cat 003.jpg", "train/fish/fish 001.jpg")
    with pytest.raises(DataError, match=r"train: more than 1 images cannot be read") as error:
        run(src, tmp_path / "out", "tar", max_bad="1")
    assert "cat/cat 003.jpg: image file is truncated" in str(error.value)
    assert str(error.value).endswith("allow more with --max-bad")


def test_a_place_that_holds_something_else_is_refused(photos, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(DataError, match=r"is not empty \(mine.txt\) and has no build in it"):
        run(photos, tmp_path, "tar")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(DataError, match="is a file, not a folder"):
        run(photos, tmp_path / "mine.txt", "tar")


def test_another_source_or_other_options_are_refused(photos, tmp_path):
    run(photos, tmp_path / "out", "tar")
    other = write_photos(tmp_path / "other", {"train": 2, "val": 1})
    with pytest.raises(DataError, match="was built from another source, or the source has chang"):
        run(other, tmp_path / "out", "tar")
    with pytest.raises(DataError, match="was built without --short-side, now with --short-side 6"):
        run(photos, tmp_path / "out", "tar", short_side=64)
    with pytest.raises(DataError, match="was built with --to tar, now with --to packed"):
        run(photos, tmp_path / "out", "packed")


@pytest.mark.parametrize("form", ["folder", "tar", "imagenet-kaggle"])
def test_a_source_that_was_written_since_is_refused(tmp_path, form):
    src, out = tmp_path / "src", tmp_path / "out"
    write_photos(src, {"train": 2, "val": 1})
    file = src / "train/fish/fish 001.jpg"
    if form == "tar":
        run(src, tmp_path / "tar", "tar")
        src, file = tmp_path / "tar", tmp_path / "tar/train-000000.tar"
    elif form == "imagenet-kaggle":
        images = tmp_path / "kaggle/ILSVRC/Data/CLS-LOC"
        images.parent.mkdir(parents=True)
        src, file = src.rename(images).parents[2], images / file.relative_to(src)
    run(src, out, "packed")
    record = building.json.loads((out / ".phalanx/build.json").read_text())
    assert run(src, out, "packed")["train"].written == 0
    content, times = bytearray(file.read_bytes()), file.stat()
    content[-3] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    with pytest.raises(DataError, match=r"files of the source were written or copied since it was"):
        run(src, out, "packed")
    del record["file_times"]  # as older releases wrote it
    building.write_build_record(out, record)
    assert run(src, out, "packed")["train"].written == 0
    (out / ".phalanx/build.json").write_text("[]")
    with pytest.raises(DataError, match=r"build.json: cannot be read; choose another --out"):
        run(src, out, "packed")


def test_two_builds_do_not_write_to_one_folder(photos, tmp_path):
    with (
        building.lock_output(tmp_path),
        pytest.raises(DataError, match="another build is writing there"),
    ):
        run(photos, tmp_path, "tar")


def test_options_that_mean_nothing_are_refused():
    for options, told in (
        ({"to": "zip"}, "--to: no such format 'zip'; choose from folder, tar, tfrecord"),
        ({"to": "tar", "raw": True}, "--raw: only --to packed"),
        ({"to": "packed", "shards": 3}, "--shards: --to packed writes no shards"),
        ({"to": "folder", "shard_mib": 3}, "--shard-mib: --to folder writes no shards"),
        ({"to": "tar", "shards": 3, "shard_mib": 3}, "give --shards or --shard-mib, not both"),
        ({"to": "folder", "quality": 50}, "--quality: --to folder re-encodes nothing"),
    ):
        with pytest.raises(ConfigError) as error:
            BuildOptions(**options)
        assert str(error.value).startswith(told)


def test_a_class_without_training_images_cannot_become_a_folder(photos, tmp_path):
    run(photos, tmp_path / "tar", "tar")
    (tmp_path / "tar/classes.txt").write_text("\n".join([*CLASSES, "zebra"]) + "\n")
    with pytest.raises(DataError, match="class 'zebra' has no training image"):
        run(tmp_path / "tar", tmp_path / "out", "folder")


@pytest.mark.skipif(os.geteuid() == 0 and not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize(("to", "file"), [("tar", "train-000000.tar"), ("packed", "train.phx")])
def test_a_full_disk_is_told_with_the_way_to_go_on(photos, tmp_path, to, file):
    (tmp_path / "whole").mkdir()
    run(photos, tmp_path / "whole", to)
    out = tmp_path / "out"
    out.mkdir()
    (out / ".phalanx").mkdir()
    building.write_build_record(
        out, building.json.loads((tmp_path / "whole/.phalanx/build.json").read_text())
    )
    (out / f"{file}.part").symlink_to("/dev/full")
    with pytest.raises(DiskError, match=r"no space left .* free some space, then run the same"):
        run(photos, out, to)
    run(photos, out, to)
    assert tree_bytes(out) == tree_bytes(tmp_path / "whole")


def test_blocks_of_files_are_large_enough_not_to_wait_for_the_disk():
    assert BLOCK_IMAGES >= 256


def test_shards_are_sized_by_bytes(photos, tmp_path):
    """A set of 63 small photos is one file a split, and not one file an image."""
    for to in ("tar", "tfrecord", "parquet"):
        run(photos, tmp_path / to, to)
        names = sorted(path.name for path in (tmp_path / to).glob("*-0*"))
        assert len(names) == 2 and names[0].startswith("train-00000")
        assert run(photos, tmp_path / to, to)["train"].written == 0  # it is known to be done
    noise = np.random.default_rng(0).integers(0, 256, (3, 2, 500, 500, 3), np.uint8)
    for label, images in enumerate(noise):
        for number, pixels in enumerate(images):
            for split in ("train", "val"):
                folder = tmp_path / "noise" / split / f"c{label}"
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{number}.png").write_bytes(encode_png(pixels))
    run(tmp_path / "noise", tmp_path / "tars", "tar", shard_mib=1)  # 6 images of 734 KiB
    sizes = [path.stat().st_size for path in (tmp_path / "tars").glob("train-*.tar")]
    assert len(sizes) == 3 and max(sizes) < 1.6 * 2**20
    with pytest.raises(DataError, match="was built with --shard-mib 1, now with --shard-mib 2"):
        run(tmp_path / "noise", tmp_path / "tars", "tar", shard_mib=2)


def test_a_build_goes_on_with_the_number_of_shards_it_began_with(photos, tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.data.convert.shard_writers.TarWriter.shard_mib", 1 / 64)
    run(photos, tmp_path / "whole", "tar")
    assert len(list((tmp_path / "whole").glob("train-*.tar"))) > 6
    with pytest.raises(Break):
        run(photos, tmp_path / "broken", "tar", on_progress=break_at("train", 40))
    monkeypatch.setattr(building._Build, "_estimate_bytes", lambda *_: 1)  # as if encoded anew
    run(photos, tmp_path / "broken", "tar")
    for path in (tmp_path / "whole").glob("train-*.tar"):
        assert (tmp_path / "broken" / path.name).read_bytes() == path.read_bytes()


def test_images_that_become_jpegs_of_one_name_are_all_kept(tmp_path):
    for name in ("a.jpg", "a.webp", "a.bmp", "a.png"):
        write_image(tmp_path / "src/cat" / name)
        write_image(tmp_path / "src/dog" / name)
    run(tmp_path / "src", tmp_path / "copied", "folder")
    assert sorted(p.name for p in (tmp_path / "copied/train/cat").iterdir())[0] == "a.bmp"
    run(tmp_path / "src", tmp_path / "shrunk", "folder", short_side=16)
    for out in ("copied", "shrunk"):
        assert len(everything(tmp_path / out)["train"][1]) == 8


@pytest.mark.parametrize("to", ["tar", "tfrecord", "packed"])
def test_val_split_holds_out_the_same_images_of_any_form(tmp_path, to):
    suffixes = ("jpg", "png", "webp")
    write_classes(tmp_path / "src", 12, suffixes=suffixes)
    run(tmp_path / "src", tmp_path / "out", to)
    held_out = []
    for data, root in (("folder", tmp_path / "src"), (to, tmp_path / "out")):
        valid = open_format(data, root, "valid", val_split=ValSplit("25%"))
        names = [find_portable_name(valid, number) for number in range(len(valid))]
        held_out.append([name.rpartition(".")[0] for name in names])
    assert held_out[0] == held_out[1] and len(held_out[0]) == 6
