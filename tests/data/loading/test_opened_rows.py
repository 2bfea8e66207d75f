"""JPEGs that the cores and a GPU share: the same batches whoever opens the files."""

import os
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from phalanx.data.convert.sample import Sample
from phalanx.data.loading import opened_rows
from phalanx.data.loading.gpu_decode import GpuDecoder, find_gpu_decode_problem
from phalanx.data.loading.gpu_share import GpuShare
from phalanx.data.loading.loader import Loader
from phalanx.data.loading.reader import BatchRequest, Reader
from phalanx.errors import DataError
from phalanx.plan.share import Share
from small_jpegs import (
    COUNT,
    SIZE,
    SPOILED,
    end_in_scan,
    open_loader,
    spec_of,
    stand_in,
    write_files,
)
from small_photos import encode, photo
from small_samples import write_split

FIELDS = ("pixels", "labels", "indices", "positions")
STEPS = 3  # every image comes that often
gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def end_amid_rows(data):
    """A JPEG that the GPU's decoder refuses, and of which Pillow shows what is there."""
    return data[: len(data) // 2] + b"\xff\xd9"


REFUSED = {2: end_in_scan, 6: end_amid_rows, 7: end_amid_rows, 13: end_in_scan}
BAD = sorted({**SPOILED, 2: None, 13: None})


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("spoiled"), SPOILED | REFUSED)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("whole"), {})


def join(batches):
    """Pixels, labels, indices and positions of batches, padding aside."""
    parts = [
        {name: np.asarray(getattr(batch, name)) for name in FIELDS} | {"real": batch.positions >= 0}
        for batch in batches
    ]
    return {n: np.concatenate([part[n][part["real"]] for part in parts]) for n in FIELDS}


def read_all(loader, steps=STEPS):
    """What training and scoring see, and what was found to be bad or small."""
    with loader:
        trained = join(b for step in loader.steps_from(0, steps, micro_batch=8) for b in step)
        scored = join(loader.evaluation_batches(7))
        found = [
            {split: sorted(getattr(problems, what)) for split, problems in loader.problems.items()}
            for what in ("bad_images", "notes")
        ]
    assert not [thread for thread in threading.enumerate() if "prefetch" in thread.name]
    return trained, scored, found


def assert_equal(some, others):
    for a, b in zip(some[:2], others[:2], strict=True):
        for name in FIELDS:
            assert np.array_equal(a[name], b[name]), name
    assert some[2] == others[2]


@pytest.fixture(scope="module")
def alone(spoiled):
    """What this process makes of spoiled files without workers, by share."""
    return {percent: read_all(open_loader(spoiled, percent=percent)) for percent in (7, 40, 100)}


@pytest.mark.parametrize(("percent", "workers"), [(7, 2), (40, 1), (40, 3), (100, 1), (100, 3)])
def test_batches_are_the_same_for_any_number_of_workers(spoiled, alone, percent, workers):
    assert_equal(read_all(open_loader(spoiled, percent=percent, workers=workers)), alone[percent])


@pytest.mark.parametrize("kind", ["whole", "spoiled"])
def test_a_share_has_the_gpus_rows_at_its_positions_and_the_cores_rows_elsewhere(
    request, kind, alone
):
    root = request.getfixturevalue(kind)
    shared = alone[40] if kind == "spoiled" else read_all(open_loader(root, percent=40))
    gpu = alone[100] if kind == "spoiled" else read_all(open_loader(root))
    with Loader(spec_of(root, percent=0), workers=0) as loader:
        cores = read_all(loader)
    assert shared[2] == gpu[2] == cores[2]
    for mixed, there, here in zip(shared[:2], gpu[:2], cores[:2], strict=True):
        takes = mixed["positions"] * 40 % 100 < 40
        assert (mixed["pixels"][takes] == there["pixels"][takes]).all()
        assert (mixed["pixels"][~takes] == here["pixels"][~takes]).all()
        apart = (there["pixels"] != here["pixels"]).any(axis=(1, 2, 3))
        assert apart[takes].any() and apart[~takes].any()
        for name in ("labels", "indices"):
            assert (mixed[name] == here[name]).all() and (there[name] == here[name]).all()


def test_bad_files_of_both_kinds_are_found_and_replaced(alone):
    for trained, scored, (bad, _) in alone.values():
        assert bad == {"train": BAD, "valid": BAD}
        assert not set(BAD) & set(trained["indices"].tolist())
        assert np.flatnonzero(scored["indices"] < 0).tolist() == BAD
        assert (scored["pixels"][BAD] == 0).all()


@pytest.mark.parametrize("workers", [0, 5])
def test_too_many_bad_files_end_the_run(tmp_path, workers):
    root, told = write_files(tmp_path, SPOILED), "more than 3 training images cannot be read"
    loader = open_loader(root, percent=40, workers=workers, max_bad=3)
    with loader, pytest.raises(DataError, match=told):
        list(loader.steps_from(0, 1, micro_batch=8))  # five tasks: no worker meets all four


def test_what_no_decoder_takes_is_tried_once(tmp_path):
    root = write_files(tmp_path, {2: end_in_scan})
    calls = []

    def count(files):
        calls.append(len(files))
        return stand_in(files)

    with open_loader(root, workers=2, decode=count) as loader:
        steps = loader.steps_from(0, 24, micro_batch=COUNT)
        next(steps)
        assert len(calls) > COUNT / 2  # one by one
        for _ in range(5):  # some were under way when it was found
            next(steps)
        calls.clear()  # a batch may be under way
        for _ in range(6):
            next(steps)
        assert len(calls) <= 18  # two a batch: what stands in for it is decoded alone, until ...
        for _ in range(4):
            next(steps)
        calls.clear()
        assert len(list(steps)) == 8
        # ... workers know: without three of another kind, and with what stands in for it
        assert set(calls) == {COUNT - 3} and len(calls) <= 8


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_finds_no_room_is_read_where_it_is_decoded(tmp_path, workers, monkeypatch):
    root = write_files(tmp_path, {3: lambda data: encode(photo(3, size=(900, 700)))})
    expected = read_all(open_loader(root))
    monkeypatch.setattr(opened_rows, "_MOST_ROOM", 0)  # a row has room for its pixels, 3 kB
    loader = open_loader(root, workers=workers)
    reader, read_here = loader.reader("valid"), []
    usual = reader.try_open

    def count(index):
        read_here.append(index)
        return usual(index)

    monkeypatch.setattr(reader, "try_open", count)
    assert_equal(read_all(loader), expected)
    assert read_here.count(3) == (1 if workers else 2)


@pytest.mark.parametrize(
    ("form", "cache"), [("packed", 1), ("tar", 1), ("tfrecord", 1), ("parquet", 0)]
)
def test_pieces_of_large_files_are_shared_and_cached(tmp_path, form, cache):
    if form == "parquet":
        pytest.importorskip("pyarrow", reason="needs phalanx[parquet]")
    samples = [
        Sample(name=f"{seed}.jpg", data=encode(photo(seed)), label=seed % 2)
        for seed in range(COUNT)
    ]
    for split in ("train", "valid"):
        write_split(form, samples, tmp_path, split, classes=("cat", "dog"))
    options = {"percent": 40, "data": form}
    expected = read_all(open_loader(tmp_path, **options))
    loader = open_loader(tmp_path, **options, workers=2, cache=cache)
    kept = loader._caches.caches["train"] if cache else None
    assert_equal(read_all(loader), expected)
    assert kept is None or all(kept.get(index) is not None for index in range(COUNT))


def test_a_row_has_room_for_twice_the_mean(whole):
    sizes = [path.stat().st_size for path in (whole / "train").rglob("*.jpg")]
    reader = Reader(spec_of(whole, percent=40), "train")
    assert opened_rows.find_row_bytes(reader) == max(3 * SIZE**2, 2 * int(np.mean(sizes)))
    assert opened_rows.find_row_bytes(Reader(spec_of(whole, percent=0), "train")) == 3 * SIZE**2


def test_what_a_gpu_shall_decode_needs_one(whole):
    with pytest.raises(ValueError, match="40% of the images are left to a GPU, and none is given"):
        Loader(spec_of(whole, percent=40), workers=2)


def test_two_threads_may_wait_for_workers(whole):
    with open_loader(whole, percent=40, workers=2) as loader:
        pool, found = loader._open_pool(), {}

        def take(split):
            requests = [BatchRequest(np.array([n % COUNT]), SIZE) for n in range(1000)]
            found[split] = [rows.indices.tolist() for rows in pool.stream(split, requests)]

        threads = [threading.Thread(target=take, args=(split,)) for split in ("train", "valid")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found["valid"] == [[n % COUNT] for n in range(1000)]
        assert len(found["train"]) == 1000


def test_batches_are_the_same_when_a_worker_had_to_be_started_again(spoiled, alone):
    loader = open_loader(spoiled, percent=40, workers=2)
    os.kill(loader._open_pool().workers[0].process.pid, signal.SIGKILL)
    trained, scored, (bad, notes) = read_all(loader)
    assert notes["train"].pop(0) == -1  # of the worker
    assert_equal((trained, scored, [bad, notes]), alone[40])


@pytest.mark.parametrize("workers", [0, 2])
def test_shares_of_ranks_are_slices_of_the_whole(whole, workers):
    with open_loader(whole, percent=40, workers=workers) as loader:
        expected = next(loader.steps_from(3, 4, micro_batch=4))
        scored = list(loader.evaluation_batches(5))
        for rank in range(2):
            share = Share((rank,), 2)
            own = next(loader.steps_from(3, 4, micro_batch=4, share=share))
            pairs = [*zip(expected[rank::2], own, strict=True)]
            pairs += zip(scored[rank::2], loader.evaluation_batches(5, share), strict=True)
            for one, other in pairs:
                assert torch.equal(one.pixels, other.pixels)
                assert one.indices.tolist() == other.indices.tolist()


def test_scoring_amid_training_disturbs_neither(whole):
    undisturbed, scored, _ = read_all(open_loader(whole, percent=40), steps=12)
    with open_loader(whole, percent=40, workers=2) as loader:
        steps = []
        for step in loader.steps_from(0, 12, micro_batch=8):  # a thread reads on meanwhile
            steps += step
            if len(steps) % 9 == 0:
                assert (join(loader.evaluation_batches(7))["pixels"] == scored["pixels"]).all()
            if len(steps) == 15:
                next(loader.evaluation_batches(7))  # left after one batch
        assert (join(steps)["pixels"] == undisturbed["pixels"]).all()


def test_a_changed_file_is_noticed_in_either_kind_of_row(tmp_path):
    root = write_files(tmp_path, {})
    with open_loader(root, percent=40, workers=2) as loader:
        list(loader.steps_from(0, 1, micro_batch=8))
        seen = loader.image_checksums
    assert (seen["train"] != 0).all()
    order = spec_of(root).order
    images = order.indices(np.arange(COUNT)).tolist()
    is_gpu_row = GpuShare(40).find_rows(np.arange(COUNT)).tolist()
    for kind in (True, False):  # of the cat's, which have the first numbers
        number = next(i for i, gpu in zip(images, is_gpu_row, strict=True) if gpu == kind and i < 3)
        path = root / "train" / "cat" / f"{number:02}.jpg"
        data = path.read_bytes()
        path.write_bytes(data[:-40] + bytes(38) + data[-2:])
        with open_loader(root, percent=40) as loader:
            loader.restore_checksums(seen)
            with pytest.raises(DataError, match=f"{number:02}.jpg .*its contents have changed"):
                list(loader.steps_from(0, 1, micro_batch=8))
        path.write_bytes(data)


def test_a_loader_can_be_closed_amid_its_work(whole):
    loader = open_loader(whole, percent=40, workers=2)
    for amount in (0, 1):
        steps = loader.steps_from(0, 1000, micro_batch=8)
        for _ in range(amount):
            next(steps)
    loader.close()
    loader.close()
    assert not [thread for thread in threading.enumerate() if "prefetch" in thread.name]


@pytest.mark.gpu
@gpu_only
def test_a_gpu_shares_with_workers_to_the_same_bits(tmp_path):
    device = torch.device("cuda")
    if why := find_gpu_decode_problem(device):
        pytest.skip(why)
    # none of the REFUSED: JPEGs with a hole, which nvJPEG may take, decode to anything
    spoiled = write_files(tmp_path, SPOILED)

    def read(workers, percent):
        def build(reader, open_rows):
            return GpuDecoder(reader, device, open_rows=open_rows)

        spec = spec_of(spoiled, percent=percent)
        loader = Loader(spec, workers=workers, backend=build, images_per_task=5)
        with loader:
            batches = [b for step in loader.steps_from(0, STEPS, micro_batch=8) for b in step]
            batches += loader.evaluation_batches(7)
            for batch in batches:
                if batch.ready is not None:
                    batch.ready.synchronize()
            return join([replace(batch, pixels=batch.pixels.cpu()) for batch in batches])

    mixed, there = read(0, 40), read(0, 100)
    takes = mixed["positions"] * 40 % 100 < 40
    assert (mixed["pixels"][takes] == there["pixels"][takes]).all()
    for workers in (1, 3):
        again = read(workers, 40)
        assert all((again[name] == mixed[name]).all() for name in FIELDS)
