"""Order and shares for any set, batch, seed and number of replicas: every image once an epoch."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phalanx.plan.order import Order
from phalanx.plan.share import Share

IMAGES = st.one_of(st.integers(1, 40), st.integers(41, 5000))
SEEDS = st.integers(0, 2**64 - 1)
EPOCHS = st.one_of(st.integers(0, 5), st.integers(6, 10**9))


def count_seen(order, positions):
    return np.bincount(order.indices(positions), minlength=order.images)


@given(images=IMAGES, seed=SEEDS, epoch=EPOCHS)
def test_an_epoch_holds_every_image_once(images, seed, epoch):
    order = Order(images=images, global_batch=1, seed=seed)
    assert (count_seen(order, epoch * images + np.arange(images)) == 1).all()


@given(images=IMAGES, seed=SEEDS, repeats=st.integers(2, 5))
def test_a_repeated_image_comes_in_a_row_and_as_often(images, seed, repeats):
    order = Order(images=images, global_batch=1, seed=seed, repeats=repeats)
    walk = order.indices(np.arange(images * repeats)).reshape(images, repeats)
    assert (walk == walk[:, :1]).all() and sorted(walk[:, 0]) == list(range(images))


@given(images=st.integers(1, 500), batch=st.integers(1, 600), seed=SEEDS)
def test_steps_see_every_image_equally_often(images, batch, seed):
    order = Order(images=images, global_batch=batch, seed=seed)
    steps = -(-2 * images // batch)  # two epochs, and what the last step takes of a third
    positions = np.concatenate([order.positions(step) for step in range(steps)])
    assert positions.tolist() == list(range(steps * batch))
    seen = count_seen(order, positions)
    assert seen.max() - seen.min() <= 1 and seen.min() == steps * batch // images


@given(batch=st.integers(1, 60), whole=st.integers(1, 20), tail=st.integers(0, 59), seed=SEEDS)
def test_without_its_tail_an_epoch_sees_no_image_twice(batch, whole, tail, seed):
    images = batch * whole + tail % batch
    order = Order(images=images, global_batch=batch, seed=seed, drop_tail=True)
    for epoch in (0, 3):
        steps = range(epoch * whole, (epoch + 1) * whole)
        positions = np.concatenate([order.positions(step) for step in steps])
        assert set(positions // images) == {epoch}
        seen = count_seen(order, positions)
        assert seen.max() == 1 and seen.sum() == batch * whole


@given(images=IMAGES, seed=SEEDS, places=st.lists(st.integers(0, 2**40), min_size=1, max_size=9))
def test_an_image_depends_on_its_position_alone(images, seed, places):
    order = Order(images=images, global_batch=1, seed=seed)
    assert order.indices(places).tolist() == [int(order.indices(place)) for place in places]


@given(replicas=st.integers(1, 64), each=st.integers(1, 30))
def test_shares_part_a_step_among_all_replicas(replicas, each):
    shares = [Share((replica,), replicas).slices(replicas * each) for replica in range(replicas)]
    assert sorted(number for share in shares for number in share) == list(range(replicas * each))
    for turn in range(each):  # together they go through the step from its begin to its end
        now = {share[turn] for share in shares}
        assert now == set(range(turn * replicas, (turn + 1) * replicas))


@given(replicas=st.integers(1, 64), count=st.integers(0, 500))
def test_shares_part_what_is_scored(replicas, count):
    shares = [Share((replica,), replicas).batches(count) for replica in range(replicas)]
    assert sorted(number for share in shares for number in share) == list(range(count))
