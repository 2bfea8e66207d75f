"""Each kind of thing that can be wrong with a set, planted once and found once."""

import io
import shutil
import struct

import numpy as np
import pytest
from PIL import Image

from phalanx.data.convert.build import BuildOptions, build_dataset
from phalanx.data.convert.sample import Sample
from phalanx.data.verify.near_duplicates import find_near_duplicates, group_equal, group_pairs
from phalanx.data.verify.verify import (
    EXACT_DUPLICATES,
    IN_BOTH_SPLITS,
    MISSING_CLASS,
    NEAR_DUPLICATES,
    NEARLY_IN_BOTH_SPLITS,
    OUT_OF_RANGE,
    compute_manifest,
    verify_dataset,
)
from phalanx.errors import DataError
from phalanx.report.verify_page import render_page
from small_photos import encode, photo, write_photos
from small_samples import write_split


@pytest.fixture
def photos(tmp_path):
    return write_photos(tmp_path / "photos", {"train": 4, "val": 2})


def look(root):
    return verify_dataset(root, workers=1)


def found(result):
    """What was found at all, by kind."""
    return {kind: count for kind, count in result.totals.items() if count}


def test_a_clean_set_has_nothing_wrong(photos):
    result = look(photos)
    assert found(result) == {} and result.wrong == 0
    assert result.images == {"train": 12, "valid": 6}
    assert result.counts == {"train": [4, 4, 4], "valid": [2, 2, 2]}


def cut_in_the_middle(data):
    """A JPEG whose end mark comes early: decoders go on, with a complaint."""
    return data[: len(data) // 2] + b"\xff\xd9" + data[len(data) // 2 :]


def colour_as_cmyk(_data):
    return encode(photo(800, mode="CMYK"))


PLANTED = [
    ("zero-size", lambda data: b"", "the file is empty"),
    (
        "undecodable",
        lambda data: b"no image at all",
        "not a JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF or HEIC image",
    ),
    ("truncated", lambda data: data[:-100], "image file is truncated"),
    ("truncated", cut_in_the_middle, "Corrupt JPEG data"),
    ("wrong extension", lambda data: encode(photo(801), "PNG"), "is really a PNG"),
    ("CMYK", colour_as_cmyk, "has CMYK colours"),
    ("greyscale", lambda data: encode(photo(802, mode="L")), ""),
]


@pytest.mark.parametrize(("kind", "change", "why"), PLANTED)
def test_an_image_that_is_not_as_it_should_be_is_named(photos, kind, change, why):
    path = photos / "train/cat/cat 001.jpg"
    path.write_bytes(change(path.read_bytes()))
    result = look(photos)
    assert found(result) == {kind: 1}
    (place,) = result.single[kind]
    assert (place.name, place.split, place.label) == ("train/cat/cat 001.jpg", "train", "cat")
    assert place.why.startswith(why)
    assert result.wrong == (kind != "greyscale")


def test_an_image_that_cannot_be_opened_is_undecodable(photos):
    (photos / "val/cat/gone.jpg").symlink_to(photos / "nowhere.jpg")
    result = look(photos)
    assert found(result) == {"undecodable": 1}
    assert result.single["undecodable"][0].why == "No such file or directory"


def smaller_and_worse(data):
    image = Image.open(io.BytesIO(data))
    return encode(image.resize((80, 60)), quality=80)


@pytest.mark.parametrize(
    ("copy", "kind", "change"),
    [
        ("train/cat/copy.jpg", EXACT_DUPLICATES, lambda data: data),
        ("val/cat/copy.jpg", IN_BOTH_SPLITS, lambda data: data),
        ("train/cat/copy.jpg", NEAR_DUPLICATES, smaller_and_worse),
        ("val/cat/copy.jpg", NEARLY_IN_BOTH_SPLITS, smaller_and_worse),
    ],
)
def test_a_picture_that_lies_there_twice_is_found(photos, copy, kind, change):
    (photos / copy).write_bytes(change((photos / "train/cat/cat 002.jpg").read_bytes()))
    result = look(photos)
    assert found(result) == {kind: 1} and result.wrong == 1
    (group,) = result.groups[kind]
    assert sorted(place.name for place in group) == sorted(["train/cat/cat 002.jpg", copy])
    assert [place.why for place in group] == ["", ""]


def test_the_same_picture_with_two_labels_is_said_to_be_so(photos):
    shutil.copy(photos / "train/cat/cat 002.jpg", photos / "train/fish/copy.jpg")
    (group,) = look(photos).groups[EXACT_DUPLICATES]
    assert {place.why for place in group} == {"the same picture has another label"}


def test_a_class_that_a_split_does_without_is_told(photos):
    shutil.rmtree(photos / "val/fish")
    result = look(photos)
    assert found(result) == {MISSING_CLASS: 1} and result.missing == ["fish: no validation image"]


def test_images_that_cannot_be_read_are_of_no_class(photos, tmp_path):
    build_dataset(photos, tmp_path / "built", BuildOptions(to="tfrecord"), workers=1)
    (shard,) = (tmp_path / "built").glob("train-*")
    data = bytearray(shard.read_bytes())
    data[-30] ^= 1
    shard.write_bytes(data)  # the last image, of the last class
    counts = look(tmp_path / "built").counts
    assert counts == {"train": [4, 4, 3], "valid": [2, 2, 2]}
    for path in (photos / "val/fish").iterdir():
        path.write_bytes(b"")
    assert look(photos).missing == ["fish: no validation image"]


def test_a_label_beyond_the_classes_is_told(tmp_path):
    samples = [
        Sample(name=f"{n}.jpg", data=encode(photo(n)), label=label)
        for n, label in enumerate([0, 1, 7])
    ]
    for split in ("train", "valid"):
        some = (
            samples
            if split == "train"
            else [Sample(name=f"v{n}.jpg", data=encode(photo(50 + n)), label=n) for n in range(2)]
        )
        write_split("packed", some, tmp_path, split, classes=("a", "b"))
    result = look(tmp_path)
    assert found(result) == {OUT_OF_RANGE: 1}
    assert result.single[OUT_OF_RANGE][0].why == "label 7, but there are 2 classes"


def test_the_manifest_follows_the_content_and_not_the_form(photos, tmp_path):
    first = look(photos).manifest
    for to in ("tar", "tfrecord", "packed", "folder"):
        build_dataset(photos, tmp_path / to, BuildOptions(to=to), workers=1)
        assert look(tmp_path / to).manifest == first
    (photos / "train/cat/cat 000.jpg").rename(photos / "train/cat/first.jpg")
    renamed = look(photos).manifest
    (photos / "train/cat/first.jpg").rename(photos / "train/dög/first.jpg")
    moved = look(photos).manifest
    (photos / "train/dög/first.jpg").write_bytes(encode(photo(803)))
    assert len({first, renamed, moved, look(photos).manifest}) == 4


def test_the_manifest_does_not_follow_the_order():
    identities = np.random.default_rng(1).integers(0, 256, (3, 32), np.uint8)
    first = compute_manifest(("a", "b"), identities)
    assert compute_manifest(("a", "b"), identities[[2, 0, 1]]) == first
    assert compute_manifest(("a", "c"), identities) != first


def test_processes_find_the_same(photos):
    write_photos(photos, {"train": 20, "val": 8})
    shutil.copy(photos / "train/cat/cat 002.jpg", photos / "val/cat/copy.jpg")
    assert verify_dataset(photos, workers=2) == verify_dataset(photos, workers=1)


def test_what_is_handed_out_is_to_be_built_first(tmp_path):
    (tmp_path / "ILSVRC/Data/CLS-LOC/train/n00000001").mkdir(parents=True)
    with pytest.raises(DataError, match="as it is distributed; `phalanx data build` checks"):
        look(tmp_path)


# --- near duplicates ---


def test_every_pair_up_to_two_bits_apart_is_found_and_no_other():
    random = np.random.default_rng(5)
    base = random.integers(0, 2**63, 50, dtype=np.uint64)
    hashes, wanted = list(base), []
    for place in range(50):
        bits = random.choice(64, 3, replace=False)
        for count in (1, 2, 3):
            flipped = int(base[place]) ^ sum(1 << int(bit) for bit in bits[:count])
            hashes.append(np.uint64(flipped))
            wanted += [(place, len(hashes) - 1)] if count < 3 else []
    pairs = {
        tuple(pair)
        for pair in find_near_duplicates(np.array(hashes), np.zeros((200, 48), np.uint8))
    }
    assert set(wanted) <= pairs
    assert not [
        pair for pair in pairs if bin(int(hashes[pair[0]] ^ hashes[pair[1]])).count("1") > 2
    ]


def test_pictures_of_other_colours_are_not_alike():
    hashes = np.zeros(3, np.uint64)
    thumbnails = np.array([[10] * 48, [12] * 48, [90] * 48], np.uint8)
    assert find_near_duplicates(hashes, thumbnails).tolist() == [[0, 1]]


def test_a_crowd_of_one_hash_is_grouped_without_comparing_each_with_each():
    crowd = 20_000
    pairs = find_near_duplicates(np.zeros(crowd, np.uint64), np.full((crowd, 48), 9, np.uint8))
    assert len(pairs) < 40 * crowd
    assert [len(group) for group in group_pairs((int(a), int(b)) for a, b in pairs)] == [crowd]


def test_groups_hang_together():
    assert group_pairs([(5, 3), (1, 2), (3, 9), (2, 0)]) == [[0, 1, 2], [3, 5, 9]]
    rows = np.array([[1, 2], [3, 4], [1, 2], [5, 6], [3, 4], [1, 2]], np.uint8)
    assert group_equal(rows) == [[0, 2, 5], [1, 4]] and group_equal(rows[:0]) == []


# --- the page ---


def test_the_page_shows_what_was_found_and_needs_nothing_else(photos):
    shutil.copy(photos / "train/cat/cat 002.jpg", photos / "val/cat/<b>.jpg")
    (photos / "train/cat/cat 000.jpg").write_bytes(b"no image")
    result = look(photos)
    asked = []

    def show(split, number):
        asked.append((split, number))
        return None if (split, number) == ("train", 0) else np.zeros((10, 20, 3), np.uint8)

    page = render_page(result, show)
    assert "2 problems found" in page and result.manifest in page
    assert page.count("<figure>") == 3 == len(asked) and page.count("data:image/jpeg") == 2
    assert "&lt;b&gt;.jpg" in page and "<b>.jpg" not in page
    assert "http" not in page and "<script" not in page
    assert (
        '<div class="no-picture">cannot be shown</div>' in page
        and "image/gif" not in page  # no browser shows half a picture but as a broken one
        and "not a JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF or HEIC image" in page
    )


def test_a_16_bit_png_is_only_what_it_is(photos):
    wide = np.arange(72 * 96, dtype=np.uint16).reshape(72, 96) * 9
    Image.fromarray(wide).save(photos / "train/cat/deep.png")
    assert struct.unpack(">B", (photos / "train/cat/deep.png").read_bytes()[24:25]) == (16,)
    assert found(look(photos)) == {"greyscale": 1}


def test_photos_that_exif_turns_are_counted_and_told_as_a_note(photos):
    for orientation in (3, 6, 8):
        exif = Image.Exif()
        exif[0x0112] = orientation
        path = photos / "train/cat" / f"cat 00{orientation % 4}.jpg"
        path.write_bytes(encode(photo(900 + orientation), exif=exif))
    turned = Image.fromarray(np.rot90(np.asarray(photo(906)), -1))  # the one of 6, upright
    (photos / "val/cat/upright.png").write_bytes(encode(turned, "PNG"))
    result = look(photos)
    assert found(result) == {"rotated by EXIF": 3, NEARLY_IN_BOTH_SPLITS: 1} and result.wrong == 1
    names = {image.name for image in result.groups[NEARLY_IN_BOTH_SPLITS][0]}
    assert names == {"train/cat/cat 002.jpg", "val/cat/upright.png"}
