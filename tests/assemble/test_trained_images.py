"""A score on images that the weights were trained on says so, whatever the images are called."""

import json

import numpy as np
import pytest

from phalanx.cli.main import main
from phalanx.data.loading.trained_images import describe_trained_images
from small_layouts import write_splits
from small_runs import rewind

NOTE = "note: {} of the 4 images scored {} among those trained on, so the score is too high"


@pytest.fixture
def data(tmp_path):
    """Eight images of two classes to train on, and four to score."""
    return write_splits(tmp_path / "data", {"train": 4, "val": 2})


def train(data, run, *options):
    words = ["train", "folder-resnet18", "--model=resnet8", "--image-size=16", "--batch-size=4"]
    words += [f"--data-dir={data}", f"--run-dir={run}", "--workers=0", "--valid-batch-size=1"]
    assert main([*words, "--device=cpu", "--epochs=2", "--warmup-epoch=0", *options]) == 0


def swap(data, number):
    """Make a validation image a training image, and one of the training images that one."""
    for name in ("cat", "dog")[:number]:
        held_out, trained = (min((data / split / name).iterdir()) for split in ("val", "train"))
        content = held_out.read_bytes()
        held_out.write_bytes(trained.read_bytes())
        trained.write_bytes(content)


@pytest.mark.parametrize(("number", "verb"), [(0, ""), (1, "is"), (2, "are")])
def test_a_run_scored_on_images_it_was_trained_on(tmp_path, data, capfd, number, verb):
    run = tmp_path / "run"
    train(data, run)
    swap(data, number)
    said = []
    for words in (
        ["validate", run],
        ["validate", run, "--devices", "2"],
        ["train", "--fork", run, "--run-dir", tmp_path / "fork", "--epochs", "3"],
        ["train", "--fork", tmp_path / "fork", "--run-dir", tmp_path / "next", "--epochs", "4"],
    ):
        capfd.readouterr()
        assert main(list(map(str, words))) == 0
        said.append("".join(capfd.readouterr()))
    for output in said:
        assert output.count("among those trained on") == bool(number)
        assert NOTE.format(number, verb) in output or not number


def test_a_run_that_continues_with_changed_data(tmp_path, data, capsys):
    run = tmp_path / "run"
    train(data, run, "--ckpts-per-epoch=2", "--keep=9")
    rewind(run, step=2)
    swap(data, 1)
    capsys.readouterr()
    assert main(["train", "--resume", str(run), "--accept-changed-data"]) == 0
    assert NOTE.format(1, "is") in capsys.readouterr().out
    rewind(run, step=3)
    assert main(["train", "--resume", str(run)]) == 0
    assert NOTE.format(1, "is") in capsys.readouterr().out, "a checkpoint remembers it"


def test_a_run_scored_by_two_ranks_at_each_epoch(tmp_path, data):
    run = tmp_path / "run"
    train(data, run)
    swap(data, 2)
    options = ["--epochs=3", "--replicas=2", "--batch-size=2", "--devices=2"]
    assert main(["train", "--fork", str(run), f"--run-dir={tmp_path / 'fork'}", *options]) == 0
    assert (tmp_path / "fork/log.txt").read_text().count(NOTE.format(2, "are")) == 1


def test_json_is_only_the_score(tmp_path, data, capsys):
    run = tmp_path / "run"
    train(data, run)
    swap(data, 1)
    capsys.readouterr()
    assert main(["validate", str(run), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["scored"] == 4 and NOTE.format(1, "is") in said.err


def test_checksums_that_agree_by_chance_are_not_reported():
    random = np.random.default_rng(0)
    trained = random.integers(1, 2**32, 1_300_000, np.uint32)
    scored = random.integers(1, 2**32, 50_000, np.uint32)
    assert np.isin(scored, trained).any(), "some agree, as in a dataset of the size of ImageNet"
    assert not describe_trained_images({"train": trained}, scored)
    scored[:500] = trained[:500]
    assert describe_trained_images({"train": trained}, scored).startswith("51")
    assert not describe_trained_images({}, scored)
    assert not describe_trained_images({"train": np.zeros(9, np.uint32)}, scored)
