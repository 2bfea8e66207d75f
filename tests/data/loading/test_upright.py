"""Photos that lie on their side: batches are those of the same photos stored upright."""

from dataclasses import replace

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from phalanx.data.convert.sample import EncodeOptions, Sample, convert_sample
from phalanx.data.formats.packed import open_packed
from phalanx.data.loading.gpu_decode import GpuDecoder
from phalanx.data.loading.loader import Loader
from phalanx.data.loading.opened_rows import open_rows_here
from phalanx.data.loading.reader import BatchRequest, InputSpec, Reader
from phalanx.data.orientation import turn_box, turn_pixels
from phalanx.data.transforms.transform import TransformSpec
from phalanx.plan.order import Order
from small_photos import encode, photo
from small_samples import write_split

COUNT, SIZE = 16, 24
BACK = {6: 8, 8: 6}  # what undoes a turn; others undo themselves
BOX = (0.1, 0.2, 0.4, 0.9)


def make_samples(*, lying, form="PNG"):
    """Every orientation twice, each photo with a box; or the same photos stored upright."""
    samples = []
    for number in range(COUNT):
        orientation, picture = number % 8 + 1, photo(number, size=(96, 70))
        options, box = {}, BOX
        if lying:
            back = BACK.get(orientation, orientation)
            picture = Image.fromarray(turn_pixels(np.asarray(picture), back))
            options["exif"] = Image.Exif()
            options["exif"][0x0112] = orientation
            box = turn_box(BOX, back)
        name = f"{'ab'[number % 2]}/{number:02}.{form.lower()}"
        data = encode(picture, form, **options)
        samples.append(Sample(name=name, data=data, label=number % 2, box=box))
    return samples


def stand_in(files):
    """Does nvJPEG's part without a GPU."""
    return [torch.from_numpy(simplejpeg.decode_jpeg(f.numpy())).permute(2, 0, 1) for f in files]


def write_tar(folder, samples):
    for split in ("train", "valid"):
        write_split("tar", samples, folder, split, shards=1, classes=("a", "b"))
    return folder


def spec_of(root, data="tar"):
    return InputSpec(
        data=data,
        data_dir=str(root),
        image_size=SIZE,
        transform=TransformSpec(augment="resized-crop", boxes=True),
        seed=3,
        order=Order(images=COUNT, global_batch=COUNT, seed=3),
    )


def batches(root, data="tar"):
    with Loader(spec_of(root, data), workers=0) as loader:
        [[step]] = loader.steps_from(0, 1, micro_batch=COUNT)
        return [
            step.pixels.copy(),
            *(batch.pixels.copy() for batch in loader.evaluation_batches(COUNT)),
        ]


@pytest.fixture(scope="module")
def lying(tmp_path_factory):
    return write_tar(tmp_path_factory.mktemp("lying"), make_samples(lying=True))


@pytest.fixture(scope="module")
def standing(tmp_path_factory):
    return write_tar(tmp_path_factory.mktemp("standing"), make_samples(lying=False))


def test_training_and_scoring_see_photos_upright_with_their_boxes(lying, standing):
    for mine, its in zip(batches(lying), batches(standing), strict=True):
        assert np.array_equal(mine, its)


def test_photos_are_left_as_they_are_stored_where_that_is_asked_for(lying, standing):
    spec = replace(spec_of(lying), upright=False)
    assert InputSpec.from_dict(spec.to_dict()) == spec
    source, upright = spec.open("train"), spec_of(standing).open("train")
    for number in range(COUNT):
        same = np.array_equal(source.read(number), upright.read(number))
        assert same == (number % 8 == 0)
        assert np.array_equal(source.image(number).decode(), source.read(number))


@pytest.mark.parametrize(
    ("job", "form"),
    [({"raw": True}, "PNG"), ({"short_side": 40}, "PNG"), ({}, "PNG"), ({}, "JPEG")],
)
def test_packed_photos_give_what_the_files_give(tmp_path, job, form):
    for name in ("lying", "standing"):
        samples = make_samples(lying=name == "lying", form=form)
        for split in ("train", "valid"):
            write_split("packed", samples, tmp_path / name, split, classes=("a", "b"), **job)
    mine, its = (open_packed(tmp_path / name, "train") for name in ("lying", "standing"))
    for number in range(COUNT):
        apart = np.abs(mine.read(number).astype(int) - its.read(number))
        assert apart.max() == 0 if form == "PNG" else apart.mean() < 4  # JPEGs of other blocks
    found = batches(tmp_path / "lying", "packed")
    if form == "JPEG":  # copied byte for byte
        files = write_tar(tmp_path / "files", make_samples(lying=True, form="JPEG"))
        expected = batches(files)
    else:
        expected = batches(tmp_path / "standing", "packed")
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_box_turns_with_pixels_that_are_stored_anew():
    for sample in make_samples(lying=True):
        stored_anew = convert_sample(sample, EncodeOptions(raw=True))
        assert stored_anew.box == pytest.approx(BOX) and stored_anew.shape == (70, 96)
        assert convert_sample(sample, EncodeOptions()) is sample


@pytest.mark.parametrize("split", ["train", "valid"])
def test_the_device_turns_what_it_decodes(tmp_path, split):
    root = write_tar(tmp_path, make_samples(lying=True, form="JPEG"))
    positions, pixels = np.arange(COUNT), np.empty((COUNT, SIZE, SIZE, 3), np.uint8)
    host = Reader(spec_of(root), split)
    host.fill(positions, pixels)
    reader = Reader(replace(spec_of(root), gpu_percent=100), split)
    request = BatchRequest(positions, SIZE)
    [opened] = open_rows_here(reader, [request])
    assert len(opened.jpegs) == COUNT
    decoder = GpuDecoder(reader, torch.device("cpu"), decode=stand_in)
    [batch] = decoder.batches([request])
    decoder.close()
    apart = np.abs(batch.pixels.numpy().astype(int) - pixels).mean((1, 2, 3))
    assert apart.max() < 6  # another filter; a wrong turn is 40 apart
