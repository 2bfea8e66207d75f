"""--dataset-cache: files are read once, by whoever comes first, and the batches stay the same."""

import os

import numpy as np
import pytest

from phalanx.data.loading.cache import SharedCaches, open_caches, read_free_memory, refuse_too_large
from phalanx.data.loading.loader import Loader
from phalanx.errors import ConfigError
from small_batches import GLOBAL_BATCH, assert_same, embedded_spec, photo_spec


def walk(spec, *, workers, cache):
    with Loader(spec, workers=workers, cache=cache) as loader:
        steps = [step for [step] in loader.steps_from(0, 4, micro_batch=GLOBAL_BATCH)]
        return steps, list(loader.evaluation_batches(3))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same_with_a_cache(photos, workers):
    plain, cached = (walk(photo_spec(photos), workers=workers, cache=c) for c in (False, True))
    assert_same(plain[0], cached[0])
    assert_same(plain[1], cached[1])


def test_a_file_is_read_once_and_then_no_more(photos, tmp_path):
    spec = photo_spec(photos)
    with Loader(spec, workers=2, cache=True) as loader:
        steps = loader.steps_from(0, 50, micro_batch=GLOBAL_BATCH)
        for _ in range(20):  # every image came by
            next(steps)
        files = list((photos / "train").rglob("*.jpg"))
        for file in files:
            os.rename(file, tmp_path / file.name)
        try:
            list(steps)
            assert loader.problems["train"].bad_images == {}
        finally:
            for file in files:
                os.rename(tmp_path / file.name, file)


def test_a_cache_is_seen_by_every_process_that_opens_it(photos):
    spec = photo_spec(photos)
    source = spec.open("train")
    shared = SharedCaches({"train": source, "valid": spec.open("valid")}, "here")
    ours, theirs = shared.caches["train"], open_caches(shared.handle)["train"]
    assert ours.get(3) is None
    data = source.read_encoded(3)
    theirs.put(3, data)
    assert ours.get(3) == data and ours.get(2) is None and ours.get(4) is None
    theirs.put(4, data + b"longer than the index says")
    assert ours.get(4) is None
    shared.close()


def test_sets_in_memory_need_no_cache():
    with Loader(embedded_spec(), workers=0, cache=True) as loader:
        [[batch]] = loader.steps_from(0, 1, micro_batch=GLOBAL_BATCH)
    assert batch.pixels.shape == (GLOBAL_BATCH, 28, 28, 3)


def test_a_set_that_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"10\.0 GiB, but may use only 80% of the 12\.0 GiB"):
        refuse_too_large(10 << 30, 12 << 30, "photos")
    refuse_too_large(9 << 30, 12 << 30, "photos")


def test_free_memory_is_what_the_system_says():
    assert 1 << 26 < read_free_memory() < 1 << 50
    assert read_free_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_images_per_task_do_not_change_batches(photos):
    spec = photo_spec(photos)
    with Loader(spec, workers=0) as alone, Loader(spec, workers=2, images_per_task=7) as other:
        ours, theirs = (
            [step for [step] in loader.steps_from(2, 5, micro_batch=GLOBAL_BATCH)]
            for loader in (alone, other)
        )
    assert_same(ours, theirs)
    assert np.array_equal(ours[0].positions, np.arange(80, 120))
