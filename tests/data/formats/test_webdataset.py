import io
import json
import os
import tarfile

import pytest

from phalanx.data.formats.decode import BadImage
from phalanx.data.formats.webdataset import SHARD_FILES, open_tar
from phalanx.errors import DataError
from small_samples import BOX, CLASSES, encode, make_samples, write_split

JPEG = encode("RGB", "JPEG")


def write_both(folder, *, train=10, valid=5):
    """Shards of at most four images, without a promise of how many there are."""
    for split, count in (("train", train), ("valid", valid)):
        samples = make_samples(count, boxes=True)
        write_split("tar", samples, folder, split, shards=-(-count // 4))
    (folder / "metadata.json").unlink()
    return folder


def write_members(path, members, *, form=tarfile.PAX_FORMAT):
    """A tar file of (name, content), or of TarInfo for what is no regular file."""
    with tarfile.open(path, "w", format=form) as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            name, data = member
            facts = tarfile.TarInfo(name)
            facts.size = len(data)
            tar.addfile(facts, io.BytesIO(data))
    return path


def strange(name, kind, target=""):
    facts = tarfile.TarInfo(name)
    facts.type, facts.linkname = kind, target
    return facts


def test_what_is_written_is_read_back_unchanged(tmp_path):
    write_both(tmp_path)
    samples = make_samples(10, boxes=True)
    source = open_tar(tmp_path, "train")
    assert len(source) == 10 and source.classes == CLASSES
    assert source.labels.tolist() == [sample.label for sample in samples]
    for number, sample in enumerate(samples):
        assert source.read_encoded(number) == sample.data and source.box(number) == sample.box
        assert source.name(number) == f"train-{number // 4:06}.tar:{sample.name}"
        assert source.read(number).shape == (16, 20, 3)
    assert open_tar(tmp_path, "valid").name(4).startswith("validation-000001.tar:")


def test_another_tool_reads_our_shards(tmp_path):
    write_both(tmp_path)
    with tarfile.open(tmp_path / "train-000000.tar") as tar:
        members = tar.getmembers()
        assert [member.name for member in members[:6]] == [
            "00000000.jpg",
            "00000000.cls",
            "00000000.json",
            "00000001.jpg",
            "00000001.cls",
            "00000001.json",
        ]
        assert members[9].name == "00000003.png"
        assert {(m.mtime, m.uid, m.gid, m.mode, m.uname) for m in members} == {(0, 0, 0, 0o644, "")}
        assert tar.extractfile("00000001.cls").read() == b"1"
        assert json.load(tar.extractfile("00000001.json"))["bbox"] == list(BOX)
    with tarfile.open(tmp_path / "train-000001.tar") as tar:
        assert tar.getnames()[0] == "00000004.jpg"


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_long_names_of_every_tar_are_read(tmp_path, form):
    folder = f"{'long' * 20}/{'name' * 15}"
    if form != tarfile.USTAR_FORMAT:
        folder = f"{'lög' * 80}/{folder}"
    members = [
        (f"{folder}/a.JPEG", JPEG),
        (f"{folder}/a.cls", b" 3\n"),
        ("short.jpg", JPEG),
        ("short.cls", b"0"),
    ]
    write_members(tmp_path / "train-000000.tar", members, form=form)
    source = open_tar(tmp_path, "train")
    assert source.name(0) == f"train-000000.tar:{folder}/a.JPEG"
    assert source.labels.tolist() == [3, 0] and source.read_encoded(0) == JPEG
    assert source.name(1) == "train-000000.tar:short.jpg"
    assert source.classes == ("class0000", "class0001", "class0002", "class0003")


def test_half_a_letter_in_json_is_shown_by_its_number(tmp_path):
    members = [
        *[("a.jpg", JPEG), ("a.json", rb'{"label": 0, "filename": "a\ud800.jpg"}')],
        *[("b.jpg", JPEG), ("b.json", rb'{"label": "\ud800"}')],
    ]
    write_members(tmp_path / "train-000000.tar", members)
    (tmp_path / "metadata.json").write_text(r'{"classes": ["one", "\udfff"]}')
    source = open_tar(tmp_path, "train")
    assert source.classes == ("one", r"\udfff")
    assert source.name(0) == r"train-000000.tar:a\ud800.jpg"
    assert source.name(1) == r"train-000000.tar:b.jpg (class '\ud800')"
    (tmp_path / "metadata.json").write_text('{"classes": 5}')
    assert open_tar(tmp_path, "train").classes == ("class0000",)


def test_labels_and_boxes_may_come_as_json(tmp_path):
    boxes = [[0.5, 0.25, 0.75, 0.5], [0.25, 0.5, 0.5, 1.0]]
    members = [
        strange("./", tarfile.DIRTYPE),
        ("./b.json", json.dumps({"label": 1, "bbox": boxes}).encode()),
        ("./b.png", encode("RGB", "PNG")),
        ("./._b.png", b"left by another system"),
        ("./a.jpg", JPEG),
        ("./a.json", b'{"cls": "0", "bbox": []}'),
        ("./c.jpg", JPEG),
        ("./c.json", b"2"),
    ]
    write_members(tmp_path / "train-000000.tar", members)
    source = open_tar(tmp_path, "train")
    assert source.labels.tolist() == [1, 0, 2]
    assert source.box(0) == (0.25, 0.25, 0.75, 1.0) and source.box(1) is None
    assert source.name(1) == "train-000000.tar:./a.jpg"


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (strange("a.jpg", tarfile.SYMTYPE, "/etc/passwd"), "'a.jpg' is a symbolic link"),
        (strange("a.jpg", tarfile.LNKTYPE, "b.jpg"), "'a.jpg' is a link"),
        (strange("a", tarfile.CHRTYPE), "'a' is a device"),
        (strange("a", tarfile.BLKTYPE), "'a' is a device"),
        (strange("a", tarfile.FIFOTYPE), "'a' is a pipe"),
        (strange("a", b"S"), "'a' is a sparse file"),
        (strange("a", b"Z"), "'a' is of unknown kind"),
        (("/etc/a.jpg", JPEG), "'/etc/a.jpg' is named outside"),
        (("a/../../b.jpg", JPEG), "'a/../../b.jpg' is named outside"),
        (strange("../", tarfile.DIRTYPE), r"'\.\./?' is named outside"),
    ],
)
def test_what_has_no_place_in_data_is_refused(tmp_path, member, message):
    write_members(tmp_path / "train-000000.tar", [("a.jpg", JPEG), ("a.cls", b"0"), member])
    with pytest.raises(DataError, match=rf"train-000000.tar: member {message}"):
        open_tar(tmp_path, "train")


def test_a_name_that_pax_hides_is_refused_too(tmp_path):
    facts = tarfile.TarInfo("harmless.jpg")
    facts.pax_headers = {"path": "/etc/" + "a" * 200}
    write_members(tmp_path / "train-000000.tar", [facts])
    with pytest.raises(DataError, match="member '/etc/aaa"):
        open_tar(tmp_path, "train")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.cls", b"0"), ("a.pth", b"")], "sample 'a': has no image, only cls, pth"),
        ([("a.jpg", JPEG), ("a.json", b"{")], "sample 'a': its json cannot be read"),
        ([("a.jpg", JPEG), ("a.json", b"[" * 100_000)], "sample 'a': its json cannot be read"),
        (
            [("a.jpg", JPEG), ("a.json", b'{"label":0,"bbox":[1%s,0,1,1]}' % (b"0" * 400))],
            "its bbox",
        ),
        ([("a.jpg", JPEG), ("a.json", b'{"label":0,"bbox":[1,2]}')], "its bbox is"),
        ([("a.jpg", JPEG), ("a.json", b'{"label":0,"bbox":{"x":1}}')], "its bbox is"),
        ([("a.jpg", JPEG), ("a.cls", b"0"), ("a.jpg", JPEG)], "'a.jpg' is in the file twice"),
        ([], "has no images"),
    ],
)
def test_a_sample_that_lacks_something_is_named(tmp_path, members, message):
    write_members(tmp_path / "train-000000.tar", members)
    with pytest.raises(DataError, match=rf"train-000000.tar: .*{message}"):
        open_tar(tmp_path, "train")


LABELS = {
    "none.jpg": ([("none.jpg", JPEG)], "(class None): its class is not a whole number"),
    "word.jpg": (
        [("word.jpg", JPEG), ("word.cls", b"cat")],
        "(class 'cat'): its class is not a whole number",
    ),
    "true.jpg": (
        [("true.jpg", JPEG), ("true.json", b'{"label": true}')],
        "(class True): its class is not a whole number",
    ),
    "vast.jpg": (
        [("vast.jpg", JPEG), ("vast.cls", b"9" * 100)],
        f"(class '{'9' * 39}): its class is not a whole number",
    ),
    "minus.jpg": (
        [("minus.jpg", JPEG), ("minus.cls", b"-1")],
        "label -1, but there are 2 classes, counted from 0",
    ),
    "large.jpg": (
        [("large.jpg", JPEG), ("large.cls", b"1000000")],
        "label 1000000, but there are 2 classes, counted from 0",
    ),
}
GOOD = [("a.jpg", JPEG), ("a.cls", b"0"), ("b.jpg", JPEG), ("b.cls", b"1")]


def why_bad(source, number):
    with pytest.raises(BadImage) as caught:
        source.read(number)
    return str(caught.value)


@pytest.mark.parametrize("name", LABELS)
def test_a_label_that_no_class_has_is_one_bad_image(tmp_path, name):
    members, why = LABELS[name]
    write_members(tmp_path / "train-000000.tar", GOOD + members)
    source = open_tar(tmp_path, "train")
    assert len(source) == 3 and source.classes == ("class0000", "class0001")
    told = why_bad(source, 2)
    assert told.startswith(f"train-000000.tar:{name}") and told.endswith(f"{why}; fix it")
    assert source.read(1).shape == (16, 20, 3)


def test_images_beyond_a_list_of_classes_are_bad(tmp_path):
    write_both(tmp_path)
    (tmp_path / "classes.txt").write_text("one\ntwo\n")
    source = open_tar(tmp_path, "train")
    assert source.classes == ("one", "two")
    assert [number for number in range(10) if source.fault(number)] == [2, 5, 8]
    assert why_bad(source, 2).endswith("label 2, but there are 2 classes, counted from 0; fix it")


def test_a_split_without_one_usable_image_is_refused(tmp_path):
    members, _ = LABELS["word.jpg"]
    write_members(tmp_path / "train-000000.tar", members)
    with pytest.raises(
        DataError, match=r"images can be used .1 in all., the first is:\n.*word.jpg \(class "
    ):
        open_tar(tmp_path, "train")


def test_a_truncated_shard_loses_what_follows_wherever_it_is_cut(tmp_path):
    more = [("c.jpg", JPEG), ("c.cls", b"0")]
    shard = write_members(tmp_path / "train-000000.tar", GOOD + more)
    whole = shard.read_bytes()
    image = 512 + len(JPEG) + -len(JPEG) % 512
    begin = 2 * (image + 1024)
    after_image = begin + image
    for cut, place, left in (
        (begin, begin, 2),
        (begin + 100, begin, 2),
        (begin + 522, begin, 2),
        (after_image - 512, begin, 2),
        (after_image, after_image, 2),
        (after_image + 100, after_image, 2),
        (after_image + 512, after_image, 2),
        (after_image + 1024, after_image + 1024, 3),
    ):
        shard.write_bytes(whole[:cut])
        source = open_tar(tmp_path, "train")
        assert len(source) == left + 1 and source.labels.tolist()[:2] == [0, 1]
        assert why_bad(source, left) == (
            f"train-000000.tar: from byte {place:,} on: the shard is truncated there and the rest "
            "is lost; fetch it again"
        )
        assert source.read(left - 1).shape == (16, 20, 3) and len(source.classes) == 2


def test_a_damaged_header_in_the_middle_loses_what_follows(tmp_path):
    shard = write_members(tmp_path / "train-000000.tar", [*GOOD, ("c.jpg", JPEG), ("c.cls", b"0")])
    whole = shard.read_bytes()
    place = 2 * (512 + len(JPEG) + -len(JPEG) % 512 + 1024)
    for byte in (place, place + 148):  # in the name, and a checksum that is no number
        data = bytearray(whole)
        data[byte] = ord("x")
        shard.write_bytes(data)
        source = open_tar(tmp_path, "train")
        assert len(source) == 3
        told = f"train-000000.tar: from byte {place:,} on: the shard is damaged there"
        assert why_bad(source, 2).startswith(told)


def test_a_link_in_a_shard_that_is_cut_off_is_refused_as_well(tmp_path):
    link = strange("c.jpg", tarfile.SYMTYPE, "/etc/passwd")
    shard = write_members(tmp_path / "train-000000.tar", [*GOOD, link])
    shard.write_bytes(shard.read_bytes()[: 2 * (512 + len(JPEG) + -len(JPEG) % 512 + 1024) + 512])
    with pytest.raises(DataError, match="is a symbolic link"):
        open_tar(tmp_path, "train")


def test_a_promise_that_a_cut_shard_cannot_keep_is_told_with_the_place(tmp_path):
    write_both(tmp_path)
    (tmp_path / "metadata.json").write_text('{"train_length": 10}')
    shard = tmp_path / "train-000001.tar"
    shard.write_bytes(shard.read_bytes()[:600])
    with pytest.raises(
        DataError, match=r"lists 10 .* hold 6 \(lost: train-000001.tar: from byte 0"
    ):
        open_tar(tmp_path, "train")


def test_what_a_cut_shard_lost_does_not_count_as_an_image(tmp_path):
    write_both(tmp_path)
    (tmp_path / "metadata.json").write_text('{"train_length": 10}')
    shard = tmp_path / "train-000002.tar"
    whole = shard.read_bytes().rstrip(b"\0")
    shard.write_bytes(whole + bytes(-len(whole) % 512))  # without its end mark
    assert len(open_tar(tmp_path, "train")) == 11
    shard.write_bytes(whole[:-2000])
    with pytest.raises(DataError, match=r"lists 10 .* hold 9 \(lost: train-000002.tar: from byte"):
        open_tar(tmp_path, "train")


@pytest.mark.parametrize("prefix", ["validation", "val", "valid", "imagenet1k-validation"])
def test_the_validation_split_has_several_names(tmp_path, prefix):
    write_both(tmp_path)
    for path in list(tmp_path.glob("validation-*")):
        path.rename(tmp_path / path.name.replace("validation", prefix))
    assert SHARD_FILES.exist_in(tmp_path) and len(open_tar(tmp_path, "valid")) == 5


def test_a_missing_shard_is_named(tmp_path):
    write_both(tmp_path)
    (tmp_path / "train-000001.tar").unlink()
    with pytest.raises(DataError, match=r"train-000001\.tar missing, 3 shards expected"):
        open_tar(tmp_path, "train")


def test_metadata_tells_when_the_last_shard_is_missing(tmp_path):
    write_both(tmp_path)
    (tmp_path / "metadata.json").write_text('{"train_length": 10, "validation_length": 9}')
    assert len(open_tar(tmp_path, "train")) == 10
    with pytest.raises(DataError, match="lists 9 images, but the shards of valid hold 5"):
        open_tar(tmp_path, "valid")
    (tmp_path / "metadata.json").write_text("{")
    with pytest.raises(DataError, match=r"metadata.json: cannot be read"):
        open_tar(tmp_path, "train")
    (tmp_path / "metadata.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"metadata.json: cannot be read"):
        open_tar(tmp_path, "train")


def test_without_names_training_says_how_many_classes_there_are(tmp_path):
    write_both(tmp_path, valid=2)
    (tmp_path / "classes.txt").unlink()
    assert open_tar(tmp_path, "valid").classes == ("class0000", "class0001", "class0002")
    members = [("a.jpg", JPEG), ("a.cls", b"3")]
    write_members(tmp_path / "validation-000000.tar", members)
    with pytest.raises(DataError, match=r"a\.jpg: label 3, but there are 3 classes"):
        open_tar(tmp_path, "valid")


def test_ordinary_tar_files_are_no_shards(tmp_path):
    for name in ("ILSVRC2012_img_train.tar", "train.tar", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    assert not SHARD_FILES.exist_in(tmp_path)
    with pytest.raises(DataError, match=r"no shard such as train-000000\.tar.*--data-dir"):
        open_tar(tmp_path, "train")


def test_the_index_is_kept_and_made_anew_when_a_shard_changes(tmp_path):
    write_both(tmp_path)
    open_tar(tmp_path, "train")
    kept = tmp_path / ".phalanx" / "tar-train.index"
    first = kept.stat().st_ino
    open_tar(tmp_path, "train")
    assert kept.stat().st_ino == first
    os.utime(tmp_path / "train-000002.tar", ns=(0, 0))
    open_tar(tmp_path, "train")
    assert kept.stat().st_ino != first
    write_members(tmp_path / "train-000002.tar", [("a.jpg", JPEG), ("a.cls", b"2")])
    assert len(open_tar(tmp_path, "train")) == 9
