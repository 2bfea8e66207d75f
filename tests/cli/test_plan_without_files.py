"""What `phalanx plan` tells of a dataset whose files are not here."""

import json

import pytest
from PIL import Image

from phalanx.catalog.datasets import DATASETS
from phalanx.cli.main import main
from phalanx.config.presets import builtin_preset_folder
from phalanx.config.read import read_settings
from phalanx.errors import DataError

pytestmark = pytest.mark.usefixtures("empty_folder")

PRESETS = sorted(path.stem for path in builtin_preset_folder().glob("*.yaml"))
ONLY_FILES_KNOW = ("folder", "tfrecord", "tar", "parquet", "packed")
SYNSETS = ("n02100735", "n02119789", "n02123045")
QUICK = ("--no-memory", "--device", "cpu")


@pytest.fixture
def few(tmp_path):
    """A part of ImageNet: three of its synsets."""
    for split, count in (("train", 4), ("val", 1)):
        for name in SYNSETS:
            folder = tmp_path / "few" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.jpg")
    return tmp_path / "few"


def plan_json(capsys, *words):
    assert main(["plan", *words, *QUICK, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_planned_without_files_unless_only_they_can_tell(name, capsys):
    data = read_settings(name).config.data.data
    if data in ONLY_FILES_KNOW:
        assert main(["plan", name, *QUICK]) == DataError.exit_code
        assert "give --data-dir DIR" in capsys.readouterr().err
        return
    told = plan_json(capsys, name)
    expected = {"embedded": "counted", "generated": "made up", "synthetic": "made up"}
    assert told["counts"] == expected.get(data, "published")
    assert told["plan"]["total_steps"] >= 1 and told["plan"]["num_classes"] >= 2


def test_the_counts_of_imagenet_are_the_published_ones(capsys):
    plan = plan_json(capsys, "imagenet-resnet50")["plan"]
    counts = [plan[name] for name in ("train_images", "valid_images", "num_classes")]
    assert counts == [1_281_167, 50_000, 1000]
    assert plan["total_steps"] == 90 * 1_281_167 // 1024


def test_a_plan_of_published_counts_says_that_no_file_was_looked_at(capsys, few):
    assert main(["plan", "imagenet-resnet50", *QUICK]) == 0
    line = "counts        published counts; no files were read\n"
    assert line in capsys.readouterr().out
    small = ("--batch-size", "2", "--gradient-accumulation", "1")
    assert main(["plan", "imagenet-resnet50", *QUICK, "--data-dir", str(few), *small]) == 0
    assert "counts " not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["imagenet-resnet50", "tf1-resnet50-gn", "tf2-resnet50-8k-bn"])
def test_a_part_of_imagenet_is_planned_with_its_own_counts(name, capsys, few):
    words = ("--data-dir", str(few), "--batch-size", "2", "--gradient-accumulation", "1")
    told = plan_json(capsys, name, *words, "--warmup-epoch", "0", "--pipeline-splits", "none")
    counts = [told["plan"][key] for key in ("train_images", "valid_images", "num_classes")]
    assert (told["counts"], counts) == ("counted", [12, 3, 3])


def test_a_split_of_ones_own_needs_the_files(capsys):
    words = ["plan", "imagenet-resnet50", "--val-split", "10%", *QUICK]
    assert main(words) == DataError.exit_code
    assert "give --data-dir DIR" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["imagenet-resnet50"], ["--data", "imagenet"]], ids=str)
def test_training_still_wants_the_folder(words, capsys, tmp_path):
    assert main(["train", *words, "--device", "cpu"]) == DataError.exit_code
    assert "give --data-dir DIR" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", DATASETS)
def test_a_dataset_alone_uses_its_own_preset(name):
    settings = read_settings(None, {"data": name})
    assert (settings.name, settings.config.data.data) == (DATASETS[name].preset, name)


def test_imagenet_alone_is_trained_as_imagenet_is():
    settings = read_settings(None, {"data": "imagenet"})
    assert (settings.name, settings.config.model.model) == ("imagenet-resnet50", "resnet50")
