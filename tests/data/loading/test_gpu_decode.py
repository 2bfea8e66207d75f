import threading
from contextlib import closing

import numpy as np
import pytest
import torch
from PIL import Image

from phalanx.data.convert.sample import Sample
from phalanx.data.loading import gpu_decode
from phalanx.data.loading.gpu_decode import GpuDecoder, find_gpu_decode_problem
from phalanx.data.loading.reader import BatchRequest, Reader
from phalanx.data.transforms.transform import (
    TransformSpec,
    build_transform,
    choose_crop_and_flip,
    find_centre_crop,
)
from phalanx.errors import ConfigError, DataError
from phalanx.kernels import crop_resize
from phalanx.kernels.crop_resize import crop_and_resize
from phalanx.plan.share import Share
from small_jpegs import (
    COUNT,
    CPU,
    CROP,
    SIZE,
    SPOILED,
    open_loader,
    spec_of,
    stand_in,
    write_files,
)
from small_photos import encode, photo
from small_samples import write_split

PARTS = {  # of images of width x height: top, left, height, width
    (96, 72): (0, 0, 72, 96),
    (500, 375): (30, 41, 300, 222),
    (375, 500): (0.4, 11.7, 431.3, 300.25),
    (64, 64): (10, 50, 9, 14),  # is enlarged
    (400, 40): (3.5, 20.25, 33, 350),  # only its width shrinks
    (33, 31): (30, 32, 1, 1),
    (1, 1): (0, 0, 1, 1),
}
gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def refusing(files):
    """A decoder that is out of order."""
    raise RuntimeError(f"none of {len(files)}")


def grainy(seed, size):
    """A photograph's blotches, with a grain that only a filter of the right width averages."""
    grain = np.random.default_rng(seed).normal(0, 12, (size[1], size[0], 3))
    return np.clip(np.asarray(photo(seed, size=size)) + grain, 0, 255).astype(np.uint8)


IMAGES = [grainy(seed, size) for seed, size in enumerate(PARTS)]
TENSORS = [torch.from_numpy(image).permute(2, 0, 1) for image in IMAGES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("whole"), {})


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("spoiled"), SPOILED)


def reader_of(root, split, *, max_bad=None, **values):
    return Reader(spec_of(root, **values), split, max_bad=max_bad)


def fill_on_host(reader, positions):
    pixels = np.empty((len(positions), SIZE, SIZE, 3), np.uint8)
    return pixels, reader.fill(positions, pixels)


def fill_on_device(reader, positions, *, decode=stand_in, device=CPU, size=SIZE):
    decoder = GpuDecoder(reader, device, decode=decode)
    with closing(decoder):
        [batch] = decoder.batches([BatchRequest(positions, size)])
    if batch.ready is not None:
        batch.ready.synchronize()
    pixels = batch.pixels
    assert not [thread for thread in threading.enumerate() if "prefetch" in thread.name]
    assert pixels.is_contiguous() and pixels.dtype == torch.uint8
    return pixels.cpu().numpy(), batch, decoder


def assert_alike(pixels, expected):
    """The pixel bars: two 255ths on average, five for any image."""
    apart = np.abs(pixels.astype(int) - expected).mean(axis=(1, 2, 3))
    assert apart.mean() < 2 and apart.max() < 5, apart.round(1).tolist()


def assert_same_batch(root, split, **options):
    """A device's batch is the host's: images, labels, findings, and pixels within the bars."""
    decode = options.pop("decode", stand_in)
    readers = [reader_of(root, split, **options) for _ in range(2)]
    positions = np.arange(COUNT, 2 * COUNT) if split == "train" else np.arange(COUNT)
    expected, known = fill_on_host(readers[0], positions)
    pixels, rows, decoder = fill_on_device(readers[1], positions, decode=decode)
    assert rows.indices.tolist() == known.indices.tolist()
    assert rows.labels.tolist() == known.labels.tolist()
    assert readers[1].problems == readers[0].problems
    assert_alike(pixels, expected)
    return pixels, rows, decoder


# --- cutting ---


def test_parts_are_resized_as_pillow_does_it():
    cut = crop_and_resize(TENSORS, list(PARTS.values()), [False] * len(PARTS), size=SIZE).numpy()
    assert cut.shape == (len(PARTS), SIZE, SIZE, 3)
    for pixels, image, part in zip(cut, IMAGES, PARTS.values(), strict=True):
        top, left, tall, wide = part
        box = (left, top, left + wide, top + tall)
        whole = Image.fromarray(image)
        expected = np.asarray(whole.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box))
        apart = pixels.astype(int) - expected
        assert np.abs(apart).max() <= 1 and abs(apart.mean()) < 0.2, part  # rounded, not cut off


def test_a_flip_is_the_exact_mirror_of_its_image_alone():
    parts = list(PARTS.values())
    plain = crop_and_resize(TENSORS, parts, [False] * len(parts), size=SIZE)
    flips = [row % 2 == 0 for row in range(len(parts))]
    for row, shown in enumerate(crop_and_resize(TENSORS, parts, flips, size=SIZE)):
        assert torch.equal(shown, plain[row].flip(1) if flips[row] else plain[row])
    assert not torch.equal(plain[0], plain[0].flip(1))


def test_a_part_of_its_own_size_is_copied():
    cut = crop_and_resize([TENSORS[1]], [(7, 9, SIZE, SIZE)], [False], size=SIZE)
    assert (cut[0].numpy() == IMAGES[1][7 : 7 + SIZE, 9 : 9 + SIZE]).all()


def test_images_that_do_not_fit_into_memory_together_are_cut_in_turns(monkeypatch):
    parts, flips = list(PARTS.values()), [True] * len(PARTS)
    whole = crop_and_resize(TENSORS, parts, flips, size=SIZE)
    monkeypatch.setattr(crop_resize, "_MAX_BYTES", 600_000)
    sides = np.array([[90, 100], [90, 100], [300, 10], [200, 200], [2, 2], [250, 250], [1, 1]])
    bounds = [(run.start, run.stop) for run in crop_resize._split_to_fit(sides)]
    assert bounds == [(0, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)]
    assert torch.equal(crop_and_resize(TENSORS, parts, flips, size=SIZE), whole)


def test_every_other_part_is_mirrored():
    place = [0.3, 0.6] + [0.4, 0.5] * 10
    assert [
        choose_crop_and_flip(CROP, (50, 60), None, [flip, *place])[1] for flip in (0.49, 0.5)
    ] == [
        True,
        False,
    ]


@pytest.mark.parametrize("sides", [(375, 500), (500, 375), (64, 200), (20, 18), (33, 33)])
def test_the_centre_as_a_part_shows_what_the_centre_crop_shows(sides):
    image = np.asarray(photo(7, size=sides[::-1]))
    expected = np.empty((SIZE, SIZE, 3), np.uint8)
    build_transform(CROP).apply_evaluation(image, expected)
    part = find_centre_crop(*sides, SIZE, share=0.875)
    tensor = torch.from_numpy(image.copy()).permute(2, 0, 1)
    assert_alike(crop_and_resize([tensor], [part], [False], size=SIZE).numpy(), expected[None])


# --- filling ---


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_batch_is_the_readers_batch(folder, split):
    pixels, rows, decoder = assert_same_batch(folder, split)
    assert sorted(rows.indices.tolist()) == list(range(COUNT)) and decoder.failed_calls == 0
    assert pixels.std(axis=(1, 2, 3)).min() > 5  # no image is blank


def test_shares_are_slices_of_the_whole(folder):
    with open_loader(folder) as loader:
        whole = next(loader.steps_from(3, 4, micro_batch=4))
        for replica in range(2):
            own = next(loader.steps_from(3, 4, micro_batch=4, share=Share((replica,), 2)))
            for expected, batch in zip(whole[replica::2], own, strict=True):
                assert torch.equal(batch.pixels, expected.pixels)
                assert batch.indices.tolist() == expected.indices.tolist()
                assert batch.positions.tolist() == expected.positions.tolist()


def test_batches_of_another_size_can_be_asked_for(folder):
    pixels, _, _ = fill_on_device(reader_of(folder, "valid"), np.arange(4), size=20)
    expected = np.empty((4, 20, 20, 3), np.uint8)
    reader_of(folder, "valid").fill(np.arange(4), expected)
    assert_alike(pixels, expected)


@pytest.mark.parametrize("decode", [stand_in, refusing])
def test_bad_training_images_are_named_and_replaced_as_the_reader_does(spoiled, decode):
    _, rows, decoder = assert_same_batch(spoiled, "train", decode=decode)
    assert not set(SPOILED) & set(rows.indices.tolist()) and len(rows.indices) == COUNT
    bad = decoder.reader.problems.bad_images
    assert sorted(bad) == sorted(SPOILED) and "train/cat/03.jpg: " in bad[3]
    assert "60000x60000 pixels, over the 64,000,000 of --max-pixels" in bad[8]
    assert bool(decoder.failed_calls) == (decode is refusing)


@pytest.mark.parametrize("decode", [stand_in, refusing])
def test_bad_images_leave_the_score(spoiled, decode):
    pixels, rows, _ = assert_same_batch(spoiled, "valid", decode=decode)
    assert np.flatnonzero(rows.indices < 0).tolist() == sorted(SPOILED)
    assert (pixels[rows.indices < 0] == 0).all()


def test_a_second_batch_steps_over_images_known_to_be_bad(spoiled):
    reader, twin = reader_of(spoiled, "train"), reader_of(spoiled, "train")
    for positions in (np.arange(COUNT), np.arange(COUNT, 2 * COUNT)):
        expected, known = fill_on_host(twin, positions)
        pixels, batch, _ = fill_on_device(reader, positions)
        assert batch.indices.tolist() == known.indices.tolist()
        assert_alike(pixels, expected)


def test_a_device_without_memory_is_not_taken_for_bad_images(folder):
    def decode(files):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        fill_on_device(reader_of(folder, "train"), np.arange(COUNT), decode=decode)


def test_a_device_with_little_memory_left_decodes_fewer_at_a_time(folder):
    def decode(files):
        if len(files) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return stand_in(files)

    pixels, _, decoder = fill_on_device(reader_of(folder, "train"), np.arange(COUNT), decode=decode)
    whole, _, _ = fill_on_device(reader_of(folder, "train"), np.arange(COUNT))
    assert (pixels == whole).all() and decoder.failed_calls == 0


class Recorder:
    """A decoder that notes which thread calls it, and waits until another one is called, too."""

    together = threading.Barrier(2, timeout=30)

    def __init__(self, device):
        self.lock, self.closed, self.calls = threading.Lock(), 0, 0

    def __call__(self, files):
        assert self.lock.acquire(blocking=False), "two threads use the same decoder"
        self.calls += 1
        self.together.wait()
        images = stand_in(files)
        self.lock.release()
        return images

    def close(self):
        self.closed += 1


def test_two_decoders_work_at_the_same_time_each_for_one_thread(folder, monkeypatch):
    decoders = []
    monkeypatch.setattr(
        gpu_decode, "NvJpeg", lambda device: decoders.append(Recorder(device)) or decoders[-1]
    )
    reader = reader_of(folder, "train")
    positions = [np.arange(n * COUNT, (n + 1) * COUNT) for n in range(6)]
    with closing(GpuDecoder(reader, CPU)) as decoder:
        found = list(decoder.batches(BatchRequest(each, SIZE) for each in positions))
    assert [batch.positions.tolist() for batch in found] == [each.tolist() for each in positions]
    assert [one.calls for one in decoders] == [3, 3]
    assert [one.closed for one in decoders] == [1, 1]
    for batch, each in zip(found, positions, strict=True):
        pixels, _, _ = fill_on_device(reader, each)
        assert (batch.pixels.numpy() == pixels).all()


def test_too_many_bad_training_images_end_the_run(spoiled):
    with pytest.raises(DataError, match="more than 2 training images cannot be read"):
        fill_on_device(reader_of(spoiled, "train", max_bad=2), np.arange(COUNT))


@pytest.mark.parametrize("encoding", ["jpeg", "raw"])
@pytest.mark.parametrize("boxes", [False, True])
def test_packed_images_are_those_of_the_reader(tmp_path, encoding, boxes):
    box = (0.6, 0.1, 0.9, 0.5) if boxes and encoding == "jpeg" else None
    samples = [
        Sample(name=f"{seed}.jpg", data=encode(photo(seed)), label=seed % 2, box=box)
        for seed in range(COUNT)
    ]
    for split in ("train", "valid"):
        raw = encoding == "raw"
        write_split("packed", samples, tmp_path, split, classes=("cat", "dog"), raw=raw)
    transform = TransformSpec(augment="resized-crop", boxes=boxes)
    assert_same_batch(tmp_path, "train", data="packed", transform=transform)
    assert_same_batch(tmp_path, "valid", data="packed", transform=transform)


def test_large_batches_are_decoded_in_portions(folder, monkeypatch):
    positions = np.arange(COUNT)
    whole, _, _ = fill_on_device(reader_of(folder, "train"), positions)
    monkeypatch.setattr("phalanx.data.loading.gpu_decode.MAX_DECODED_BYTES", 50_000)  # two of 96x72
    calls = []

    def count(files):
        calls.append(len(files))
        return stand_in(files)

    pixels, _, _ = fill_on_device(reader_of(folder, "train"), positions, decode=count)
    assert len(calls) > 5 and max(calls) <= 4 and (pixels == whole).all()


# --- refusing ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"augment": "pad-crop"}, "is for photographs of any size"),
        ({"color_jitter": 0.4}, "--color-jitter runs on the CPU; leave one of them out"),
        ({"auto_augment": "rand-augment"}, "--auto-augment runs on the CPU"),
        ({"random_erasing": 0.25}, "--random-erasing runs on the CPU"),
    ],
)
def test_what_only_the_host_can_do_is_refused_by_its_option(folder, change, message):
    transform = TransformSpec(**{"augment": "resized-crop", **change})
    with pytest.raises(ConfigError, match="--gpu-decode: ") as caught:
        GpuDecoder(reader_of(folder, "train", transform=transform), CPU, decode=stand_in)
    assert message in str(caught.value)


def test_options_of_training_do_not_hinder_scoring(folder):
    transform = TransformSpec(
        augment="resized-crop", color_jitter=0.4, auto_augment="rand-augment", random_erasing=0.5
    )
    assert_same_batch(folder, "valid", transform=transform)


def test_a_cpu_is_no_gpu():
    assert find_gpu_decode_problem(CPU) == "cpu is not a usable CUDA device"


# --- on a GPU ---


@pytest.mark.gpu
@gpu_only
@pytest.mark.parametrize("split", ["train", "valid"])
def test_nvjpeg_gives_the_readers_batch(spoiled, split):
    device = torch.device("cuda")
    why = find_gpu_decode_problem(device)
    if why:
        pytest.skip(why)
    reader, twin = reader_of(spoiled, split), reader_of(spoiled, split)
    positions = np.arange(COUNT)
    expected, known = fill_on_host(twin, positions)
    pixels, rows, decoder = fill_on_device(reader, positions, decode=None, device=device)
    assert rows.indices.tolist() == known.indices.tolist() and decoder.failed_calls == 0
    assert reader.problems == twin.problems
    assert_alike(pixels, expected)


@pytest.mark.gpu
@gpu_only
def test_cutting_on_the_gpu_is_cutting_on_the_cpu():
    parts, flips = list(PARTS.values()), [row % 2 == 0 for row in range(len(PARTS))]
    here = crop_and_resize(TENSORS, parts, flips, size=SIZE)
    there = crop_and_resize([tensor.cuda() for tensor in TENSORS], parts, flips, size=SIZE).cpu()
    assert (here.int() - there.int()).abs().max() <= 1
