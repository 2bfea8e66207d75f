"""--max-file-mib and --max-pixels by the real commands, and what a run remembers of them."""

import json
import shutil

import pytest
import yaml

from phalanx.cli.main import main
from small_photos import encode, photo, write_photos
from small_runs import read_result

LARGE = "200x100 pixels, over the 19,999 of --max-pixels"
LIMIT = ["--max-pixels", "19999"]
SMALL_RUN = [
    *("--model", "resnet8", "--image-size", "24", "--batch-size", "4", "--epochs", "2"),
    *("--warmup-epoch", "0", "--device", "cpu"),
]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A few photographs, and a larger one in each split."""
    root = write_photos(tmp_path_factory.mktemp("photos"), {"train": 3, "val": 2})
    for split in ("train", "val"):
        (root / split / "cat/large.jpg").write_bytes(encode(photo(99, size=(200, 100))))
    return root


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    """A run that was trained within the limit."""
    path = tmp_path_factory.mktemp("runs") / "run"
    words = [*SMALL_RUN, *LIMIT, "--workers", "2"]
    assert main(["train", "--data-dir", str(photos), "--run-dir", str(path), *words]) == 0
    return path


def bad_images(run):
    return read_result(run)["bad_images"]


def test_training_has_the_limit_and_keeps_it_in_its_run(run, capsys):
    assert bad_images(run) == [f"train/cat/large.jpg: {LARGE}", f"val/cat/large.jpg: {LARGE}"]
    assert yaml.safe_load((run / "config.yaml").read_text())["max-pixels"] == 19999
    assert main(["train", "--resume", str(run), "--max-pixels", "20000"]) == 2
    assert "max-pixels" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("validate RUN", "val/cat/large.jpg"),
        ("predict RUN PHOTOS/val", "val/cat/large.jpg"),
        ("average RUN", "val/cat/large.jpg"),
        ("data verify PHOTOS", "train/cat/large.jpg"),
        ("data build PHOTOS --to packed --out OUT", "train/cat/large.jpg"),
    ],
)
def test_every_command_that_reads_images_takes_the_limit(
    run, photos, tmp_path, capsys, command, name
):
    places = {"RUN": run, "PHOTOS": photos, "OUT": tmp_path / "out"}
    for word, path in places.items():
        command = command.replace(word, str(path))
    main([*command.split(), *LIMIT])
    said = capsys.readouterr()
    assert f"{name}: {LARGE}" in said.out + said.err
    if "build" in command:
        assert main([*command.split(), "--max-pixels", "20000"]) == 3
        said = capsys.readouterr()
        assert "was built with --max-pixels 19999, now with --max-pixels 20000" in said.err
    else:
        main([*command.split(), "--max-pixels", "20000"])
        said = capsys.readouterr()
        assert "--max-pixels" not in said.out + said.err
    for limit, wrong in (("0", "must be at least 1"), ("many", "expected a whole number")):
        assert main([*command.split(), "--max-file-mib", limit]) == 2
        assert f"--max-file-mib: {wrong}" in capsys.readouterr().err


def test_a_build_without_a_limit_goes_on_only_without_one(photos, tmp_path, capsys):
    line = ["data", "build", str(photos), "--to", "tar", "--out", str(tmp_path / "out")]
    assert main([*line, "--max-file-mib", "256"]) == 0  # what it is unless told
    assert main(line) == 0
    options = json.loads((tmp_path / "out/.phalanx/build.json").read_text())["options"]
    assert not [name for name in options if name.startswith("max_")]
    capsys.readouterr()
    assert main([*line, *LIMIT]) == 3
    said = capsys.readouterr().err
    assert "was built without --max-pixels, now with --max-pixels 19999" in said


def test_a_run_of_before_the_limits_existed_goes_on(photos, tmp_path, capsys):
    path = tmp_path / "run"
    line = ["train", "--data-dir", str(photos), "--run-dir", str(path), *SMALL_RUN]
    assert main([*line, "--workers", "0"]) == 0
    sha256 = read_result(path)["weights_sha256"]
    config = path / "config.yaml"
    kept = [text for text in config.read_text().splitlines(True) if "max-" not in text[:4]]
    config.write_text("".join(kept))
    assert "max-pixels" not in config.read_text()
    shutil.rmtree(path / "checkpoints")  # which know the options, too
    (path / "summary.json").unlink()
    assert main(["train", "--resume", str(path)]) == 0
    assert read_result(path)["weights_sha256"] == sha256
    assert main(["data", "show", str(path), "--out", str(tmp_path / "batch.png")]) == 0
