"""`phalanx data build` and `phalanx data verify` as they are typed."""

import json
import os
import random
import signal
import time

import pytest

from phalanx.cli.main import main
from small_photos import encode, photo, tree_bytes, write_photos
from small_runs import run_phalanx, start_phalanx


@pytest.fixture
def photos(tmp_path):
    return write_photos(tmp_path / "photos", {"train": 4, "val": 2})


def test_a_build_says_what_it_did(photos, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["data", "build", str(photos), "--to", "packed", "--out", str(out)]) == 0
    said, progress = capsys.readouterr()
    assert said.startswith("train: 12 images, 12 copied byte for byte\nvalid: 6 images, 6 copied")
    assert f"{out}: done in " in said and "train: 12 of 12 images done" in progress
    assert main(["data", "build", str(photos), "--to", "packed", "--out", str(out)]) == 0
    assert "12 images, 0 copied byte for byte, 12 already there" in capsys.readouterr().out


def test_bad_images_are_a_note_until_they_are_too_many(photos, tmp_path, capsys):
    (photos / "train/cat/cat 001.jpg").write_bytes(b"no image")
    line = ["data", "build", str(photos), "--to", "tar", "--out"]
    assert main([*line, str(tmp_path / "out"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["splits"]["train"]["images"] == 11
    assert facts["splits"]["train"]["bad"] == [
        "train/cat/cat 001.jpg: not a JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF or HEIC image"
    ]
    assert main([*line, str(tmp_path / "two")]) == 0
    assert "could not read 1 image, left out:\n  train/cat/cat" in capsys.readouterr().out
    assert main([*line, str(tmp_path / "three"), "--max-bad", "0"]) == 3
    assert "train: more than 0 images cannot be read" in capsys.readouterr().err


MISTAKES = [
    ("build", "say the folder to convert: phalanx data build SRC --to FORMAT --out DIR"),
    ("build photos --out x", "say --to FORMAT: "),
    ("build photos --to tar", "say --out DIR: "),
    ("build photos --to tarr --out x", "--to: no such format 'tarr'; did you mean 'tar'?"),
    (
        "build photos --to tar --out x --shards 0",
        "--shards: expected a whole number from 1 to 99,9",
    ),
    (
        "build photos --to tar --out x --max-bad lots",
        "--max-bad: expected a count or a share such as",
    ),
    ("build photos --to tar --out x --short 9", "--short: no such option; did you mean '--short-s"),
    ("verify", "say which folder to check: phalanx data verify DIR"),
    ("verify photos --out page.pdf", "--out page.pdf: expected a name that ends in .html"),
]


@pytest.mark.parametrize(("line", "told"), MISTAKES)
def test_a_mistake_is_told_with_the_way_out(photos, line, told, monkeypatch, capsys):
    monkeypatch.chdir(photos.parent)
    before = sorted(photos.parent.rglob("*"))
    assert main(["data", *line.split()]) == 2
    assert capsys.readouterr().err.startswith(f"phalanx data {line.split()[0]}: {told}")
    assert sorted(photos.parent.rglob("*")) == before


def test_an_empty_folder_cannot_be_converted(tmp_path, capsys):
    (tmp_path / "src").mkdir()
    words = ["data", "build", str(tmp_path / "src"), "--to", "tar", "--out", str(tmp_path / "o")]
    assert main(words) == 3
    assert "nothing readable here" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("to", ["tar", "tfrecord", "packed", "folder"])
def test_killed_at_any_moment_and_started_again_it_ends_at_the_same_bytes(tmp_path, to):
    photos = write_photos(tmp_path / "photos", {"train": 60, "val": 10}, size=(480, 360))
    shards = ["--shards", "20"] if to in ("tar", "tfrecord") else []
    line = ["data", "build", photos, "--to", to, "--short-side", "64", "--workers", 2, *shards]
    began = time.monotonic()
    assert run_phalanx(*line, "--out", tmp_path / "whole").returncode == 0
    lasts = time.monotonic() - began
    chance = random.Random(to)
    for _ in range(3):
        process = start_phalanx(*line, "--out", tmp_path / "killed")
        time.sleep(chance.uniform(0.3, 0.9) * lasts)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    done = run_phalanx(*line, "--out", tmp_path / "killed")
    assert done.returncode == 0, done.stderr
    left = {name: data for name, data in tree_bytes(tmp_path / "killed").items()}
    assert left == tree_bytes(tmp_path / "whole")


def test_processes_do_not_outlive_a_killed_build(tmp_path):
    photos = write_photos(tmp_path / "photos", {"train": 60, "val": 10}, size=(480, 360))
    line = ["data", "build", photos, "--to", "tar", "--short-side", "64", "--workers", 2]
    process = start_phalanx(*line, "--out", tmp_path / "out")
    children: list[int] = []
    while len(children) < 3 and process.poll() is None:  # two workers and what tracks them
        children = children_of(process.pid)
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 20
    while [pid for pid in children if is_alive(pid)] and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid for pid in children if is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    assert len(children) >= 2 and not left


def children_of(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- verify ---


def test_a_clean_set_exits_with_0_and_a_damaged_one_with_3(photos, tmp_path, capsys):
    assert main(["data", "verify", str(photos)]) == 0
    said = capsys.readouterr().out
    assert "12 train + 6 valid, 3 classes" in said and "no problems found; manifest " in said
    (photos / "val/cat/cat 001.jpg").write_bytes(b"")
    (photos / "train/cat/cat 000.jpg").write_bytes(encode(photo(700, mode="L")))
    page = tmp_path / "pages/report.html"
    assert main(["data", "verify", str(photos), "--out", str(page)]) == 3
    said = capsys.readouterr().out
    assert "zero-size:\n  val/cat/cat 001.jpg: the file is empty\n" in said
    assert "1 problem found; manifest" in said and f"pictures: {page}" in said
    assert page.read_text(encoding="utf-8").count("<figure>") == 2


def test_copies_on_both_sides_of_a_split_by_val_split_are_found(photos, capsys):
    train = photos / "train"
    for image in sorted(train.glob("*/*.jpg")):
        (image.parent / f"copy of {image.name}").write_bytes(image.read_bytes())
    assert main(["data", "verify", str(train), "--json"]) == 3
    totals = json.loads(capsys.readouterr().out)["totals"]
    assert (totals["exact duplicates"], totals["in both splits"]) == (12, 0)
    assert main(["data", "verify", str(train), "--val-split", "25%", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["images"] == {"train": 18, "valid": 6} and found["totals"]["in both splits"] > 0


def test_greyscale_alone_is_no_mistake_and_json_tells_all(photos, capsys):
    (photos / "train/cat/cat 000.jpg").write_bytes(encode(photo(700, mode="L")))
    assert main(["data", "verify", str(photos), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["totals"]["greyscale"] == 1 and facts["wrong"] == 0
    assert facts["single"]["greyscale"][0]["name"] == "train/cat/cat 000.jpg"
    assert facts["classes"]["fish"] == {"train": 4, "valid": 2} and len(facts["manifest"]) == 64


def test_a_name_that_is_no_text_can_be_printed(photos):
    os.rename(photos / "train/cat/cat 001.jpg", os.fsencode(photos) + b"/train/cat/\xff.jpg")
    with open(os.fsencode(photos) + b"/train/cat/\xff.jpg", "wb") as file:
        file.write(b"no image")
    done = run_phalanx("data", "verify", photos, "--workers", 1)
    assert done.returncode == 3 and "train/cat/\\udcff.jpg: not a JPEG, PNG" in done.stdout
    done = run_phalanx("data", "build", photos, "--to", "tar", "--out", photos.parent / "o")
    assert done.returncode == 0 and "cat/\\udcff.jpg: not a JPEG, PNG" in done.stdout
