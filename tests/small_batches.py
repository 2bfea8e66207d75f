"""Input specs of small sets, and batches compared."""

import numpy as np

from phalanx.data.loading.reader import InputSpec
from phalanx.data.transforms.transform import TransformSpec
from phalanx.plan.order import Order

GLOBAL_BATCH = 40
FIELDS = ("pixels", "labels", "indices", "positions")
PAD_CROP, RESIZED_CROP = TransformSpec(augment="pad-crop"), TransformSpec(augment="resized-crop")


def embedded_spec(**values):
    order = Order(images=8000, global_batch=GLOBAL_BATCH, seed=5)
    values = {
        "data": "embedded",
        "image_size": 28,
        "transform": PAD_CROP,
        "order": order,
        **values,
    }
    return InputSpec(seed=5, **values)


def photo_spec(root, **values):
    order = Order(images=23, global_batch=GLOBAL_BATCH, seed=5)
    values = {
        "image_size": 32,
        "transform": RESIZED_CROP,
        "order": order,
        **values,
    }
    return InputSpec(data="folder", data_dir=str(root), seed=5, **values)


def joined(batches):
    batches = list(batches)
    return [np.concatenate([getattr(batch, name) for batch in batches]) for name in FIELDS]


def assert_same(some, others):
    for name, a, b in zip(FIELDS, joined(some), joined(others), strict=True):
        assert np.array_equal(a, b), f"{name} differ"
