import numpy as np
import pytest

from phalanx.data.loading.loader import Loader
from phalanx.data.loading.reader import InputSpec
from phalanx.data.transforms.transform import TransformSpec
from phalanx.errors import DataError
from phalanx.plan.order import Order
from phalanx.plan.share import Share
from small_batches import GLOBAL_BATCH, PAD_CROP, assert_same, embedded_spec, joined, photo_spec
from small_photos import write_photos


def spec_for(data, photos):
    return embedded_spec() if data == "embedded" else photo_spec(photos)


@pytest.mark.parametrize("data", ["embedded", "photos"])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_batches_are_the_same_for_any_number_of_workers(data, photos, workers):
    spec = spec_for(data, photos)
    with Loader(spec, workers=0) as alone, Loader(spec, workers=workers) as shared:
        ours = [step for [step] in alone.steps_from(3, 9, micro_batch=GLOBAL_BATCH)]
        theirs = [step for [step] in shared.steps_from(3, 9, micro_batch=GLOBAL_BATCH)]
        assert len(ours) == len(theirs) == 6
        assert_same(ours, theirs)
        assert_same(alone.evaluation_batches(3), shared.evaluation_batches(3))


@pytest.mark.parametrize("data", ["embedded", "photos"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_is_the_same_however_it_is_reached_and_split(data, photos, workers):
    with Loader(spec_for(data, photos), workers=workers) as loader:
        walked = list(loader.steps_from(0, 6, micro_batch=GLOBAL_BATCH))[5]
        for micro_batch in (1, 8, 20):
            [sought] = loader.steps_from(5, 6, micro_batch=micro_batch)
            assert len(sought) == GLOBAL_BATCH // micro_batch
            assert all(len(batch.labels) == micro_batch for batch in sought)
            assert_same(walked, sought)


def test_a_batch_holds_what_its_order_says(photos):
    spec = photo_spec(photos)
    with Loader(spec, workers=0) as loader:
        [[batch]] = loader.steps_from(7, 8, micro_batch=GLOBAL_BATCH)
        assert batch.positions.tolist() == list(range(280, 320))
        assert (batch.indices == spec.order.indices(batch.positions)).all()
        assert (batch.labels == loader.source("train").labels[batch.indices]).all()
        assert batch.pixels.shape == (40, 32, 32, 3) and batch.pixels.dtype == np.uint8
        assert batch.labels.dtype == batch.indices.dtype == np.int64
        assert loader.source("train").name(0) == "train/cat/00.jpg"


def test_the_same_image_looks_different_each_time():
    spec = embedded_spec(order=Order(images=8000, global_batch=8000, seed=5))
    with Loader(spec, workers=0) as loader:
        first, second = (step for [step] in loader.steps_from(0, 2, micro_batch=8000))
    second_by_image = second.pixels[np.argsort(second.indices)]
    same = (first.pixels[np.argsort(first.indices)] == second_by_image).all(axis=(1, 2, 3))
    assert same.mean() < 0.05  # two of 162 shifts and flips agree by chance in one of 162


def test_the_seed_decides_the_pixels():
    order = Order(images=8000, global_batch=GLOBAL_BATCH, seed=5)
    steps = []
    for seed in (5, 5, 6):
        spec = InputSpec(
            data="embedded",
            image_size=28,
            transform=PAD_CROP,
            seed=seed,
            order=order,
        )
        [[step]] = Loader(spec, workers=0).steps_from(0, 1, micro_batch=GLOBAL_BATCH)
        steps.append(step)
    assert_same([steps[0]], [steps[1]])
    assert (steps[0].indices == steps[2].indices).all()
    assert (steps[0].pixels != steps[2].pixels).any()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [1, 7, 8, 100])
def test_scoring_sees_every_image_once(photos, workers, batch_size):
    with Loader(photo_spec(photos), workers=workers) as loader:
        batches = list(loader.evaluation_batches(batch_size))
        labels = loader.source("valid").labels
    assert all(len(batch.pixels) == batch_size for batch in batches)
    pixels, found, indices, _ = joined(batches)
    assert indices[:8].tolist() == list(range(8)) and (indices[8:] == -1).all()
    assert (found[:8] == labels).all()
    assert (pixels[8:] == 0).all() and pixels[:8].any(axis=(1, 2, 3)).all()


def test_scoring_without_an_order_works(photos):
    with Loader(photo_spec(photos, order=None), workers=2) as loader:
        assert sum((batch.indices >= 0).sum() for batch in loader.evaluation_batches(5)) == 8
        with pytest.raises(ValueError, match="do not tile"):
            next(loader.steps_from(0, 1, micro_batch=8))


def test_a_micro_batch_that_does_not_tile_the_step_is_refused():
    with pytest.raises(ValueError, match="do not tile"):
        next(Loader(embedded_spec(), workers=0).steps_from(0, 1, micro_batch=7))


@pytest.mark.parametrize("workers", [0, 2])
def test_scoring_amid_training_disturbs_neither(workers):
    with Loader(embedded_spec(), workers=workers) as loader:
        undisturbed = [step for [step] in loader.steps_from(0, 30, micro_batch=GLOBAL_BATCH)]
        scored = list(loader.evaluation_batches(250))
        steps = []
        for [step] in loader.steps_from(0, 30, micro_batch=GLOBAL_BATCH):
            steps.append(step)
            if len(steps) in (10, 11):
                assert_same(scored, loader.evaluation_batches(250))
            if len(steps) == 20:
                next(loader.evaluation_batches(250))  # left after one batch
        assert_same(undisturbed, steps)
        assert_same(scored, loader.evaluation_batches(250))


@pytest.mark.parametrize("workers", [0, 2])
def test_beginning_again_ends_the_walk_before(workers):
    with Loader(embedded_spec(), workers=workers) as loader:
        first = loader.steps_from(0, 1000, micro_batch=GLOBAL_BATCH)
        [begun] = next(first)
        [again] = next(loader.steps_from(0, 1000, micro_batch=GLOBAL_BATCH))
        assert_same([begun], [again])
        assert next(first, None) is None


@pytest.mark.parametrize("workers", [0, 1])
def test_generated_images_can_be_loaded(workers):
    spec = InputSpec(
        data="generated",
        image_size=24,
        transform=TransformSpec(augment="none"),
        seed=1,
        order=Order(images=64, global_batch=16, seed=1),
        valid_images=10,
    )
    with Loader(spec, workers=workers) as loader:
        [[step]] = loader.steps_from(2, 3, micro_batch=16)
        assert (step.pixels[3] == loader.source("train").read(step.indices[3])).all()
        assert sum((batch.indices >= 0).sum() for batch in loader.evaluation_batches(4)) == 10


@pytest.mark.parametrize("workers", [0, 2])
def test_small_images_are_noted_by_name(photos, workers):
    with Loader(photo_spec(photos, image_size=64), workers=workers) as loader:
        list(loader.steps_from(0, 1, micro_batch=GLOBAL_BATCH))
        assert loader.problems["train"].notes[0] == "train/cat/00.jpg: 60x90 is enlarged for 64x64"
        assert all(
            "60x" in t or "61x" in t or "62x" in t or "63x" in t
            for t in loader.problems["train"].notes.values()
        )
        assert loader.problems["valid"].notes == {}


def test_an_input_spec_survives_json(photos):
    for spec in (photo_spec(photos), photo_spec(photos, order=None)):
        assert InputSpec.from_dict(spec.to_dict()) == spec


def test_mistakes_in_an_input_spec_are_named(photos):
    grown = photo_spec(photos, order=Order(images=24, global_batch=4, seed=0))
    for workers in (0, 2):
        with (
            Loader(grown, workers=workers) as loader,
            pytest.raises(DataError, match="planned for 24"),
        ):
            next(loader.steps_from(0, 1, micro_batch=4))


# --- shares ---

MICRO_BATCH = 5  # eight slices a step


@pytest.mark.parametrize("data", ["embedded", "photos"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("replicas", [2, 4])
def test_the_shares_of_all_replicas_are_the_step_of_one(data, photos, workers, replicas):
    spec, steps = spec_for(data, photos), (24, 27)  # where the stream's second block begins
    with Loader(spec, workers=0) as alone, Loader(spec, workers=workers) as loader:
        whole = list(alone.steps_from(*steps, micro_batch=MICRO_BATCH))
        shares = [
            list(loader.steps_from(*steps, micro_batch=MICRO_BATCH, share=Share((r,), replicas)))
            for r in range(replicas)
        ]
    for number, expected in enumerate(whole):
        own = [share[number] for share in shares]
        assert [len(batches) for batches in own] == [len(expected) // replicas] * replicas
        for slice_number, batch in enumerate(expected):
            accumulated, replica = divmod(slice_number, replicas)
            assert_same([batch], [own[replica][accumulated]])


@pytest.mark.parametrize("workers", [0, 2])
def test_images_of_other_shares_are_not_read(tmp_path, workers):
    root = write_photos(tmp_path / "photos", {"train": 8, "val": 4})  # of each of three classes
    spec = photo_spec(root, order=Order(images=24, global_batch=24, seed=5))
    wanted = spec.order.indices(np.arange(24)).reshape(6, 4)  # every image in one of six slices
    for split, index in (("train", wanted[3, 2]), ("val", 4)):
        sorted((root / split).rglob("*.jpg"))[index].write_bytes(b"spoiled")
    for replica, bad in ((0, []), (1, [wanted[3, 2]])):
        with Loader(spec, workers=workers, max_bad=1) as loader:
            [step] = loader.steps_from(0, 1, micro_batch=4, share=Share((replica,), 2))
            assert len(step) == 3 and list(loader.problems["train"].bad_images) == bad
            list(loader.evaluation_batches(3, share=Share((replica,), 2)))
            assert list(loader.problems["valid"].bad_images) == ([4] if replica else [])


def test_replicas_that_do_not_divide_the_slices_are_refused():
    with (
        Loader(embedded_spec(), workers=0) as loader,
        pytest.raises(ValueError, match="8 micro-batches do not divide among 3 replicas"),
    ):
        next(loader.steps_from(0, 1, micro_batch=MICRO_BATCH, share=Share((0,), 3)))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("replicas", [2, 4])
def test_shares_score_every_image_once(photos, workers, replicas):
    with Loader(photo_spec(photos), workers=workers) as loader:
        whole = list(loader.evaluation_batches(3))  # eight images: two full batches and one padded
        shares = [
            list(loader.evaluation_batches(3, share=Share((r,), replicas))) for r in range(replicas)
        ]
    assert [len(share) for share in shares] == [len(whole[r::replicas]) for r in range(replicas)]
    for replica, share in enumerate(shares):
        for batch, expected in zip(share, whole[replica::replicas], strict=True):
            assert_same([batch], [expected])
