"""Sets on the device: the pixels of the host, byte for byte."""

import numpy as np
import pytest
import torch

from phalanx.data.loading.loader import Loader
from phalanx.data.loading.reader import BatchRequest, Reader
from phalanx.data.loading.resident import (
    BLOCK,
    ResidentBackend,
    find_resident_problem,
    group_requests,
)
from phalanx.data.transforms.transform import TransformSpec
from phalanx.plan.share import Share
from small_batches import GLOBAL_BATCH, assert_same, embedded_spec, photo_spec

CPU = torch.device("cpu")


def in_numpy(batches):
    return [
        type(b)(b.pixels.numpy(), np.asarray(b.labels), b.indices, b.positions) for b in batches
    ]


TRANSFORMS = {
    "pad-crop": TransformSpec(augment="pad-crop"),
    "reflected": TransformSpec(augment="pad-crop", shift=2, reflects=True, alternates=True),
    "none": TransformSpec(augment="none"),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_batches_are_those_of_the_host(transform):
    spec = embedded_spec(transform=transform)
    with (
        Loader(spec, workers=0) as host,
        Loader(spec, workers=2, backend=lambda reader, _: ResidentBackend(reader, CPU)) as device,
    ):
        ours = [step for [step] in host.steps_from(198, 202, micro_batch=GLOBAL_BATCH)]
        theirs = [step for [step] in device.steps_from(198, 202, micro_batch=GLOBAL_BATCH)]
        assert_same(ours, in_numpy(theirs))
        # 1,500 images in threes of 500: nothing is left to pad, which only the host does
        assert_same(host.evaluation_batches(500), in_numpy(device.evaluation_batches(500)))
        assert [len(batch.labels) for batch in device.evaluation_batches(700)] == [700, 700, 100]


def test_shares_are_slices_of_the_whole():
    spec = embedded_spec()
    with Loader(spec, workers=0, backend=lambda reader, _: ResidentBackend(reader, CPU)) as loader:
        whole = list(loader.steps_from(198, 202, micro_batch=10))
        for replica in range(2):
            own = list(loader.steps_from(198, 202, micro_batch=10, share=Share((replica,), 2)))
            for expected, batches in zip(whole, own, strict=True):
                assert_same(in_numpy(expected[replica::2]), in_numpy(batches))
        scored = [in_numpy(loader.evaluation_batches(500, share=Share((r,), 2))) for r in range(2)]
        assert_same(
            in_numpy(loader.evaluation_batches(500)), [scored[0][0], scored[1][0], scored[0][1]]
        )


def test_images_in_colour_keep_their_channels():
    reader = Reader(embedded_spec(), "train")
    grey = reader.source
    colour = type(grey)(
        pixels=np.random.default_rng(0).integers(0, 256, (8000, 28, 28, 3), np.uint8),
        labels=grey.labels,
        classes=grey.classes,
        files=grey.files,
    )
    reader.source = colour
    positions = np.arange(100, 140)
    expected = np.empty((40, 28, 28, 3), np.uint8)
    reader.fill(positions, expected)
    backend = ResidentBackend(reader, CPU)
    found = next(backend.batches([BatchRequest(positions, 28)]))
    assert np.array_equal(found.pixels.numpy(), expected)


def test_requests_come_in_groups_and_end():
    requests = [
        BatchRequest(np.arange(first, first + 10_000), 28) for first in range(0, 80_000, 10_000)
    ]
    groups = list(group_requests(iter(requests)))
    assert [len(group) for group in groups] == [3, 3, 2]
    assert [request for group in groups for request in group] == requests
    large = BatchRequest(np.arange(BLOCK + 1), 28)
    assert [len(group) for group in group_requests([large, large])] == [1, 1]


def test_what_the_host_must_do_is_named(photos):
    embedded = embedded_spec().open("train")
    assert find_resident_problem(embedded_spec(), embedded) == ""
    assert "resized" in find_resident_problem(embedded_spec(image_size=32), embedded)
    assert "resized" in find_resident_problem(embedded_spec(growth=((5, 20),)), embedded)
    jitter = TransformSpec(augment="pad-crop", color_jitter=0.4)
    assert "--color-jitter" in find_resident_problem(embedded_spec(transform=jitter), embedded)
    folder = photo_spec(photos)
    assert "one array" in find_resident_problem(folder, folder.open("train"))
