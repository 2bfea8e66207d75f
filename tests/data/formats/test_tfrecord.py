import multiprocessing
import os
import shutil
import struct

import numpy as np
import pytest

from phalanx.data.convert.shard_writers import make_example
from phalanx.data.formats import shards
from phalanx.data.formats.decode import BadImage, EncodedImage
from phalanx.data.formats.index import TRUNCATED_SHARD
from phalanx.data.formats.tfrecord import (
    SHARD_FILES,
    open_tfrecord,
    scan_shard,
)
from phalanx.data.formats.tfrecord_wire import (
    crc32c,
    mask_crc,
    read_example,
    read_floats,
    read_integers,
    read_records,
    read_spans,
    write_example,
    write_record,
)
from phalanx.data.pillow_image import read_image_header
from phalanx.errors import DataError
from small_samples import BOX, CLASSES, encode, make_samples, write_split


def write_both(folder, *, train=10, valid=5, boxes=False):
    """Three shards of either split."""
    for split, count in (("train", train), ("valid", valid)):
        write_split("tfrecord", make_samples(count, boxes=boxes), folder, split, shards=3)
    return folder


def write_examples(path, examples):
    with path.open("wb") as file:
        for example in examples:
            write_record(file, example)


def example_of(label, **more):
    features = {"image/encoded": [encode("RGB", "JPEG")], "image/class/label": [label]}
    return write_example(
        {**features, **{f"image/{k.replace('_', '/')}": v for k, v in more.items()}}
    )


@pytest.mark.parametrize(
    ("data", "crc"),  # RFC 3720, appendix B.4, and the check value of the CRC catalogues
    [
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_crc32c_gives_the_published_answers(data, crc):
    assert crc32c(data) == crc


def test_a_checksum_is_masked_by_rotation_and_a_constant():
    assert mask_crc(0) == 0xA282EAD8
    assert mask_crc(1 << 15) == 0xA282EAD9
    assert mask_crc(1) == (0xA282EAD8 + (1 << 17)) & 0xFFFFFFFF


def test_what_is_written_is_read_back(tmp_path):
    write_both(tmp_path, boxes=True)
    samples = make_samples(10, boxes=True)
    source = open_tfrecord(tmp_path, "train")
    assert len(source) == 10 and source.classes == CLASSES
    assert source.labels.tolist() == [sample.label for sample in samples]
    for number, sample in enumerate(samples):
        assert source.name(number).endswith(f"-of-00003:{sample.name}")
        assert source.box(number) == sample.box
        difference = (
            source.read(number).astype(int) - EncodedImage(sample.data, sample.name).decode()
        )
        assert np.abs(difference).max() <= 3, sample.name
    assert source.read_encoded(0) == samples[0].data and source.read_encoded(1) == samples[1].data


def test_other_than_plain_jpeg_becomes_rgb_jpeg(tmp_path):
    write_both(tmp_path)
    source = open_tfrecord(tmp_path, "train")
    headers = [read_image_header(source.read_encoded(number)) for number in range(4)]
    assert [(header.format, header.mode) for header in headers] == [
        ("JPEG", "RGB"),
        ("JPEG", "L"),
        ("JPEG", "RGB"),
        ("JPEG", "RGB"),
    ]


def test_a_record_has_imagenets_keys():
    sample = make_samples(2, boxes=True)[1]
    data = make_example(sample, "dög")
    features = read_example(data)
    assert read_integers(data, features["image/class/label"]) == [sample.label + 1]
    assert read_integers(data, features["image/height"]) == [16]
    assert read_integers(data, features["image/width"]) == [20]
    assert read_integers(data, features["image/channels"]) == [3]
    texts = {
        key: data[slice(*read_spans(data, features[f"image/{key}"])[0])].decode()
        for key in ("class/text", "class/synset", "colorspace", "format", "filename")
    }
    assert texts == {
        "class/text": "dög",
        "class/synset": "dög",
        "colorspace": "RGB",
        "format": "JPEG",
        "filename": sample.name,
    }
    sides = [
        read_floats(data, features[f"image/object/bbox/{s}"])
        for s in ("xmin", "ymin", "xmax", "ymax")
    ]
    assert sides == [[side] for side in BOX]


def test_lists_are_read_packed_and_one_by_one():
    unpacked_ints = bytes([0x08, 5, 0x08, 0x96, 0x01])  # field 1, varint: 5, 150
    unpacked_floats = b"".join(b"\x0d" + struct.pack("<f", x) for x in (0.5, -2.0))

    def example(kind, content):
        feature = bytes([kind << 3 | 2, len(content)]) + content
        entry = b"\x0a\x01k" + bytes([0x12, len(feature)]) + feature
        features = bytes([0x0A, len(entry)]) + entry
        return bytes([0x0A, len(features)]) + features

    data = example(3, unpacked_ints)
    assert read_integers(data, read_example(data)["k"]) == [5, 150]
    data = example(2, unpacked_floats)
    assert read_floats(data, read_example(data)["k"]) == [0.5, -2.0]
    data = write_example({"k": [5, -1, 2**40], "x": [0.25, 3.0]})
    assert read_integers(data, read_example(data)["k"]) == [5, -1, 2**40]
    assert read_floats(data, read_example(data)["x"]) == [0.25, 3.0]
    assert read_integers(data, read_example(data)["x"]) == []


def test_several_boxes_give_their_hull(tmp_path):
    boxes = {
        "object_bbox_xmin": [0.5, 0.25],
        "object_bbox_xmax": [0.75, 0.5],
        "object_bbox_ymin": [0.125, 0.5],
        "object_bbox_ymax": [0.25, 1.0],
    }
    write_examples(tmp_path / "train-00000-of-00001", [example_of(1, **boxes), example_of(2)])
    source = open_tfrecord(tmp_path, "train")
    assert source.box(0) == (0.25, 0.125, 0.75, 1.0) and source.box(1) is None


# --- damage ---


def records_of(path):
    return [(record.begin, len(record.data)) for record in read_records(path)]


@pytest.mark.parametrize("place", [-9, -2])
def test_a_flipped_bit_in_a_length_is_found_and_located(tmp_path, place):
    write_both(tmp_path)
    shard = tmp_path / "train-00001-of-00003"
    begin, _ = records_of(shard)[2]
    flip_bit(shard, begin + place)
    source = open_tfrecord(tmp_path, "train")
    check_lost(
        source, 5, f"train-00001-of-00003: from byte {begin - 12:,} on: the shard is damaged"
    )
    assert len(source) == 10 and source.read(4).shape == source.read(6).shape == (16, 20, 3)


def check_lost(source, number, message):
    """One entry stands for all that is lost, and says so whichever way it is asked for."""
    for ask in (source.read_encoded, source.image, source.read):
        with pytest.raises(BadImage) as caught:
            ask(number)
        assert str(caught.value) == f"{message} there and the rest is lost; fetch it again"
    assert (source.index.sizes < 0).sum() == 1
    assert source.classes == CLASSES


def flip_bit(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("from_begin", [0, 40, None])  # None: the checksum itself
def test_a_record_whose_data_is_damaged_is_one_bad_image(tmp_path, from_begin):
    write_both(tmp_path)
    shard = tmp_path / "train-00001-of-00003"
    begin, length = records_of(shard)[1]
    flip_bit(shard, begin + (length + 2 if from_begin is None else from_begin))
    source = open_tfrecord(tmp_path, "train")
    assert len(source) == 10 and source.classes == CLASSES
    why = (
        rf"train-00001-of-00003:record 1 at byte {begin - 12:,}: the checksum of its data does not"
    )
    with pytest.raises(BadImage, match=why):
        source.read_encoded(4)
    with pytest.raises(BadImage, match=why):
        source.image(4)
    assert source.read(3).shape == source.read(5).shape == (16, 20, 3)


@pytest.mark.parametrize("cut", [1, 4, 200])
def test_a_truncated_shard_loses_what_follows(tmp_path, cut):
    write_both(tmp_path)
    shard = tmp_path / "train-00002-of-00003"
    begin, _ = records_of(shard)[-1]
    shard.write_bytes(shard.read_bytes()[:-cut])
    source = open_tfrecord(tmp_path, "train")
    check_lost(
        source, 9, f"train-00002-of-00003: from byte {begin - 12:,} on: the shard is truncated"
    )
    assert source.read(8).shape == (16, 20, 3)


def test_a_shard_cut_early_loses_several_images_and_counts_one(tmp_path):
    write_both(tmp_path)
    shard = tmp_path / "train-00002-of-00003"
    begin, _ = records_of(shard)[1]
    shard.write_bytes(shard.read_bytes()[: begin + 20])
    source = open_tfrecord(tmp_path, "train")
    assert len(source) == 8 and source.labels.tolist() == [0, 1, 2, 0, 1, 2, 0, -1]
    check_lost(
        source, 7, f"train-00002-of-00003: from byte {begin - 12:,} on: the shard is truncated"
    )


def test_a_shard_cut_in_the_head_of_a_record_is_named(tmp_path):
    write_both(tmp_path)
    shard = tmp_path / "train-00002-of-00003"
    begin, _ = records_of(shard)[-1]
    shard.write_bytes(shard.read_bytes()[: begin - 5])
    source = open_tfrecord(tmp_path, "train")
    check_lost(
        source, 9, f"train-00002-of-00003: from byte {begin - 12:,} on: the shard is truncated"
    )


def test_shards_of_which_nothing_is_left_are_refused(tmp_path):
    (tmp_path / "train-00000-of-00001").write_bytes(b"<html>no such file, said the server</html>")
    with pytest.raises(
        DataError, match=r"images can be used .1 in all., the first is:\n.*from byte 0 on: "
    ):
        open_tfrecord(tmp_path, "train")


@pytest.mark.parametrize("label", [0, -1, -(2**63), 4, 2**40])
@pytest.mark.parametrize("listed", [True, False])
def test_a_label_that_no_class_has_is_one_bad_image(tmp_path, label, listed):
    wrong = example_of(label, filename=[b"wrong.jpg"], class_synset=[b"n9"])
    examples = [*(example_of(n, class_synset=[b"n%d" % n]) for n in (1, 2, 3)), wrong]
    if label != 4:  # what such images call their class does not matter
        examples.append(example_of(label, class_synset=[b"n8"]))
    write_examples(tmp_path / "train-00000-of-00001", examples)
    if listed:
        (tmp_path / "labels.txt").write_text("n1\nn2\nn3\n")
    source = open_tfrecord(tmp_path, "train")
    if label == 4 and not listed:  # the record names its class
        assert source.classes == ("n1", "n2", "n3", "n9")
        return
    assert source.classes == ("n1", "n2", "n3") and len(source) == len(examples)
    shown = max(label, 1 - 2**63)
    told = f"wrong.jpg: label {shown}, but there are 3 classes, counted from 1; fix it"
    with pytest.raises(BadImage) as caught:
        source.read(3)
    assert str(caught.value) == f"train-00000-of-00001:{told}"
    assert source.read(2).shape == (16, 20, 3)


def test_a_validation_label_that_training_never_had_is_one_bad_image(tmp_path):
    write_examples(tmp_path / "train-00000-of-00001", [example_of(1), example_of(2)])
    write_examples(tmp_path / "validation-00000-of-00001", [example_of(2), example_of(5)])
    source = open_tfrecord(tmp_path, "valid")
    assert source.classes == ("class0000", "class0001") and source.fault(0) == 0
    with pytest.raises(BadImage, match="label 5, but there are 2 classes, counted from 1"):
        source.read_encoded(1)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (b"\x0a\xff", "not an Example message"),
        (b"\x0a\x05ab", "reaches past the end"),
        (b"\x0f\x01", "not an Example message"),
        (write_example({"image/encoded": [b"x"]}), "one image/class/label, has 1 and 0"),
        (example_of(1, object_bbox_xmin=[0.5]), "a box lacks a side"),
    ],
)
def test_a_strange_record_is_located(tmp_path, example, message):
    write_examples(tmp_path / "train-00000-of-00001", [example_of(1), example])
    with pytest.raises(DataError, match=rf"train-00000-of-00001: record 1 at byte .*{message}"):
        open_tfrecord(tmp_path, "train")


def test_missing_shards_are_named(tmp_path):
    write_both(tmp_path)
    (tmp_path / "train-00001-of-00003").unlink()
    with pytest.raises(DataError, match="train-00001-of-00003 missing, 3 shards expected"):
        open_tfrecord(tmp_path, "train")


def test_a_shard_that_cannot_be_opened_is_named(tmp_path):
    write_both(tmp_path)
    shard = tmp_path / "train-00001-of-00003"
    shard.unlink()
    shard.symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"train-00001-of-00003: cannot be read \(No such file"):
        open_tfrecord(tmp_path, "train")
    shard.unlink()
    shard.mkdir()
    with pytest.raises(DataError, match=r"train-00001-of-00003: cannot be read \(a folder, not"):
        open_tfrecord(tmp_path, "train")


@pytest.mark.parametrize("stray", ["train-00003-of-00009", "other-train-00000-of-00003"])
def test_shards_of_two_sets_are_not_mixed(tmp_path, stray):
    write_both(tmp_path)
    (tmp_path / stray).write_bytes(b"")
    with pytest.raises(DataError, match="shards of several datasets"):
        open_tfrecord(tmp_path, "train")


def test_a_folder_without_shards_says_what_it_wants(tmp_path):
    assert not SHARD_FILES.exist_in(tmp_path)
    with pytest.raises(DataError, match=r"no shard such as validation-00000-of-00128.*--data-dir"):
        open_tfrecord(tmp_path, "valid")
    assert SHARD_FILES.exist_in(write_both(tmp_path))


# --- classes ---


def test_classes_come_from_synsets_where_no_list_lies_there(tmp_path):
    write_both(tmp_path)
    (tmp_path / "labels.txt").unlink()
    assert open_tfrecord(tmp_path, "valid").classes == CLASSES


def test_classes_that_nobody_names_are_numbered(tmp_path):
    write_examples(tmp_path / "train-00000-of-00001", [example_of(1), example_of(3)])
    write_examples(tmp_path / "validation-00000-of-00001", [example_of(2)])
    assert open_tfrecord(tmp_path, "train").labels.tolist() == [0, 2]
    assert open_tfrecord(tmp_path, "valid").classes == ("class0000", "class0001", "class0002")


@pytest.mark.parametrize(
    ("label", "synset", "message"),
    [(1, b"n2", "class 0 is 'n2' here and 'n1' in training"), (2, b"n2", "'nothing' in training")],
)
def test_splits_that_disagree_on_classes_are_refused(tmp_path, label, synset, message):
    write_examples(tmp_path / "train-00000-of-00001", [example_of(1, class_synset=[b"n1"])])
    other = example_of(label, class_synset=[synset])
    write_examples(tmp_path / "validation-00000-of-00001", [other])
    with pytest.raises(DataError, match=message):
        open_tfrecord(tmp_path, "valid")


def test_one_class_with_two_names_is_refused(tmp_path):
    examples = [example_of(1, class_synset=[name]) for name in (b"n1", b"n2")]
    write_examples(tmp_path / "train-00000-of-00001", examples)
    with pytest.raises(DataError, match="calls class 0 'n2', but it was 'n1' before"):
        open_tfrecord(tmp_path, "train")


def test_images_beyond_a_list_of_classes_are_bad(tmp_path):
    write_both(tmp_path)
    (tmp_path / "labels.txt").write_text("one\ntwo\n")
    source = open_tfrecord(tmp_path, "train")
    assert source.classes == ("one", "two")
    faults = [number for number in range(10) if source.fault(number)]
    assert faults == [2, 5, 8]
    with pytest.raises(BadImage, match=r"label 3, but there are 2 classes, counted from 1"):
        source.read_encoded(2)
    assert source.fingerprint()["images"] == 10


def test_a_numbered_list_loses_its_numbers_and_its_background(tmp_path):
    write_both(tmp_path)
    (tmp_path / "labels.txt").write_text("0:background\n1:one\n2:two\n3:three\n")
    assert open_tfrecord(tmp_path, "train").classes == ("one", "two", "three")


# --- the kept index ---


def test_the_index_is_kept_and_made_anew_when_a_shard_changes(tmp_path):
    write_both(tmp_path)
    open_tfrecord(tmp_path, "train")
    kept = tmp_path / ".phalanx" / "tfrecord-train.index"
    first = kept.stat().st_ino
    open_tfrecord(tmp_path, "train")
    assert kept.stat().st_ino == first
    shard = tmp_path / "train-00000-of-00003"
    os.utime(shard, ns=(0, 0))
    assert len(open_tfrecord(tmp_path, "train")) == 10
    assert kept.stat().st_ino != first
    write_examples(shard, [example_of(3)])
    assert open_tfrecord(tmp_path, "train").labels.tolist() == [2, 0, 1, 2, 0, 1, 2, 0]


def test_an_index_that_cannot_be_kept_says_why_and_is_known_by_the_same_hash(tmp_path, monkeypatch):
    write_both(tmp_path / "set")
    (tmp_path / "set/labels.txt").write_text("one\ntwo\n")  # sets images aside after the hash
    kept = open_tfrecord(tmp_path / "set", "train")
    assert kept.index.save_error == ""
    shutil.rmtree(tmp_path / "set/.phalanx")
    (tmp_path / "set/.phalanx").write_text("a file where a folder should be")
    (tmp_path / "cache").write_text("another")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    unsaved = open_tfrecord(tmp_path / "set", "train")
    assert unsaved.index.save_error == "Not a directory"
    assert unsaved.fingerprint() == kept.fingerprint() and unsaved.fault(2)


def test_many_processes_find_the_same_as_one(tmp_path, monkeypatch):
    write_both(tmp_path)
    paths = [tmp_path / f"train-{number:05}-of-00003" for number in range(3)]
    paths[2].write_bytes(b"cut")
    alone = [scan_shard(path) for path in paths]
    monkeypatch.setattr(shards, "_SMALL_SCAN", 0)
    monkeypatch.setattr(shards, "count_cores", lambda: 2)
    together = shards.scan_shards(scan_shard, paths)
    for ours, its in zip(together, alone, strict=True):
        assert ours.rows["offset"].tolist() == its.rows["offset"].tolist()
    assert together[2].rows["size"].tolist() == [TRUNCATED_SHARD]


def scan_or_die(path):
    """Dies wherever it is started as a process, as a script without a main guard does."""
    if multiprocessing.parent_process() is not None:
        os._exit(1)
    return scan_shard(path)


def test_where_no_process_can_be_started_one_scans_alone(tmp_path, monkeypatch):
    write_both(tmp_path)
    paths = [tmp_path / f"train-{number:05}-of-00003" for number in range(3)]
    monkeypatch.setattr(shards, "_SMALL_SCAN", 0)
    monkeypatch.setattr(shards, "count_cores", lambda: 2)
    assert [len(scan.rows) for scan in shards.scan_shards(scan_or_die, paths)] == [3, 3, 4]


def test_shards_may_lie_in_a_folder_of_their_split(tmp_path):
    write_both(tmp_path)
    for word in ("train", "validation"):
        (tmp_path / word).mkdir()
        for path in list(tmp_path.glob(f"{word}-*")):
            path.rename(tmp_path / word / path.name)
    assert SHARD_FILES.exist_in(tmp_path)
    source = open_tfrecord(tmp_path, "valid")
    assert source.name(0).startswith("validation/validation-00000-of-00003:")
    assert source.read(0).shape == (16, 20, 3)
