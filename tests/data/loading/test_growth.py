"""Progressive resolution and repeated augmentation."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from phalanx.data.loading.loader import Loader
from phalanx.data.loading.reader import InputSpec
from phalanx.plan.order import Order
from small_batches import GLOBAL_BATCH, assert_same, photo_spec


@pytest.mark.parametrize("workers", [0, 2])
def test_images_grow_at_the_steps_that_are_named(photos, workers):
    spec = photo_spec(photos, growth=((2, 16), (3, 24)))
    with Loader(spec, workers=workers) as loader:
        steps = [step for [step] in loader.steps_from(0, 5, micro_batch=GLOBAL_BATCH)]
        assert [step.pixels.shape[1:3] for step in steps] == [
            (16, 16), (16, 16), (24, 24), (32, 32), (32, 32),
        ]  # fmt: skip
        assert all(batch.pixels.shape[1] == 32 for batch in loader.evaluation_batches(3))
    with Loader(replace(spec, growth=(), image_size=16), workers=0) as small:
        assert_same(
            steps[:2], [step for [step] in small.steps_from(0, 2, micro_batch=GLOBAL_BATCH)]
        )
    with Loader(spec, workers=0) as again:  # as a resume begins
        assert_same(
            steps[2:3], [step for [step] in again.steps_from(2, 3, micro_batch=GLOBAL_BATCH)]
        )


def test_growth_travels_to_workers():
    spec = photo_spec("somewhere", growth=((2, 16), (3, 24)))
    assert InputSpec.from_dict(spec.to_dict()) == spec


def test_an_image_comes_as_often_in_a_row_as_told():
    once, thrice = (Order(images=10, global_batch=6, seed=2, repeats=n) for n in (1, 3))
    order = once.indices(np.arange(20))
    assert thrice.indices(np.arange(60)).tolist() == np.repeat(order, 3).tolist()
    walked = Counter(thrice.indices(np.arange(30)).tolist())
    assert walked == dict.fromkeys(range(10), 3)  # all images, as many epochs as repeats


def test_repeats_are_augmented_anew(photos):
    order = Order(images=23, global_batch=GLOBAL_BATCH, seed=5, repeats=4)
    with Loader(photo_spec(photos, order=order), workers=0) as loader:
        [[step]] = loader.steps_from(0, 1, micro_batch=GLOBAL_BATCH)
    assert step.indices.reshape(-1, 4).min(1).tolist() == step.indices[::4].tolist()
    assert len({row.tobytes() for row in step.pixels}) == GLOBAL_BATCH
