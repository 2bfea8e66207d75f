"""One set in every form: the same order, the same pixels, the same weights after an epoch."""

import json

import numpy as np
import pytest

from phalanx.cli.main import main
from phalanx.data.convert.build import BuildOptions, build_dataset
from phalanx.data.convert.source_splits import find_source_splits, read_sample
from phalanx.data.formats.detect import detect_datasets
from phalanx.data.loading.loader import Loader
from phalanx.data.loading.reader import InputSpec
from phalanx.data.transforms.transform import TransformSpec
from phalanx.plan.order import Order
from small_photos import write_photos
from small_runs import read_result

FORMS = ("folder", "tar", "tfrecord", "packed", "parquet")
STEPS = 3


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_photos(tmp_path_factory.mktemp("photos"), {"train": 4, "val": 1})


def write_parquet(src, out):
    """What Hugging Face would publish of a folder."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    out.mkdir()
    for split, name in zip(find_source_splits(src), ("train", "validation"), strict=True):
        samples = [read_sample(split.source, number) for number in range(split.images)]
        images = [{"bytes": sample.data, "path": sample.name} for sample in samples]
        table = pa.table({"image": images, "label": [sample.label for sample in samples]})
        features = {"label": {"names": split.classes}}
        facts = json.dumps({"info": {"features": features}}).encode()
        table = table.replace_schema_metadata({b"huggingface": facts})
        pq.write_table(table, out / f"{name}-00000-of-00001.parquet", row_group_size=4)


def convert(src, out, form):
    if form == "parquet":
        write_parquet(src, out)
    else:
        shards = 3 if form in ("tar", "tfrecord") else None
        build_dataset(src, out, BuildOptions(to=form, shards=shards), workers=1)
    return out


def batches(root):
    """Three training steps and all of validation: indices, labels and pixels."""
    recipe = InputSpec(
        data=detect_datasets(root)[0].data,
        data_dir=str(root),
        image_size=24,
        transform=TransformSpec(augment="resized-crop"),
        seed=3,
        order=Order(images=12, global_batch=6, seed=3),
    )
    with Loader(recipe, workers=0) as loader:
        steps = [step for [step] in loader.steps_from(0, STEPS, micro_batch=6)]
        found = [*steps, *loader.evaluation_batches(2)]
    return [(b.indices, b.labels, b.pixels) for b in found]


def train(root, run):
    """The weights and the score after one epoch by the command line."""
    words = ["--model", "resnet8", "--image-size", "24", "--batch-size", "6", "--epochs", "1"]
    words += ["--warmup-epoch", "0", "--device", "cpu", "--workers", "0"]
    assert main(["train", "--data-dir", str(root), "--run-dir", str(run), *words]) == 0
    summary = read_result(run)
    return summary["weights_sha256"], summary["top1"], summary["images"]


@pytest.fixture(scope="module")
def of_the_source(photos, tmp_path_factory):
    return batches(photos), train(photos, tmp_path_factory.mktemp("runs") / "source")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_order_pixels_and_weights(photos, of_the_source, tmp_path, form):
    root = convert(photos, tmp_path / "set", form)
    wanted, trained = of_the_source
    for mine, its in zip(batches(root), wanted, strict=True):
        assert all(np.array_equal(own, other) for own, other in zip(mine, its, strict=True))
    assert train(root, tmp_path / "run") == trained
    assert trained[2] == 12


def test_raw_pixels_give_what_the_same_pixels_as_png_files_give(photos, tmp_path):
    raw, files = tmp_path / "raw", tmp_path / "files"
    build_dataset(photos, raw, BuildOptions(to="packed", raw=True), workers=1)
    build_dataset(raw, files, BuildOptions(to="folder"), workers=1)
    for mine, its in zip(batches(raw), batches(files), strict=True):
        assert all(np.array_equal(own, other) for own, other in zip(mine, its, strict=True))
