import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.data.convert.sample import Sample
from phalanx.data.formats.decode import BadImage, EncodedImage
from phalanx.data.formats.packed import has_packed_files, open_packed, read_header
from phalanx.data.loading.loader import Loader
from phalanx.data.loading.reader import InputSpec
from phalanx.data.pillow_image import read_image_header
from phalanx.data.transforms.transform import CROPS, TransformSpec, build_transform
from phalanx.data.verify.image_checks import check_image
from phalanx.data.verify.verify import verify_dataset
from phalanx.errors import DataError
from phalanx.plan.order import Order
from small_samples import CLASSES, encode, make_samples, undecodable, write_split


def damaged(folder):
    """What `phalanx data verify` finds damaged in the training images, as it goes through them."""
    source = open_packed(folder, "train")
    found = [check_image(source, number)[2] for number in range(len(source))]
    return [why for kinds in found for why in kinds.values() if why]


def write_both(folder, *, samples=None, **job):
    samples = make_samples(10, boxes=True) if samples is None else samples
    for split in ("train", "valid"):
        (folder / f"{split}.phx").unlink(missing_ok=True)
        write_split("packed", samples, folder, split, **job)
    return samples


@pytest.mark.parametrize("raw", [False, True])
def test_what_is_packed_is_read_back(tmp_path, raw):
    samples = write_both(tmp_path, raw=raw)
    source = open_packed(tmp_path, "train")
    assert len(source) == 10 and source.classes == CLASSES and source.labels.dtype == np.int64
    assert source.labels.tolist() == [sample.label for sample in samples]
    for number, sample in enumerate(samples):
        assert source.name(number) == f"train.phx:{sample.name}"
        assert source.box(number) == sample.box
        difference = (
            source.read(number).astype(int) - EncodedImage(sample.data, sample.name).decode()
        )
        assert np.abs(difference).max() <= (0 if raw else 3), sample.name


def test_a_plain_jpeg_is_kept_byte_for_byte_and_others_become_one(tmp_path):
    samples = write_both(tmp_path)
    source = open_packed(tmp_path, "valid")
    assert source.read_encoded(0) == samples[0].data and source.read_encoded(1) == samples[1].data
    assert [read_image_header(source.read_encoded(n)).mode for n in range(4)] == [
        "RGB",
        "L",
        "RGB",
        "RGB",
    ]
    assert {read_image_header(source.read_encoded(n)).format for n in range(4)} == {"JPEG"}


def test_raw_images_leave_as_png_without_loss(tmp_path):
    samples = write_both(tmp_path, raw=True)
    source = open_packed(tmp_path, "train")
    data = source.read_encoded(0)
    assert read_image_header(data).format == "PNG"
    assert (EncodedImage(data, "").decode() == EncodedImage(samples[0].data, "").decode()).all()


def test_raw_pixels_go_through_every_transform(tmp_path):
    write_both(tmp_path, raw=True)
    image = open_packed(tmp_path, "train").read(0)
    for transform in (build_transform(TransformSpec(augment=kind)) for kind in CROPS):
        out = np.zeros((1, 12, 12, 3), np.uint8)
        [draws] = transform.draw(0, np.arange(1))
        transform.apply_training([(image, draws, None)], out)
        transform.apply_evaluation(image, out[0])
        assert out.any()


@pytest.mark.parametrize("raw", [False, True])
def test_large_images_shrink_to_the_short_side_and_small_ones_stay(tmp_path, raw):
    sizes = [(40, 30), (30, 60), (9, 12), (12, 12)]
    samples = [
        Sample(name=str(size), data=encode("RGB", "JPEG", size=size), label=0) for size in sizes
    ]
    write_both(tmp_path, raw=raw, short_side=12, samples=samples)
    source = open_packed(tmp_path, "train")
    shapes = [source.read(number).shape for number in range(4)]
    assert shapes == [(12, 16, 3), (24, 12, 3), (12, 9, 3), (12, 12, 3)]
    assert source.arrays["widths"].tolist() == [16, 12, 9, 12]
    assert source.arrays["heights"].tolist() == [12, 24, 12, 12]
    if not raw:
        assert source.read_encoded(3) == samples[3].data


def test_the_header_says_what_was_packed(tmp_path):
    write_both(tmp_path, short_side=256, source={"sha256": "abc"})
    assert read_header(tmp_path / "train.phx") == {
        "format": 2,
        "images": 10,
        "classes": list(CLASSES),
        "encoding": "jpeg",
        "short_side": 256,
        "source": {"sha256": "abc"},
    }


def test_everything_starts_at_a_multiple_of_64(tmp_path):
    write_both(tmp_path)
    assert not (open_packed(tmp_path, "train").arrays["offsets"] % 64).any()


def test_boxes_cost_nothing_where_there_are_none(tmp_path):
    write_both(tmp_path, samples=make_samples(3))
    source = open_packed(tmp_path, "train")
    assert "boxes" not in source.arrays and source.box(0) is None


def test_an_image_that_cannot_be_decoded_keeps_its_place(tmp_path):
    samples = [*make_samples(2), undecodable()]
    write_both(tmp_path, samples=samples)
    source = open_packed(tmp_path, "train")
    assert source.read_encoded(2) == samples[2].data
    with pytest.raises(BadImage, match=r"train.phx:broken.jpg: (?!its bytes changed)"):
        source.read(2)
    write_both(tmp_path, samples=samples, raw=True)
    source = open_packed(tmp_path, "train")
    assert source.read(1).shape == (16, 20, 3)
    assert damaged(tmp_path) == ["it could not be decoded when it was packed"]
    with pytest.raises(BadImage, match=r"broken.jpg: it could not be decoded when it was packed"):
        source.read(2)


def test_a_fingerprint_follows_pixels_labels_and_encoding(tmp_path):
    samples = make_samples(4)
    chosen = [
        (samples, False),
        (samples, True),
        ([replace(samples[0], label=1), *samples[1:]], False),
        ([replace(samples[0], data=encode("RGB", "JPEG", value=9)), *samples[1:]], False),
    ]
    prints = []
    for number, (some, raw) in enumerate(chosen):
        write_both(tmp_path / str(number), samples=some, raw=raw)
        prints.append(open_packed(tmp_path / str(number), "train").fingerprint())
        assert prints[-1]["images"] == 4 and prints[-1]["classes"] == 3
    assert len({found["sha256"] for found in prints}) == 4


# --- damage ---


def test_a_file_that_is_cut_anywhere_is_refused_at_once(tmp_path):
    write_both(tmp_path)
    path = tmp_path / "train.phx"
    whole = path.read_bytes()
    for keep in (0, 7, 12, 40, 300, len(whole) // 2, len(whole) - 41, len(whole) - 1):
        path.write_bytes(whole[:keep])
        with pytest.raises(DataError, match=r"train.phx: .*data build --to packed"):
            open_packed(tmp_path, "train")
        with pytest.raises(DataError, match=r"train.phx: "):
            verify_dataset(tmp_path, workers=0)
    path.write_bytes(whole + b"\0")
    with pytest.raises(DataError, match="truncated"):
        open_packed(tmp_path, "train")


def test_any_flipped_bit_is_found(tmp_path):
    write_both(tmp_path, samples=make_samples(3))
    path = tmp_path / "train.phx"
    whole = path.read_bytes()
    source = open_packed(tmp_path, "train")
    begins = source.index.offsets.tolist()
    covered = set(range(len(whole)))
    for number, begin in enumerate(begins):  # what only fills up to 64 bytes carries nothing
        end = begin + int(source.index.sizes[number])
        covered -= set(range(end, end + -end % 64))
    covered -= set(range(begins[0])[16 + len(read_header_text(whole)) :])
    for place in sorted(covered)[::7]:
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        path.write_bytes(data)
        try:
            assert damaged(tmp_path) == ["its bytes changed after packing"], f"byte {place}"
        except DataError as refused:
            assert "train.phx" in str(refused), f"byte {place}"
    path.write_bytes(whole)
    assert damaged(tmp_path) == []


@pytest.mark.parametrize("text", [b"[" * 100_000, b"[1]", b"5", b"{"])
def test_a_header_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "train.phx").write_bytes(b"phalanxP" + len(text).to_bytes(8, "little") + text)
    with pytest.raises(DataError, match=r"train.phx: its header is damaged"):
        open_packed(tmp_path, "train")


def read_header_text(data):
    return data[16 : 16 + int.from_bytes(data[8:16], "little")]


def test_a_damaged_image_is_located_and_told_from_one_that_never_was_good(tmp_path):
    write_both(tmp_path)
    path = tmp_path / "train.phx"
    offset = int(open_packed(tmp_path, "train").index.offsets[4])
    data = bytearray(path.read_bytes())
    data[offset : offset + 3] = b"xxx"
    path.write_bytes(data)
    [place] = verify_dataset(tmp_path, workers=0).single["undecodable"]
    assert place.name == "train.phx:train/dög/4 ü.jpg"
    assert (place.split, place.number, place.why) == ("train", 4, "its bytes changed after packing")
    source = open_packed(tmp_path, "train")
    with pytest.raises(BadImage, match=r"4 ü\.jpg: its bytes changed after packing"):
        source.read(4)
    assert source.read(3).shape == (16, 20, 3)


def test_pixels_that_changed_are_found_though_nothing_has_to_be_decoded(tmp_path):
    write_both(tmp_path, raw=True)
    path = tmp_path / "train.phx"
    data = bytearray(path.read_bytes())
    data[int(open_packed(tmp_path, "train").index.offsets[2]) + 9] ^= 1
    path.write_bytes(data)
    assert damaged(tmp_path) == ["its bytes changed after packing"]


@pytest.mark.parametrize("place", [0, 2, 300])  # the magic word, the header, the picture
def test_training_tells_an_image_that_changed_from_one_that_never_was_good(tmp_path, place):
    samples = [*make_samples(8), undecodable()]
    write_both(tmp_path, samples=samples)
    path = tmp_path / "train.phx"
    source = open_packed(tmp_path, "train")
    begin, size = int(source.index.offsets[4]), int(source.index.sizes[4])
    data = bytearray(path.read_bytes())
    data[begin + place : begin + size] = bytes(size - place)
    path.write_bytes(data)
    recipe = InputSpec(
        data="packed",
        data_dir=str(tmp_path),
        image_size=8,
        transform=TransformSpec(augment="resized-crop"),
        seed=0,
        order=Order(images=9, global_batch=9, seed=0),
    )
    with Loader(recipe, workers=0, max_bad=2) as loader:
        next(loader.steps_from(0, 1, micro_batch=9))
        assert sorted(loader.problems["train"].bad_images) == [4, 8]
        assert (
            loader.problems["train"]
            .bad_images[4]
            .endswith("4 ü.jpg: its bytes changed after packing")
        )
        assert "changed" not in loader.problems["train"].bad_images[8]


def test_a_file_of_another_format_number_is_refused(tmp_path):
    write_both(tmp_path)
    path = tmp_path / "train.phx"
    path.write_bytes(path.read_bytes().replace(b'"format": 2', b'"format": 9'))
    with pytest.raises(DataError, match="format 9, this Phalanx reads up to 2"):
        open_packed(tmp_path, "train")


def test_format_1_is_read_and_checked_by_its_own_sums(tmp_path):
    shutil.copytree(Path(__file__).parent / "packed_format_1", tmp_path, dirs_exist_ok=True)
    source = open_packed(tmp_path, "train")
    assert [source.read(number).shape for number in range(4)] == [(8, 8, 3)] * 4
    content = bytearray((tmp_path / "train.phx").read_bytes())
    content[int(source.index.offsets[2]) + int(source.index.sizes[2]) - 3] ^= 1
    (tmp_path / "train.phx").write_bytes(content)
    with pytest.raises(BadImage, match="its bytes changed after packing"):
        open_packed(tmp_path, "train").read(2)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_cut_short_while_it_is_read_is_an_error_that_names_it(tmp_path, workers):
    write_both(tmp_path)
    spec = InputSpec(
        data="packed",
        data_dir=str(tmp_path),
        image_size=8,
        transform=TransformSpec(augment="none"),
        seed=0,
        order=Order(images=10, global_batch=5, seed=0),
    )
    with Loader(spec, workers=workers) as loader:
        steps = loader.steps_from(0, 100, micro_batch=5)
        next(steps)
        os.truncate(tmp_path / "train.phx", 200)
        with pytest.raises(DataError, match=r"train\.phx: was truncated while it was in use"):
            list(steps)


def test_splits_that_disagree_on_classes_are_refused(tmp_path):
    write_both(tmp_path)
    (tmp_path / "valid.phx").unlink()
    write_split("packed", make_samples(2), tmp_path, "valid", classes=("cat", "fish"))
    for split in ("train", "valid"):
        with pytest.raises(DataError, match="different classes"):
            open_packed(tmp_path, split)


def test_a_folder_without_packed_files_says_so(tmp_path):
    assert not has_packed_files(tmp_path)
    with pytest.raises(DataError, match=r"train.phx: cannot be read \(No such file"):
        open_packed(tmp_path, "train")
    write_split("packed", make_samples(2), tmp_path, "valid")
    assert has_packed_files(tmp_path) and len(open_packed(tmp_path, "valid")) == 2
