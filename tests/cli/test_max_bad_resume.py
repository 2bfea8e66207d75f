"""How many bad images a run puts up with holds for every resume, until one says otherwise."""

import json
import shutil

import pytest

from phalanx.assemble.prepare import prepare_resume
from phalanx.cli.main import main
from phalanx.errors import DataError
from phalanx.plan.order import Order
from small_photos import CLASSES, write_photos
from small_runs import read_result

EACH, BATCH = 6, 3  # images of a class, images of a step
JUNK, SOUND = b"no image", b"\xff\xd8\xff\xe0\x00\x10JF"  # how a file begins


def find_photo(photos, step):
    """The second photo of a step."""
    order = Order(images=EACH * len(CLASSES), global_batch=BATCH, seed=0)
    label, number = divmod(int(order.indices(order.positions(step))[1]), EACH)
    return photos / "train" / CLASSES[label] / f"{CLASSES[label]} {number:03}.jpg"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that puts up with one bad image and has met a second; it saved after every step."""
    home = tmp_path_factory.mktemp("strict")
    photos = write_photos(home / "photos", {"train": EACH, "val": 1})
    for step in (0, 4):
        file = find_photo(photos, step)
        file.write_bytes(JUNK + file.read_bytes()[len(JUNK) :])
    words = ["--model", "resnet8", "--image-size", "24", "--batch-size", str(BATCH)]
    words += ["--epochs", "1", "--warmup-epoch", "0", "--device", "cpu", "--workers", "0"]
    words += ["--ckpts-per-epoch", str(EACH), "--validation", "false", "--max-bad", "1"]
    run = home / "run"
    code = main(["train", "--data-dir", str(photos), "--run-dir", str(run), *words])
    assert code == DataError.exit_code and any((run / "checkpoints").iterdir())
    return run


@pytest.fixture
def run(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "run")


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_resume_counts_the_bad_images_that_were_met_before(run, workers, capsys):
    words = ["train", "--resume", str(run), "--workers", workers]
    assert main(words) == DataError.exit_code
    assert "more than 1 training images cannot be read" in capsys.readouterr().err


def test_a_resume_may_put_up_with_more(run):
    assert main(["train", "--resume", str(run), "--max-bad", "2"]) == 0
    assert "max-bad: '2'" in (run / "config.yaml").read_text()
    assert json.loads((run / "run.json").read_text())["origins"]["max-bad"] == "flag at resume"
    assert len(read_result(run)["bad_images"]) == 2
    assert prepare_resume(run, {}).plan.max_bad == 2, "and so would the next one"


def test_a_run_without_a_checkpoint_begins_again_as_strictly(run, capsys):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    assert main(["train", "--resume", str(run)]) == DataError.exit_code
    assert "more than 1 training images cannot be read" in capsys.readouterr().err


def test_images_that_were_mended_count_no_longer(run, stopped, tmp_path, capsys):
    photos = shutil.copytree(stopped.parent / "photos", tmp_path / "photos")
    met = find_photo(photos, step=0)  # before the checkpoint, which knows that it was bad
    met.write_bytes(SOUND + met.read_bytes()[len(SOUND) :])
    words = ["train", "--resume", str(run), "--data-dir", str(photos)]
    assert main(words) == DataError.exit_code
    assert "can be read now" in capsys.readouterr().err
    assert main([*words, "--accept-changed-data"]) == 0
