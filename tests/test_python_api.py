"""The functions of `import phalanx`, and the page that describes them."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import phalanx
from phalanx.cli.main import main
from phalanx.errors import CheckpointError, ConfigError, DataError
from phalanx.report.predictions import read_predictions
from small_photos import write_photos

PAGE = Path(phalanx.__file__).parents[2] / "docs" / "python.md"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The folder in which the code of docs/python.md has run, and the names it left."""
    code = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(code) > 5
    here, names = tmp_path_factory.mktemp("python"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        for block in code:
            exec(compile(block, str(PAGE), "exec"), names)
    return here, names


@pytest.fixture(scope="module")
def run(page):
    return page[0] / "runs" / "first"


@pytest.fixture(scope="module")
def model(run):
    return phalanx.load(run)


@pytest.fixture
def photos(tmp_path):
    """A folder with an image, another in a folder of it, a file that is none, and a note."""
    (tmp_path / "more").mkdir()
    Image.new("RGB", (40, 30), (200, 0, 0)).save(tmp_path / "a.JPG")
    Image.new("RGB", (28, 28), (0, 200, 0)).save(tmp_path / "more" / "b.png")
    (tmp_path / "c.png").write_bytes(b"no image")
    (tmp_path / "notes.txt").write_text("no image either")
    return tmp_path


def test_the_page_runs_and_shows_what_is_printed(page, capsys):
    _, names = page
    shown = re.search(r"print\(error\)  # (.*)", PAGE.read_text())[1]
    with pytest.raises(CheckpointError, match=f"^.*/{re.escape(shown)}$"):
        phalanx.load(page[0] / "runs/first", checkpoint=7)
    assert names["summary"].steps == 10 and names["row"].step == 10


def test_predict_takes_one_path_a_folder_or_a_list(run, photos):
    (one,) = phalanx.predict(run, str(photos / "a.JPG"))
    assert one.image.endswith("a.JPG") and len(one.guesses) == 5
    assert (one.label, one.probability) == one.guesses[0]
    folder = phalanx.predict(run, photos)
    assert [Path(answer.image).name for answer in folder] == ["a.JPG", "c.png", "b.png"]
    listed = phalanx.predict(run, [photos, photos / "a.JPG"])
    assert [answer.image for answer in listed] == [answer.image for answer in [*folder, one]]
    assert listed[0] == replace(listed[3], image=listed[0].image)
    assert listed[3].probability == pytest.approx(one.probability)
    bad = folder[1]
    assert bad.problem and not bad.guesses
    with pytest.raises(DataError, match=f"c.png: {bad.problem}"):
        bad.label  # noqa: B018


def test_predict_answers_for_photographs_as_they_were_scored(tmp_path):
    write_photos(tmp_path / "data", {"train": 2, "val": 4}, size=(800, 600))  # decoded in part
    options = {"model": "resnet8", "image_size": 32, "batch_size": 4, "steps": 2, "workers": 0}
    phalanx.train(
        "folder-resnet18", data_dir=tmp_path / "data", run_dir=tmp_path / "run", **options
    )
    rows = read_predictions(tmp_path / "run")
    files = [tmp_path / "data" / row.id for row in rows]
    answers = phalanx.predict(tmp_path / "run", files, checkpoint="last")
    assert [answer.probability for answer in answers] == [row.confidence for row in rows]


def test_a_plan_without_data_is_that_of_the_command(capsys, monkeypatch):
    monkeypatch.delenv("DATA_DIR", raising=False)
    planned = phalanx.plan("mnist-resnet8", batch_size=32, device="cpu")
    words = ["plan", "mnist-resnet8", "--batch-size", "32", "--device", "cpu"]
    assert main([*words, "--no-memory", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"] == planned.to_dict()
    assert planned.train_images == 60_000


def test_a_file_of_options_may_be_a_path(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("batch-size: 24\n")
    assert phalanx.plan(file).global_batch == phalanx.plan(str(file)).global_batch == 24
    for function in (phalanx.plan, phalanx.train):
        with pytest.raises(ConfigError, match="expected the path of a file or folder"):
            function({"batch-size": 24})
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file"):
        phalanx.train(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_a_pillow_image_of_any_mode(model, mode):
    (answer,) = model(Image.new(mode, (30, 20)))
    assert answer.image == "image 1" and len(answer.guesses) == 5


def test_a_pillow_image_whose_white_nobody_knows_is_refused(model):
    with pytest.raises(DataError, match="image 1: 32 bits per pixel"):
        model(Image.new("F", (30, 20)))


def test_a_pillow_image_and_an_array_answer_as_their_file(model, photos):
    file = photos / "more" / "b.png"
    pixels = np.asarray(Image.open(file))
    alpha = np.dstack([pixels, np.full((28, 28), 9, np.uint8)])
    answers = model(
        [file, Image.open(file), pixels, pixels / 255, pixels.astype("f4") / 255, alpha]
    )
    assert len({answer.guesses for answer in answers}) == 1
    names = [str(file), str(file), "image 3", "image 4", "image 5", "image 6"]
    assert [answer.image for answer in answers] == names
    batch = model(np.stack([pixels, pixels]))
    assert [answer.label for answer in batch] == [answers[0].label] * 2
    grey, flat = model([pixels[..., :1], pixels[..., 0]])
    assert grey.guesses == flat.guesses


PIXELS = np.zeros((28, 28, 3))
BAD_INPUTS = {
    "an empty list": ([], "no image was given, the list is empty; give a file, a folder, "),
    "an array of none": (np.zeros((0, 28, 28, 3)), "no image was given, the array is empty"),
    "floats of a normalised image": (
        PIXELS - 2.1,
        "image 1: floats must be from 0 to 1, these go from -2",
    ),
    "no numbers": (
        PIXELS * np.nan,
        "image 1: floats must be from 0 to 1, these go from nan to nan",
    ),
    "whole numbers": (PIXELS.astype(int), "image 1: has type int64, expected bytes from 0 to 255"),
    "channels first": (
        [PIXELS, PIXELS.transpose(2, 0, 1)],
        r"image 2: has shape \[3, 28, 28\], expected \[height, width, 3\] or \[height, width\]; "
        r"channels come last: array.transpose\(1, 2, 0\)",
    ),
    "two channels": (PIXELS[..., :2], r"image 1: has shape \[28, 28, 2\], expected"),
    "no pixel": (PIXELS[:0], r"image 1: has shape \[0, 28, 3\], expected"),
    "a tensor": (torch.zeros(3, 28, 28), "image 1: is a torch tensor; give an array of"),
    "nothing": (None, "image 1: is of type NoneType; give a file, a folder"),
    "bytes": (b"abc", "image 1: is of type bytes"),
    "a list in a list": ([["a.png"]], "image 1: is of type list"),
    "no file": ("nowhere.png", "nowhere.png: no such file or folder"),
    "no name": ("a\0b", "contains a zero byte"),
    "an empty image": (Image.new("RGB", (0, 3)), "image 1: has no pixels"),
}


@pytest.mark.parametrize("what", BAD_INPUTS)
def test_what_is_no_image_is_a_data_error(model, what):
    given, told = BAD_INPUTS[what]
    with pytest.raises(DataError, match=told):
        model(given)


def test_a_file_that_is_no_image_and_a_folder_without_any(run, model, photos):
    for give in (model, lambda path: phalanx.predict(run, path), model.preprocess):
        with pytest.raises(DataError, match=r"c.png: \w+"):
            give(photos / "c.png")
    (photos / "empty").mkdir()
    (photos / "empty" / "notes.txt").write_text("words")
    with pytest.raises(DataError, match=r"empty: no image in this folder; ignored 1 file: 1 .txt"):
        phalanx.predict(run, photos / "empty")


def test_the_checkpoint_is_the_best_unless_another_is_asked_for(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run", symlinks=True)
    store = copy / "checkpoints"
    shutil.copytree(store / "step-00000010", store / "step-00000012")  # its account says 10
    assert phalanx.load(copy).checkpoint == (store / "step-00000010").resolve()
    assert phalanx.load(copy, checkpoint="last").checkpoint.name == "step-00000012"
    assert phalanx.load(copy, checkpoint=12).checkpoint.name == "step-00000012"
    assert phalanx.load(copy, checkpoint="Best").step == 10
    with pytest.raises(
        ConfigError, match="--checkpoint: expected last, best or a step such as 1000"
    ):
        phalanx.load(copy, checkpoint="newest")
    with pytest.raises(CheckpointError, match="no checkpoint of step 11 is kept, only of steps 10"):
        phalanx.predict(copy, Image.new("L", (9, 9)), checkpoint=11)


def test_a_full_disk_under_ranks_is_a_disk_error(tmp_path, monkeypatch):
    """Running out of memory has the same exit code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full.py").write_text(
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\n"  # a checkpoint is larger
        "import phalanx\n"
        "from phalanx.errors import DiskError\n"
        "try:\n"
        "    phalanx.train('demo', steps=2, batch_size=8, replicas=2, devices=2, run_dir='run')\n"
        "except DiskError:\n"
        "    raise SystemExit(9)\n"
    )
    words = [sys.executable, "full.py"]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 9, done.stderr


def test_validate_has_no_ranks():
    with pytest.raises(ConfigError, match="run: phalanx validate resnet8 --devices 2"):
        phalanx.validate("resnet8", devices=2)
