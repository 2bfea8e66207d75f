"""Sets on the device: the pixels of the host, byte for byte."""

import numpy as np
import pytest
import torch

from phalanx.data.loading.loader import Loader
from phalanx.data.loading.reader import Reader, ReadingNotes
from phalanx.data.loading.resident import STRETCH, ResidentFiller, stretches_of, why_not_resident
from phalanx.data.loading.worker_pool import BatchRequest
from phalanx.data.transforms.transform import TransformSpec
from small_batches import GLOBAL_BATCH, assert_same, embedded_recipe, photo_recipe

CPU = torch.device("cpu")


def in_numpy(batches):
    return [
        type(b)(b.pixels.numpy(), np.asarray(b.labels), b.indices, b.positions) for b in batches
    ]


@pytest.mark.parametrize("augment", ["pad-crop", "none"])
def test_batches_are_those_of_the_host(augment):
    recipe = embedded_recipe(treatment=TransformSpec(augment=augment))
    with (
        Loader(recipe, workers=0) as host,
        Loader(recipe, workers=2, filler=lambda reader: ResidentFiller(reader, CPU)) as device,
    ):
        ours = [step for [step] in host.steps_from(198, 202, micro_batch=GLOBAL_BATCH)]
        theirs = [step for [step] in device.steps_from(198, 202, micro_batch=GLOBAL_BATCH)]
        assert_same(ours, in_numpy(theirs))
        # 1,500 images in threes of 500: nothing is left to pad, which only the host does
        assert_same(host.evaluation(500), in_numpy(device.evaluation(500)))
        assert [len(batch.labels) for batch in device.evaluation(700)] == [700, 700, 100]


def test_images_in_colour_keep_their_channels():
    reader = Reader(embedded_recipe(), "train", findings=ReadingNotes(), max_bad=None)
    grey = reader.source
    colour = type(grey)(
        pixels=np.random.default_rng(0).integers(0, 256, (8000, 28, 28, 3), np.uint8),
        labels=grey.labels,
        classes=grey.classes,
        files=grey.files,
    )
    reader.source = colour
    keys = np.arange(100, 140)
    expected = np.empty((40, 28, 28, 3), np.uint8)
    reader.fill(keys, expected)
    filler = ResidentFiller(reader, CPU)
    found = next(filler.batches([BatchRequest(keys, 28)]))
    assert np.array_equal(found.pixels.numpy(), expected)


def test_wishes_come_in_stretches_and_end():
    wishes = [
        BatchRequest(np.arange(first, first + 10_000), 28) for first in range(0, 80_000, 10_000)
    ]
    portions = list(stretches_of(iter(wishes)))
    assert [len(portion) for portion in portions] == [3, 3, 2]
    assert [wish for portion in portions for wish in portion] == wishes
    large = BatchRequest(np.arange(STRETCH + 1), 28)
    assert [len(portion) for portion in stretches_of([large, large])] == [1, 1]


def test_what_the_host_must_do_is_named(photos):
    embedded = embedded_recipe().open("train")
    assert why_not_resident(embedded_recipe(), embedded) == ""
    assert "resized" in why_not_resident(embedded_recipe(image_size=32), embedded)
    assert "resized" in why_not_resident(embedded_recipe(growth=((5, 20),)), embedded)
    jitter = TransformSpec(augment="pad-crop", jitter=0.4)
    assert "--color-jitter" in why_not_resident(embedded_recipe(treatment=jitter), embedded)
    folder = photo_recipe(photos)
    assert "one array" in why_not_resident(folder, folder.open("train"))
