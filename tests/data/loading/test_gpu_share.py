"""Which images a GPU decodes: by position, by file, and after the cores have decoded each once."""

from dataclasses import replace

import numpy as np
import pytest
import simplejpeg

from phalanx.data.formats.decode import EncodedImage
from phalanx.data.loading import gpu_decode, gpu_share
from phalanx.data.loading.gpu_decode import GpuDecoder
from phalanx.data.loading.gpu_share import GpuShare, is_gpu_decodable
from phalanx.data.loading.loader import Loader
from phalanx.plan.order import Order
from small_jpegs import COUNT, CPU, end_in_scan, lose_rows, spec_of, stand_in, write_files
from small_photos import encode, photo

BATCH = 10  # steps 0 to 2 hold the first pass over 24 images, step 2 also the start of the second
ORDER = Order(images=COUNT, global_batch=BATCH, seed=1)
FOR_CORES = (5, 9, 12)  # of ODD: a PNG, a CMYK, a progressive JPEG


def drop(**values):
    return Order(images=COUNT, global_batch=BATCH, seed=1, drop_tail=True, **values)


# --- by position ---


def test_rows_are_spread_evenly_and_by_their_position_alone():
    positions = np.arange(1000, 3000)
    for percent in (1, 7, 40, 99, 100):
        chosen = GpuShare(percent).find_rows(positions)
        windows = np.convolve(chosen, np.ones(100, int), "valid")
        assert (windows == percent).all()
        assert (GpuShare(percent).find_rows(positions[::3]) == chosen[::3]).all()
    assert not GpuShare(0).find_rows(positions).any()


@pytest.mark.parametrize(
    "order", [ORDER, replace(ORDER, repeats=3), drop(), drop(repeats=2), replace(ORDER, images=1)]
)
@pytest.mark.parametrize("since", [0, 1, 2, 7, 40])
def test_the_cores_decode_every_image_before_the_gpu_does(order, since):
    share = GpuShare.of_split("train", 100, order, since)
    spec = replace(spec_of("nowhere"), order=order, checked_since=since)
    first, seen = spec.first_checked_step, set()
    for step in range(since, first):
        seen |= set(order.indices(order.positions(step)).tolist())
    assert len(seen | share.unchecked) == order.images
    passes = 2 + (since > 0)  # the one under way is not counted
    assert first - since <= passes * order.repeats * -(-order.images // order.global_batch)
    assert GpuShare.of_split("valid", 100, order, since).percent == 0


# --- by file ---


def with_four_rows_for_a_colour(image):
    """A JPEG in 4:4:1."""
    data = bytearray(simplejpeg.encode_jpeg(np.asarray(image), colorsubsampling="411"))
    data[data.index(b"\xff\xc0") + 11] = 0x14
    return bytes(data)


def in_a_scan_for_each_colour(data):
    """The JPEG, as if what is there were the luminance's scan, which others follow."""
    start = data.index(b"\xff\xda")
    length = int.from_bytes(data[start + 2 : start + 4], "big")
    scan = b"\xff\xda\x00\x08\x01" + data[start + 5 : start + 7] + b"\x00\x3f\x00"
    return data[:start] + scan + data[start + 2 + length :]


@pytest.mark.parametrize(
    ("data", "suits"),
    [
        (encode(photo(1)), True),
        (encode(photo(1, mode="L")), True),
        (encode(photo(1), progressive=True), False),
        (simplejpeg.encode_jpeg(np.asarray(photo(1)), colorsubsampling="440"), True),
        (simplejpeg.encode_jpeg(np.asarray(photo(1)), colorsubsampling="411"), False),
        (with_four_rows_for_a_colour(photo(1)), False),
        (in_a_scan_for_each_colour(encode(photo(1))), False),
        (encode(photo(1)).replace(b"\xff\xc0", b"\xff\xff\xff\xc0"), True),
        (encode(photo(1, mode="CMYK")), False),
        (encode(photo(1), "PNG"), False),
        (encode(photo(1))[:-300], False),
        (encode(photo(1)) + b"\0", False),
    ],
)
def test_whole_jpegs_of_the_usual_kinds_are_for_the_gpu(data, suits):
    assert is_gpu_decodable(EncodedImage(data, "image")) == suits


def test_without_simplejpeg_no_image_is_for_the_gpu(monkeypatch):
    image = EncodedImage(encode(photo(1)), "image")
    monkeypatch.setattr(gpu_share, "simplejpeg", None)
    assert not is_gpu_decodable(image)


def test_pixels_in_memory_are_not_for_the_gpus_decoder():
    assert not is_gpu_decodable(np.asarray(photo(1)))


# --- in a loader ---


def open_loader(root, order, seen, *, workers=0, since=0, percent=100):
    """A loader whose GPU is a decoder that notes all files, and is content with damaged ones."""

    def decode(files):
        seen.extend(file.numpy().tobytes() for file in files)
        return stand_in(files)

    def build(reader, open_rows):
        if not reader.gpu_share.percent:
            return None
        return GpuDecoder(reader, CPU, open_rows=open_rows, decode=decode)

    spec = replace(spec_of(root, percent=percent), order=order, checked_since=since)
    return Loader(spec, workers=workers, backend=build, images_per_task=5)


def read_steps(loader, start=0, stop=9, *, by_gpu=True):
    """The images of each step, and those of scoring, as arrays."""
    first = max(start, loader.spec.first_checked_step)
    with loader:
        steps = list(loader.steps_from(start, first, micro_batch=5))
        loader.on_device = by_gpu
        steps += loader.steps_from(first, stop, micro_batch=5)
        trained = [np.concatenate([np.asarray(one.pixels) for one in step]) for step in steps]
        scored = [batch.pixels for batch in loader.evaluation_batches(7)]
    assert all(isinstance(pixels, np.ndarray) for pixels in scored)
    return trained, scored


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_after_the_first_pass_are_the_gpus_and_all_others_the_cores(tmp_path, workers):
    root, seen = write_files(tmp_path, {}), []
    by_cores = read_steps(open_loader(root, ORDER, [], percent=0, workers=workers))
    undecided = read_steps(open_loader(root, ORDER, seen, workers=workers), by_gpu=False)
    assert not seen
    for one, other in zip(by_cores[0] + by_cores[1], undecided[0] + undecided[1], strict=True):
        assert (one == other).all()
    trained, scored = read_steps(open_loader(root, ORDER, seen, workers=workers))
    with_gpu = Loader(
        replace(spec_of(root), order=ORDER),
        workers=workers,
        backend=lambda reader, rows: GpuDecoder(reader, CPU, open_rows=rows, decode=stand_in),
    )
    with with_gpu:
        steps = list(with_gpu.steps_from(0, 9, micro_batch=10))
    by_gpu = [step[0].pixels.numpy() for step in steps]
    for number, pixels in enumerate(trained):
        expected = by_cores[0][number] if number < 3 else by_gpu[number]
        assert (pixels == expected).all(), number
        assert not (by_gpu[number] == by_cores[0][number]).all()
    assert all((a == b).all() for a, b in zip(scored, by_cores[1], strict=True))
    images = ORDER.indices(np.arange(30, 90)).tolist()
    assert len(seen) == sum(index not in FOR_CORES for index in images)


class NvJpeg:
    """Stands in for a decoder of the GPU, and counts how many were opened."""

    opened = 0

    def __init__(self, device):
        NvJpeg.opened += 1

    def __call__(self, files):
        return stand_in(files)

    def close(self):
        pass


@pytest.mark.parametrize("by_gpu", [False, True])
def test_a_gpu_that_decodes_nothing_holds_no_decoders(tmp_path, monkeypatch, by_gpu):
    monkeypatch.setattr(gpu_decode, "NvJpeg", NvJpeg)
    monkeypatch.setattr(NvJpeg, "opened", 0)
    loader = Loader(
        replace(spec_of(write_files(tmp_path, {})), order=ORDER, checked_since=0),
        workers=0,
        backend=lambda reader, rows: GpuDecoder(reader, CPU, open_rows=rows),
    )
    with loader:
        first = loader.spec.first_checked_step
        list(loader.steps_from(0, first, micro_batch=5))
        assert NvJpeg.opened == 0, "the cores decode in the first pass"
        loader.on_device = by_gpu
        list(loader.steps_from(first, 9, micro_batch=5))
    assert NvJpeg.opened == (2 if by_gpu else 0)


BAD = {1, 2, 14, 17}  # the last two are left out of the first pass if its tail is dropped
DAMAGED = {0, 6, 7, 15, 19, 20}


@pytest.fixture
def damaged(tmp_path):
    """A folder with images that cannot be decoded, and some that the cores can decode."""
    return write_files(
        tmp_path, dict.fromkeys(BAD, end_in_scan) | dict.fromkeys(DAMAGED, lose_rows)
    )


def numbers_of(files, root):
    """The numbers of these files in the folder of training images."""
    numbers = {path.read_bytes(): int(path.stem) for path in root.glob("train/*/*.jpg")}
    return {numbers[file] for file in files}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("order", [ORDER, drop()])
def test_an_image_that_the_cores_found_damaged_never_reaches_the_gpu(damaged, order, workers):
    seen, seen_by_next = [], []
    loader = open_loader(damaged, order, seen, workers=workers)
    trained, _ = read_steps(loader, stop=12)
    assert seen and not numbers_of(seen, damaged) & (BAD | DAMAGED)
    found = loader.problems["train"]
    assert set(found.bad_images) == set(loader.problems["valid"].bad_images) == BAD
    assert set(found.cores_only) <= BAD | DAMAGED
    resumed = open_loader(damaged, order, seen_by_next, workers=workers)
    resumed.recheck_bad(set(map(loader.source("train").name, BAD)))
    resumed.problems["train"].cores_only.update(found.cores_only)
    again, _ = read_steps(resumed, start=5, stop=12)
    assert seen_by_next and not numbers_of(seen_by_next, damaged) & (BAD | DAMAGED)
    assert all((one == other).all() for one, other in zip(trained[5:], again, strict=True))


def test_workers_learn_which_images_other_workers_found_damaged(damaged, monkeypatch):
    reopened = []

    def note(decoder, position, *place):
        reopened.append(position)
        return decode_again(decoder, position, *place)

    decode_again = GpuDecoder._decode_again
    monkeypatch.setattr(GpuDecoder, "_decode_again", note)
    read_steps(open_loader(damaged, ORDER, [], workers=2), stop=40)
    assert max(reopened, default=0) < 200, "this process decodes what a worker should"


def test_an_image_known_to_be_bad_is_replaced_without_being_read(damaged):
    seen, loader = [], open_loader(damaged, ORDER, [], since=None)
    reasons = {name: f"{name}: is bad" for name in map(loader.source("train").name, BAD)}
    for known, reaches_gpu in (({}, True), (reasons, False)):
        seen.clear()
        loader = open_loader(damaged, ORDER, seen, since=None)
        loader.restore_bad(known)
        with loader:
            list(loader.steps_from(0, 3, micro_batch=5))
        assert bool(numbers_of(seen, damaged) & BAD) == reaches_gpu
    assert loader.problems["train"].bad_images.keys() == BAD
