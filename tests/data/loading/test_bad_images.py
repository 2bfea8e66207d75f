import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from phalanx.data.formats.image_file import ReadLimits
from phalanx.data.loading.loader import Loader
from phalanx.data.loading.reader import InputSpec
from phalanx.data.transforms.transform import TransformSpec
from phalanx.errors import DataError
from phalanx.plan.order import Order

BAD = {"train": (3, 4, 11), "val": (0, 5)}  # 11 is the last one: its successor is the first


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    """Twelve images a split, some of them spoiled; image i is of brightness 20 i."""
    root = tmp_path_factory.mktemp("spoiled")
    for split, bad in BAD.items():
        for number in range(12):
            path = root / split / ("cat", "dog")[number // 6] / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), (20 * number,) * 3).save(path)
            if number in bad:
                path.write_bytes(path.read_bytes()[:40])
    return root


def spec_for(root):
    order = Order(images=12, global_batch=12, seed=0)
    return InputSpec(
        data="folder",
        data_dir=str(root),
        image_size=16,
        transform=TransformSpec(augment="none"),
        seed=0,
        order=order,
    )


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_limits_travel_to_workers_and_hold_for_the_cache(tmp_path, workers, cache):
    for split in BAD:
        for number in range(12):
            path = tmp_path / split / ("cat", "dog")[number // 6] / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            edge = 17 if number == 3 else 16
            Image.new("RGB", (edge, edge), (20 * number,) * 3).save(path)
    (tmp_path / "train/dog/06.png").unlink()
    with (tmp_path / "train/dog/06.png").open("wb") as file:
        file.truncate(2**40)  # a tebibyte of nothing
    spec = replace(spec_for(tmp_path), limits=ReadLimits(max_file_mib=1, max_pixels=256))
    assert InputSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    with Loader(spec, workers=workers, max_bad=3, cache=cache) as loader:
        list(loader.steps_from(0, 3, micro_batch=12))
        assert loader.problems["train"].bad_images == {
            3: "train/cat/03.png: 17x17 pixels, over the 256 of --max-pixels",
            6: "train/dog/06.png: 1.0 TiB, over the 1 MiB of --max-file-mib",
        }


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_bad_training_image_is_replaced_by_the_next_good_one(spoiled, workers):
    spec = spec_for(spoiled)
    with Loader(spec, workers=workers, max_bad=3) as loader:
        steps = [step for [step] in loader.steps_from(0, 3, micro_batch=12)]
        assert (
            sorted(loader.problems["train"].bad_images) == list(BAD["train"])
            and loader.problems["valid"].bad_images == {}
        )
        assert loader.problems["train"].bad_images[3].startswith("train/cat/03.png: ")
        labels = loader.source("train").labels
    stand_in = {3: 5, 4: 5, 11: 0}
    for step in steps:
        wanted = spec.order.indices(step.positions).tolist()
        assert step.indices.tolist() == [stand_in.get(index, index) for index in wanted]
        assert (step.pixels[:, 8, 8, 0] == 20 * step.indices).all()
        assert (step.labels == labels[step.indices]).all()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_too_many_bad_training_images_end_the_run(spoiled, workers):
    loader = Loader(spec_for(spoiled), workers=workers, max_bad=2)
    with loader, pytest.raises(DataError, match="--max-bad") as caught:
        list(loader.steps_from(0, 3, micro_batch=12))
    assert "more than 2 training images" in str(caught.value)
    assert "train/cat/03.png" in str(caught.value)


def test_bad_images_of_different_workers_count_together(tmp_path):
    for number in range(64):
        path = tmp_path / "train" / ("cat", "dog")[number // 32] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
        if number % 16 == 0:
            path.write_bytes(b"spoiled")
    spec = InputSpec(
        data="folder",
        data_dir=str(tmp_path),
        image_size=8,
        transform=TransformSpec(augment="none"),
        seed=0,
        order=Order(images=64, global_batch=64, seed=0),
    )
    with Loader(spec, workers=4, max_bad=3) as loader, pytest.raises(DataError, match="than 3"):
        next(loader.steps_from(0, 1, micro_batch=64))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_image_leaves_the_score_and_is_named(spoiled, workers):
    with Loader(spec_for(spoiled), workers=workers, max_bad=0) as loader:
        batches = list(loader.evaluation_batches(5))
        assert (
            sorted(loader.problems["valid"].bad_images) == list(BAD["val"])
            and loader.problems["train"].bad_images == {}
        )
        assert loader.problems["valid"].bad_images[5].startswith("val/cat/05.png: ")
    indices = np.concatenate([batch.indices for batch in batches])
    assert indices.tolist() == [-1, 1, 2, 3, 4, -1, 6, 7, 8, 9, 10, 11, -1, -1, -1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_set_without_a_readable_image_is_refused(tmp_path, workers):
    for name in ("cat", "dog"):
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "train" / name / "0.jpg").write_bytes(b"")
    spec = InputSpec(
        data="folder",
        data_dir=str(tmp_path),
        image_size=8,
        transform=TransformSpec(augment="none"),
        seed=0,
        order=Order(images=2, global_batch=2, seed=0),
    )
    loader = Loader(spec, workers=workers)
    with loader, pytest.raises(DataError, match="none of the training images") as caught:
        list(loader.steps_from(0, 1, micro_batch=2))
    assert "train/cat/0.jpg: the file is empty" in str(caught.value)
