"""A resume that meets other bytes for an image that the run has read stops, and says which."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from phalanx.cli.main import main
from phalanx.data.formats.sources import open_source
from small_runs import read_result, rewind
from small_samples import make_samples, write_split

FORMS = ("folder", "packed", "tar", "tfrecord")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same JPEGs in each form: 16 of two classes to train on, 4 to score."""
    root = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 2)):
        for name in ("cat", "dog"):
            (root / "folder" / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (24, 24, 3), np.uint8)
                Image.fromarray(pixels).save(root / "folder" / split / name / f"{number}.jpg")
    for form in FORMS[1:]:
        words = ["data", "build", root / "folder", "--to", form, "--out", root / form]
        assert main([*map(str, words)]) == 0
    return root


def words_of(form: str, data: Path, run: Path, *, workers: int = 0) -> list[str]:
    """Two epochs of four steps, a checkpoint after each step."""
    options = {
        "data": form,
        "data-dir": data,
        "run-dir": run,
        "workers": workers,
        "model": "resnet8",
    }
    options |= {"image-size": 12, "batch-size": 4, "epochs": 2, "ckpts-per-epoch": 4, "keep": 9}
    options |= {"warmup-epoch": 0, "lr": 0.05, "device": "cpu"}
    return ["train", "folder-resnet18", *(f"--{name}={value}" for name, value in options.items())]


def flip_one_bit(form: str, data: Path) -> str:
    """Change a bit amid one training image, in place; gives its name."""
    source = open_source(form, str(data), "train")
    name, index = source.name(5), source.index
    path = data / index.files[int(index.file_numbers[5])]
    content = bytearray(path.read_bytes())
    content[int(index.offsets[5]) + int(index.sizes[5]) * 3 // 4] ^= 4
    path.write_bytes(content)
    return name


@pytest.mark.parametrize(("form", "workers"), [*((form, 0) for form in FORMS), ("packed", 2)])
def test_a_changed_image_stops_the_resume(photos, tmp_path, capsys, form, workers):
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(photos / form, data)
    assert main(words_of(form, data, run, workers=workers)) == 0
    weights = read_result(run)["weights_sha256"]
    rewind(run, step=4)
    assert main(["train", "--resume", str(run)]) == 0
    assert read_result(run)["weights_sha256"] == weights
    rewind(run, step=4)
    name = flip_one_bit(form, data)
    capsys.readouterr()
    assert main(["train", "--resume", str(run)]) == 3
    said = capsys.readouterr().err
    assert "--accept-changed-data" in said
    if form == "tfrecord":  # a record has a checksum, which its index knows not to fit
        assert "its train data has changed: sha256" in said
    else:
        assert name in said and "since this run read it" in said
    assert main(["train", "--resume", str(run), "--accept-changed-data"]) == 0
    (step,) = json.loads((run / "run.json").read_text())["accepted_changed_data"]
    assert 4 <= step < 8, "steps before the changed image are kept"
    assert read_result(run)["weights_sha256"] != weights


def test_a_changed_validation_image_stops_the_resume(photos, tmp_path):
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(photos / "folder", data)
    assert main(words_of("folder", data, run)) == 0
    rewind(run, step=4)
    for checkpoint in (run / "checkpoints").glob("step-*"):
        assert (checkpoint / "seen.safetensors").exists()
    Image.new("RGB", (24, 24)).save(data / "val" / "cat" / "0.jpg")  # read after each epoch
    assert main(["train", "--resume", str(run)]) == 3


def test_changed_boxes_stop_the_resume_of_a_run_that_uses_them(tmp_path, capsys):
    data, run = tmp_path / "data", tmp_path / "run"
    samples = make_samples(16, boxes=True)
    for split in ("train", "valid"):
        write_split("tar", samples, data, split)
    (data / "metadata.json").unlink()
    assert main([*words_of("tar", data, run), "--use-bbox-info"]) == 0
    moved = [replace(sample, box=sample.box and (0.5, 0.5, 0.75, 0.75)) for sample in samples]
    shutil.rmtree(data)
    for split in ("train", "valid"):
        write_split("tar", moved, data, split)
    (data / "metadata.json").unlink()
    rewind(run, step=4)
    assert main(["train", "--resume", str(run)]) == 3
    assert f"{run}: its train data has changed: boxes_sha256 " in capsys.readouterr().err
    facts = json.loads((run / "run.json").read_text())
    del facts["data"]["train"]["boxes_sha256"]  # as older releases stored it
    (run / "run.json").write_text(json.dumps(facts))
    assert main(["train", "--resume", str(run)]) == 0


def test_accepting_changed_data_goes_with_a_resume(capsys):
    assert main(["train", "demo", "--accept-changed-data"]) == 2
    assert "goes with --resume" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["gone", "larger", "touched"])
def test_names_and_sizes_are_compared_before_a_resume_starts(photos, tmp_path, capsys, change):
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(photos / "folder", data)
    assert main(words_of("folder", data, run)) == 0
    weights = read_result(run)["weights_sha256"]
    rewind(run, step=4)
    path = data / "train" / "cat" / "3.jpg"
    if change == "gone":
        path.unlink()
    elif change == "larger":
        path.write_bytes(path.read_bytes() + b"more")
    else:
        path.touch()
    capsys.readouterr()
    code, said = main(["train", "--resume", str(run)]), capsys.readouterr()
    if change == "touched":
        assert code == 0 and "written, touched or copied since the run began" in said.out
        assert read_result(run)["weights_sha256"] == weights
    else:
        assert code == 3 and "its train data has changed" in said.err
        assert "resumed at" not in said.out and "--accept-changed-data" in said.err


def test_an_untouched_set_gives_no_note(photos, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(words_of("packed", photos / "packed", run)) == 0
    rewind(run, step=4)
    assert main(["train", "--resume", str(run)]) == 0
    assert "written to, touched" not in capsys.readouterr().out


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_image_that_can_be_read_again_stops_the_resume(photos, tmp_path, capsys, workers):
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(photos / "folder", data)
    path = data / "train" / "cat" / "3.jpg"
    whole = path.read_bytes()
    path.write_bytes(whole[:20].ljust(len(whole), b"\0"))
    assert main(words_of("folder", data, run, workers=workers)) == 0
    rewind(run, step=4)
    path.write_bytes(whole)
    capsys.readouterr()
    assert main(["train", "--resume", str(run)]) == 3
    assert "train/cat/3.jpg" in (said := capsys.readouterr().err)
    assert "can be read now" in said and "--accept-changed-data" in said
    assert main(["train", "--resume", str(run), "--accept-changed-data"]) == 0
    for step in (6, 4):  # after it was accepted, and where it was
        rewind(run, step=step)
        assert main(["train", "--resume", str(run)]) == 0, "once accepted, it is not asked again"
    for step in (5, 6, 7):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08}")
    capsys.readouterr()
    assert main(["replay", str(run), "--step", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["as_recorded"], "from where it was accepted on"


def test_data_that_was_accepted_is_what_later_resumes_compare_with(photos, tmp_path, capsys):
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(photos / "folder", data)
    path = data / "train" / "cat" / "3.jpg"
    whole = path.read_bytes()
    path.write_bytes(whole[:20])
    assert main(words_of("folder", data, run)) == 0
    path.write_bytes(whole)
    rewind(run, step=4)
    assert main(["train", "--resume", str(run)]) == 3
    assert main(["train", "--resume", str(run), "--accept-changed-data"]) == 0
    for step in (6, 4):
        rewind(run, step=step)
        assert main(["train", "--resume", str(run)]) == 0
    assert json.loads((run / "run.json").read_text())["accepted_changed_data"] == [4]
    path.write_bytes(whole[:20])
    rewind(run, step=6)
    capsys.readouterr()
    assert main(["train", "--resume", str(run)]) == 3
    assert "its train data has changed" in capsys.readouterr().err


def test_a_large_folder_is_compared_while_training_starts(photos, tmp_path, capsys, monkeypatch):
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(photos / "folder", data)
    assert main(words_of("folder", data, run)) == 0
    rewind(run, step=4)
    # as if these few images were many
    for name in ("formats.folder.SMALL_SET", "layouts.snapshot.SMALL_SET"):
        monkeypatch.setattr(f"phalanx.data.{name}", 1)
    monkeypatch.setattr("phalanx.data.layouts.snapshot._FILES_SAMPLED", 1)
    assert main(["train", "--resume", str(run)]) == 0
    rewind(run, step=4)
    path = data / "train" / "dog" / "5.jpg"
    path.write_bytes(path.read_bytes() + b"more")
    capsys.readouterr()
    assert main(["train", "--resume", str(run)]) == 3
    assert "train/dog/5.jpg" in capsys.readouterr().err
    source = open_source("folder", str(data), "train")  # by its index, which the sample confirms
    assert source.name(source.find_resized()) == "train/dog/5.jpg"


def test_other_names_of_classes_stop_the_resume(photos, tmp_path, capsys):
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(photos / "tar", data)
    assert main(words_of("tar", data, run)) == 0
    rewind(run, step=4)
    (data / "classes.txt").write_text("cat\nwolf\n")
    capsys.readouterr()
    assert main(["train", "--resume", str(run)]) == 3
    assert "its classes have changed: 'dog' then, 'wolf' now" in capsys.readouterr().err
    assert main(["train", "--resume", str(run), "--accept-changed-data"]) == 0


def test_a_fork_onto_other_images_knows_only_those_it_has_read(photos, tmp_path):
    run, fork, data = tmp_path / "run", tmp_path / "fork", tmp_path / "data"
    assert main(words_of("folder", photos / "folder", run)) == 0
    shutil.copytree(photos / "folder", data)
    (data / "train" / "dog" / "7.jpg").unlink()
    words = ["train", "--fork", run, "--run-dir", fork, "--data-dir", data, "--epochs", 4]
    assert main([*map(str, words)]) == 0
    seen = load_file(sorted((fork / "checkpoints").glob("step-*"))[-1] / "seen.safetensors")
    assert len(seen["train"]) == 15 and seen["train"].all()


@pytest.mark.parametrize("step", [8, 10])
def test_a_fork_knows_nothing_of_the_images_that_its_parent_read(photos, tmp_path, step):
    data, run, fork = tmp_path / "data", tmp_path / "run", tmp_path / "fork"
    shutil.copytree(photos / "folder", data)
    image = data / "train/cat/3.jpg"
    sound = image.read_bytes()
    image.write_bytes(b"no image" + sound[8:])
    assert main(words_of("folder", data, run)) == 0
    assert len(read_result(run)["bad_images"]) == 1
    image.write_bytes(sound)
    shutil.copyfile(image, data / "train/cat/more.jpg")
    words = ["train", "--fork", run, "--run-dir", fork, "--epochs", 4, "--batch-size", 4]
    assert main([*map(str, words)]) == 0
    result = read_result(fork)
    rewind(fork, step=step)  # 8: before it has read any image
    assert main(["train", "--resume", str(fork)]) == 0
    assert read_result(fork)["weights_sha256"] == result["weights_sha256"]
    assert read_result(fork)["bad_images"] == result["bad_images"] == []
