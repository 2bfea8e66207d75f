"""Every output format by itself: the same bytes, whole or absent, on after any break."""

from dataclasses import replace

import pytest

from phalanx.data.convert.build import OUTPUT_FORMATS
from phalanx.data.convert.shard_writers import TarWriter, TFRecordWriter
from phalanx.data.formats.packed import has_packed_files, open_packed
from phalanx.data.formats.tfrecord import open_tfrecord
from phalanx.data.formats.webdataset import open_tar
from phalanx.errors import DataError
from small_photos import tree_bytes
from small_samples import CLASSES, make_samples, make_writer, undecodable, write_split

JOBS = [
    ("folder", {}),
    ("tar", {"shards": 4}),
    ("tfrecord", {"shards": 4}),
    ("parquet", {"shards": 4}),
    ("packed", {}),
    ("packed", {"raw": True}),
    ("packed", {"short_side": 8}),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr("phalanx.data.convert.writer.BLOCK_IMAGES", 5)


def files_of(folder):
    return sorted(tree_bytes(folder))


@pytest.mark.parametrize(("to", "job"), JOBS)
def test_the_same_samples_give_the_same_bytes(tmp_path, to, job):
    for name in ("a", "b"):
        for split in ("train", "valid"):
            write_split(to, make_samples(17, boxes=True), tmp_path / name, split, **job)
    assert tree_bytes(tmp_path / "a") == tree_bytes(tmp_path / "b")


def test_files_are_named_as_readers_know_them(tmp_path):
    for to, job in JOBS[:5]:
        write_split(to, make_samples(10, boxes=True), tmp_path / to, **job)
    assert files_of(tmp_path / "tar") == [
        "classes.txt",
        "metadata.json",
        *(f"train-{n:06}.tar" for n in range(4)),
    ]
    assert files_of(tmp_path / "tfrecord") == [
        "labels.txt",
        *(f"train-{n:05}-of-00004" for n in range(4)),
    ]
    assert files_of(tmp_path / "parquet") == [f"train-{n:05}-of-00004.parquet" for n in range(4)]
    assert files_of(tmp_path / "packed") == ["train.phx"]
    folder = files_of(tmp_path / "folder")
    assert folder[:2] == [".phalanx/boxes-train.csv", "imagenet_2012_bounding_boxes.csv"]
    assert [name.rpartition("/")[0] for name in folder[2:]] == [
        f"train/{name}"
        for name, count in zip(CLASSES, (4, 3, 3), strict=True)
        for _ in range(count)
    ]


def test_tfrecord_shards_are_as_seed_001_has_them(tmp_path):
    writer = make_writer("tfrecord", tmp_path, count=10, shards=3)
    assert writer.bounds == [0, 3, 6, 10]
    write_split("tfrecord", make_samples(5), tmp_path, shards=1024)  # no more than images
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["labels.txt", *(f"train-{n:05}-of-00005" for n in range(5))]
    assert (tmp_path / "labels.txt").read_text(encoding="utf-8") == "cat\ndög\nn01440764\n"
    for asked, shards in ((1024, 128), (24, 3), (1, 1)):  # validation gets an eighth
        assert TFRecordWriter.split_shards(asked, "valid") == shards


def test_shards_are_counted_by_bytes():
    gib, imagenet = 2**30, {"train": 138 * 2**30, "valid": 6.3 * 2**30}
    counts = [TFRecordWriter.count_shards(size, split) for split, size in imagenet.items()]
    assert counts == [1024, 128]
    assert TFRecordWriter.count_shards(4000, "train") == 1
    assert TFRecordWriter.count_shards(gib, "train") == 22
    assert TarWriter.count_shards(gib, "train") == TarWriter.count_shards(gib, "valid") == 8


# --- breaks ---


class Break(Exception):
    pass


def break_after(samples, count):
    yield from samples[:count]
    raise Break


def break_off(to, folder, samples, **job):
    """A split of which 13 images were written; what could go on with it."""
    with pytest.raises(Break):
        write_split(to, break_after(samples, 13), folder, count=17, **job)
    return make_writer(to, folder, count=17, **job)


@pytest.mark.parametrize(("to", "job"), JOBS)
def test_writing_goes_on_after_the_last_whole_shard_to_the_same_bytes(tmp_path, to, job):
    samples = make_samples(17, boxes=True)
    write_split(to, samples, tmp_path / "whole", **job)
    writer = break_off(to, tmp_path / "broken", samples, **job)
    whole = writer.count_whole_shards()
    assert whole == (3 if to == "tfrecord" else 2) and not writer.is_finished()
    assert not (tmp_path / "broken/train").exists()
    assert not has_packed_files(tmp_path / "broken")
    asked = []

    def samples_from(first):
        asked.append(first)
        raise Break

    with pytest.raises(Break):
        writer.write(samples_from)
    assert asked == [writer.bounds[whole]]
    write_split(to, samples, tmp_path / "broken", **job)
    assert tree_bytes(tmp_path / "broken") == tree_bytes(tmp_path / "whole")
    assert writer.is_finished() and not writer.blocks.exists()


@pytest.mark.parametrize(("to", "job"), JOBS)
def test_a_break_before_the_first_whole_shard_leaves_no_image_behind(tmp_path, to, job):
    with pytest.raises(Break):
        write_split(to, break_after(make_samples(17), 3), tmp_path, count=17, **job)
    assert set(files_of(tmp_path)) <= {"classes.txt", "metadata.json", "labels.txt"}


@pytest.mark.parametrize("given", [16, 18])
@pytest.mark.parametrize(("to", "job"), JOBS)
def test_a_source_that_changed_while_it_was_read_is_told(tmp_path, to, job, given):
    told = "16 instead of 17" if given == 16 else "more than 17"
    with pytest.raises(DataError, match=rf"gave {told} images; it changed while it was being read"):
        write_split(to, make_samples(given), tmp_path, count=17, **job)
    writer = make_writer(to, tmp_path, count=17, **job)
    assert writer.count_whole_shards() == 3 and not writer.is_finished()
    parts = {path.name for path in tmp_path.rglob("*.part")}
    assert parts <= {".train.part", "train.phx.part"}


@pytest.mark.parametrize(("to", "job"), JOBS[1:3])
def test_a_shard_that_is_missing_and_those_after_it_are_written_again(tmp_path, to, job):
    samples = make_samples(17, boxes=True)
    write_split(to, samples, tmp_path, **job)
    before, writer = tree_bytes(tmp_path), make_writer(to, tmp_path, count=17, **job)
    writer.shard_path(1).unlink()
    kept = writer.shard_path(0).stat().st_ino
    assert writer.count_whole_shards() == 1
    write_split(to, samples, tmp_path, **job)
    assert tree_bytes(tmp_path) == before and writer.shard_path(0).stat().st_ino == kept


@pytest.mark.parametrize(("to", "job"), [JOBS[0], JOBS[4]])
def test_records_that_a_finished_split_left_behind_are_removed(tmp_path, to, job):
    samples = make_samples(17)
    write_split(to, samples, tmp_path, **job)
    before, writer = tree_bytes(tmp_path), make_writer(to, tmp_path, count=17, **job)
    writer.blocks.mkdir()
    writer.shard_path(0).write_bytes(b"killed before this was removed")
    write_split(to, samples, tmp_path, **job)
    assert tree_bytes(tmp_path) == before


def test_what_an_older_release_left_half_done_is_begun_anew(tmp_path):
    samples = make_samples(17, boxes=True)
    for to in ("folder", "packed"):
        write_split(to, samples, tmp_path / "whole" / to)
        left = tmp_path / "left" / to
        (left / ".phalanx").mkdir(parents=True)
        (left / ".train.part/cat").mkdir(parents=True)
        (left / ".phalanx/files-train.json").write_text("[5, 20]")
        (left / ".phalanx/boxes-train.csv").write_text("0.jpg,0.5,0.5,1.0,1")
        (left / ".phalanx/packed-train.json").write_text("[5, 2000, 300]")
        (left / ".phalanx/packed-train.jsonl").write_text("[]\n" * 5)
    (tmp_path / "left/folder/.train.part/cat/.1.jpg.part").write_bytes(b"half a file")
    (tmp_path / "left/packed/train.phx.part").write_bytes(b"phalanxP")
    for to in ("folder", "packed"):
        write_split(to, samples, tmp_path / "left" / to)
    (tmp_path / "left/packed/.phalanx/boxes-train.csv").unlink()
    assert tree_bytes(tmp_path / "left") == tree_bytes(tmp_path / "whole")


# --- packed files ---


def test_a_name_that_is_no_text_survives_a_break(tmp_path):
    samples = [replace(sample, name=f"{sample.name}\udcff") for sample in make_samples(17)]
    break_off("packed", tmp_path, samples)
    write_split("packed", samples, tmp_path)
    names = open_packed(tmp_path, "train").index.names
    assert [names[n] for n in range(17)] == [sample.name for sample in samples]


def test_what_was_broken_off_is_not_gone_on_with_when_it_is_another_file(tmp_path):
    samples = make_samples(17)
    writer = break_off("packed", tmp_path, samples)
    assert writer.count_whole_shards() == 2
    for changed in ({"count": 16}, {"classes": ("a", "b", "c")}, {"raw": True}):
        other = make_writer("packed", tmp_path, **{"count": 17, **changed})
        assert other.count_whole_shards() == 0
    part = tmp_path / "train.phx.part"
    part.write_bytes(part.read_bytes()[:300])
    assert writer.count_whole_shards() == 0
    write_split("packed", samples, tmp_path)
    write_split("packed", samples, tmp_path / "whole")
    assert (tmp_path / "train.phx").read_bytes() == (tmp_path / "whole/train.phx").read_bytes()


def test_a_damaged_record_is_told_with_the_way_out(tmp_path):
    writer = break_off("packed", tmp_path, make_samples(17))
    writer.shard_path(1).write_bytes(b"no record")
    with pytest.raises(DataError, match=r"blocks-train/000001: is damaged; remove .* build again"):
        write_split("packed", make_samples(17), tmp_path)


# --- shards ---


@pytest.mark.parametrize(("to", "open_split"), [("tar", open_tar), ("tfrecord", open_tfrecord)])
def test_an_undecodable_image_is_kept_to_be_named_later(tmp_path, to, open_split):
    write_split(to, [undecodable()], tmp_path)
    assert open_split(tmp_path, "train").read_encoded(0) == undecodable().data


def test_a_class_name_of_two_lines_is_refused(tmp_path):
    for to in ("tar", "tfrecord"):
        with pytest.raises(DataError, match=r"'a\\nb' cannot be a line of this file; rename"):
            write_split(to, make_samples(3), tmp_path, classes=("a\nb", "c", "d"))


@pytest.mark.parametrize("classes", [("0:cat", "1:dog", "2:cow"), ("0:background", "1\ta", "2:b")])
def test_class_names_that_begin_with_a_number_keep_it(tmp_path, classes):
    for to, open_split in (("tar", open_tar), ("tfrecord", open_tfrecord)):
        write_split(to, make_samples(3), tmp_path / to, classes=classes)
        source = open_split(tmp_path / to, "train")
        assert source.classes == classes and not any(map(source.fault, range(3)))


def test_every_format_says_what_it_stores():
    assert {to for to, writer in OUTPUT_FORMATS.items() if writer.only_jpeg} == {
        "tfrecord",
        "packed",
    }
    assert {to for to, writer in OUTPUT_FORMATS.items() if writer.takes_shards} == {
        "tar",
        "tfrecord",
        "parquet",
    }
