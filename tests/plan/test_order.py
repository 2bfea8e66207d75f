import os
import subprocess
import sys

import numpy as np
import pytest

from phalanx.errors import ConfigError
from phalanx.plan.order import Order


def epoch_of(order, epoch):
    return order.indices(np.arange(order.images) + epoch * order.images)


@pytest.mark.parametrize("epoch", [0, 1, 1000])
def test_every_epoch_of_every_small_set_is_a_permutation(epoch):
    for images in range(1, 301):
        order = Order(images=images, global_batch=8, seed=images)
        assert sorted(epoch_of(order, epoch).tolist()) == list(range(images)), images


@pytest.mark.parametrize("images", [8_000, 65_536, 65_537, 1_281_167])
def test_an_epoch_of_a_large_set_is_a_permutation(images):
    counts = np.bincount(epoch_of(Order(images=images, global_batch=8, seed=9), 2))
    assert len(counts) == images and (counts == 1).all()


def test_the_order_keeps_its_values_for_ever():
    small = Order(images=10, global_batch=4, seed=0)
    assert small.indices(np.arange(20)).tolist() == [
        *(7, 3, 5, 8, 9, 0, 6, 1, 2, 4),
        *(4, 2, 3, 9, 0, 1, 8, 5, 7, 6),
    ]
    large = Order(images=1_281_167, global_batch=4, seed=42)
    places = [0, 1, 1_281_167, 10**12]
    assert large.indices(places).tolist() == [1276586, 629360, 771285, 996823]


def test_epochs_and_seeds_differ():
    order, other = (Order(images=1000, global_batch=8, seed=seed) for seed in (1, 2))
    agreements = [
        (epoch_of(order, 0) == epoch_of(order, 1)).sum(),
        (epoch_of(order, 0) == epoch_of(other, 0)).sum(),
    ]
    assert max(agreements) < 10  # chance gives one


@pytest.mark.parametrize("images", [500, 8_000, 60_000])
def test_the_order_is_well_mixed(images):
    places = np.arange(images)
    for epoch in range(3):
        landed = epoch_of(Order(images=images, global_batch=8, seed=4), epoch)
        assert abs(np.corrcoef(places, landed)[0, 1]) < 5 / np.sqrt(images)
        assert abs(np.corrcoef(landed[:-1], landed[1:])[0, 1]) < 5 / np.sqrt(images)
        displacement = np.abs(places - landed).mean() / images  # a third, by chance
        assert abs(displacement - 1 / 3) < 1.2 / np.sqrt(images)


def test_all_orders_of_a_tiny_set_occur_equally_often():
    order = Order(images=3, global_batch=1, seed=1)
    epochs = order.indices(np.arange(3 * 3000)).reshape(-1, 3)
    orders, counts = np.unique(epochs, axis=0, return_counts=True)
    assert len(orders) == 6
    assert ((counts - 500) ** 2 / 500).sum() < 25  # chi-square, five degrees of freedom


@pytest.mark.parametrize("global_batch", [1, 7, 10, 64])
def test_steps_tile_the_stream(global_batch):
    order = Order(images=10, global_batch=global_batch, seed=1)
    stream = np.concatenate([order.positions(step) for step in range(5)])
    assert stream.tolist() == list(range(5 * global_batch))


def test_a_dropped_tail_never_straddles_epochs():
    order = Order(images=10, global_batch=4, seed=1, drop_tail=True)
    steps = [order.positions(step).tolist() for step in range(4)]
    assert steps == [[0, 1, 2, 3], [4, 5, 6, 7], [10, 11, 12, 13], [14, 15, 16, 17]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"images": 0, "global_batch": 4}, "at least one image"),
        ({"images": 3, "global_batch": 4, "drop_tail": True}, "--epoch-tail carry"),
    ],
)
def test_an_impossible_order_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        Order(seed=0, **values)


def test_the_order_needs_numpy_alone():
    code = "import sys, phalanx.plan.order; print({'torch', 'cv2', 'PIL'} & set(sys.modules))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert answer.stdout == "set()\n"
