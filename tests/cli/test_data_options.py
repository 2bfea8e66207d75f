"""Data that nobody named, splits that nobody made, and options of augmentation."""

import gzip
import hashlib
import json
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from PIL import Image

from phalanx.assemble.dataset_summary import build_input_spec, plan_run
from phalanx.assemble.find_data import read_settings_with_data
from phalanx.cli.main import main
from phalanx.data import fetch
from phalanx.data.loading.loader import Loader
from phalanx.data.transforms.transform import TransformSpec
from phalanx.errors import ConfigError
from small_runs import make_digits, read_result

BASE = {
    "model": "resnet8",
    "image-size": "16",
    "batch-size": "8",
    "steps": "9",
    "warmup-epoch": "0ep",
}
RANDOM = np.random.default_rng(3)


def add_photos(root: Path, *, images: int = 8, edge: int = 40) -> Path:
    """Noise in two classes, as JPEG files."""
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for number in range(images):
            pixels = RANDOM.integers(0, 256, (edge, edge, 3), np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.jpg", quality=95)
    return root


@pytest.fixture
def photos(tmp_path) -> Path:
    for split in ("train", "val"):
        add_photos(tmp_path / "photos" / split)
    return tmp_path / "photos"


def first_batch(settings) -> np.ndarray:
    plan, _ = plan_run(settings)
    with Loader(build_input_spec(settings.config, plan), workers=0) as loader:
        (batch,) = next(loader.steps_from(0, 1, micro_batch=plan.global_batch))
    return batch.pixels


def test_what_lies_in_the_folder_decides(tmp_path, photos):
    nested = tmp_path / "deep" / "er"
    nested.parent.mkdir()
    photos.rename(nested)
    found = read_settings_with_data(None, {"data-dir": str(tmp_path / "deep")})
    assert (found.config.data.data, found.config.data.data_dir) == ("folder", str(nested))
    assert found.name == "folder-resnet18"
    digits = make_digits(tmp_path / "digits", train=20, valid=20)
    assert read_settings_with_data(None, {"data-dir": str(digits)}).config.data.data == "mnist"


def test_a_preset_for_photographs_takes_any_form_of_them(tmp_path, photos):
    out = tmp_path / "packed"
    assert main(["data", "build", str(photos), "--to", "packed", "--out", str(out)]) == 0
    found = read_settings_with_data("folder-resnet18", {"data-dir": str(out)})
    assert found.config.data.data == "packed"
    kept = read_settings_with_data("cifar10-resnet20", {"data-dir": str(out)})
    assert kept.config.data.data == "cifar10", "a preset for small images keeps to its set"


def test_a_bare_command_trains_on_what_the_environment_names(photos, monkeypatch):
    monkeypatch.setenv("DATA_DIR", str(photos))
    assert read_settings_with_data(None, {}).config.data.data == "folder"
    assert read_settings_with_data("demo", {}).config.data.data == "embedded"
    assert read_settings_with_data("folder-resnet18", {}).config.data.data_dir == str(photos)


def test_several_datasets_in_a_folder_have_to_be_told_apart(tmp_path, photos):
    make_digits(tmp_path / "digits", train=20, valid=20)
    with pytest.raises(ConfigError, match=r"(?s)there are several datasets here.*--data mnist"):
        read_settings_with_data(None, {"data-dir": str(tmp_path)})


def test_a_folder_without_a_split_gets_one(tmp_path, capsys):
    root = add_photos(tmp_path / "all", images=20)
    words = [f"--{name}={value}" for name, value in BASE.items()]
    words += ["--data", "folder", "--data-dir", str(root), "--val-split", "20%", "--json"]
    assert main(["plan", *words]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["train_images"] + plan["valid_images"] == 40
    assert 2 <= plan["valid_images"] <= 16
    run = tmp_path / "run"
    words[-1:] = ["--run-dir", str(run), "--workers", "1"]
    assert main(["train", *words]) == 0
    assert read_result(run)["scored"] == plan["valid_images"]


@pytest.mark.parametrize(
    "flags",
    [
        {"color-jitter": "0.4"},
        {"auto-augment": "rand-augment"},
        {"auto-augment": "trivial-augment"},
        {"random-erasing": "1"},
        {"crop-scale": "0.9,1"},
        {"crop-ratio": "1,1"},
    ],
    ids=str,
)
def test_every_option_of_augmentation_changes_the_batch_and_is_drawn_the_same(photos, flags):
    def batch(flags):
        return first_batch(
            read_settings_with_data(None, {**BASE, "data-dir": str(photos), **flags})
        )

    assert np.array_equal(batch(flags), batch(flags))
    assert not np.array_equal(batch(flags), batch({}))


def test_scoring_takes_the_share_it_is_told(photos):
    def scored(share):
        flags = {**BASE, "data-dir": str(photos), "eval-crop": share}
        settings = read_settings_with_data(None, flags)
        plan, _ = plan_run(settings)
        with Loader(build_input_spec(settings.config, plan), workers=0) as loader:
            return next(iter(loader.evaluation_batches(8))).pixels

    assert not np.array_equal(scored("0.875"), scored("1"))


@pytest.mark.parametrize("text", ["1", "a,b", "0,1", "1,0.5", "1/0,2"])
def test_a_pair_that_is_none_is_refused(photos, text):
    with pytest.raises(ConfigError, match="--crop-scale: expected two numbers"):
        read_settings_with_data(None, {**BASE, "data-dir": str(photos), "crop-scale": text})


def test_a_recipe_survives_the_way_to_a_worker(photos):
    settings = read_settings_with_data(
        None, {**BASE, "data-dir": str(photos), "crop-scale": "0.5,1"}
    )
    plan, _ = plan_run(settings)
    recipe = build_input_spec(settings.config, plan)
    again = type(recipe).from_dict(json.loads(json.dumps(recipe.to_dict())))
    assert again == recipe and isinstance(again.transform, TransformSpec)
    assert replace(recipe, seed=9) != again


def test_the_input_is_timed(photos, capsys):
    words = [f"--{name}={value}" for name, value in BASE.items()]
    assert main(["data", "bench", str(photos), *words, "--seconds", "0.1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [rate["stage"] for rate in found["stages"]] == [
        "read", "decode", "augment", "both", "collate", "copy",
    ]  # fmt: skip
    assert all(rate["images_per_second"] > 0 for rate in found["stages"])
    assert found["one_worker"] > 0 and found["eaten"] > 0 and "resnet8 needs" in found["verdict"]
    folded = [*words, "--batch-size=2", "--replicas=4", "--bn-span=2"]
    assert main(["data", "bench", str(photos), *folded, "--seconds", "0.1"]) == 0
    assert "all together" in capsys.readouterr().out
    assert main(["data", "bench", str(photos), "--seconds", "soon"]) == 2
    assert main(["data", "bench", str(photos), *words, "--steps", "4"]) == 2
    assert "end before anything can be measured" in capsys.readouterr().err


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A server with a small set in MNIST's form, in the place of the official one."""
    digits, served = make_digits(tmp_path / "made", train=40, valid=20), tmp_path / "served"
    served.mkdir()
    sums = {}
    for file in sorted(digits.glob("*-ubyte*")):
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        name = file.name.removesuffix(".gz")
        (served / f"{name}.gz").write_bytes(gzip.compress(data, mtime=0))
        sums[name] = hashlib.md5(data).hexdigest()
    handler = partial(SimpleHTTPRequestHandler, directory=str(served))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        monkeypatch.setitem(
            fetch.PUBLISHED_FILES,
            "mnist",
            replace(fetch.PUBLISHED_FILES["mnist"], url=url, md5=sums),
        )
        yield server
        server.shutdown()


def test_a_published_set_that_is_not_there_is_fetched_first(published, tmp_path, capsys):
    place, run = tmp_path / "new" / "digits", tmp_path / "run"
    words = ["train", "--data", "mnist", "--data-dir", str(place), "--steps", "2"]
    words += ["--batch-size", "8", "--warmup-epoch", "0ep", "--run-dir", str(run)]
    assert main([*words, "--no-fetch"]) == 3
    assert "no such folder" in capsys.readouterr().err and not place.exists()
    assert main(words) == 0
    said = capsys.readouterr().err
    assert "4 files downloaded to" in said and "all checksums match" in said
    assert read_result(run)["scored"] == 20
    assert main([*words[:-1], str(tmp_path / "again")]) == 0
    assert "downloaded" not in capsys.readouterr().err, "it is there now"


def test_a_set_that_cannot_be_fetched_leaves_nothing(published, tmp_path, capsys):
    published.shutdown()
    published.server_close()
    place = tmp_path / "new" / "digits"
    assert main(["train", "--data", "mnist", "--data-dir", str(place)]) == 3
    assert "cannot be reached" in capsys.readouterr().err
    assert not place.parent.exists()
