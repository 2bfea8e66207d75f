"""Bad input by the real commands: named, counted, and the run goes on up to --max-bad."""

import io
import json
import os
import socket
import struct
import subprocess
import sys
import zlib
from contextlib import chdir
from html import escape

import numpy as np
import pytest
from PIL import Image

from phalanx.cli.main import main
from phalanx.data.convert.build import BuildOptions, build_dataset
from phalanx.data.convert.source_splits import find_source_splits
from phalanx.data.formats.tfrecord_wire import read_records, write_example, write_record
from phalanx.errors import DiskError
from small_photos import encode, photo, write_photos
from small_runs import read_result, start_phalanx

FORMS = ("folder", "tar", "tfrecord", "packed")


def png_of(width, height):
    """A PNG that promises so many pixels and has next to none."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + head + body + chunk(b"IEND", b"")


def jpeg_of(width, height):
    """A JPEG whose header promises so many pixels."""
    data = bytearray(encode(photo(1)))
    place = data.index(b"\xff\xc0") + 5
    data[place : place + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def animation():
    file = io.BytesIO()
    photo(60).save(file, "GIF", save_all=True, append_images=[photo(61), photo(62)])
    return file.getvalue()


def turned():
    exif = Image.Exif()
    exif[274] = 6  # to be shown turned by a quarter
    return encode(photo(63), exif=exif)


def deep_png():
    grey = np.random.default_rng(0).integers(0, 2**16, (40, 50)).astype(np.uint16)
    return encode(Image.fromarray(grey), "PNG")


BAD = {  # what is wrong with each
    "bomb.jpg": (jpeg_of(60_000, 60_000), "60000x60000 pixels, over the 64,000,000 of"),
    "bomb.png": (png_of(60_000, 60_000), "60000x60000 pixels, over the 64,000,000 of"),
    "cut short.jpg": (encode(photo(50))[:-300], "truncated"),
    "cut short.png": (encode(photo(51), "PNG")[:200], "truncated"),
    "empty.jpg": (b"", "the file is empty"),
    "no image ü.jpg": (b"no image", "not a JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF or HEIC image"),
}
ODD = {
    "animated.jpg": animation(),
    "deep.png": deep_png(),
    "four inks.jpg": encode(photo(52, mode="CMYK")),
    "palette.png": encode(photo(53).convert("P"), "PNG"),
    "turned.jpg": turned(),
    "ünï cödé 名前.jpg": encode(photo(54)),
}
LINKS = {  # where each leads, and what is wrong with it
    "nowhere.jpg": ("missing.jpg", "No such file or directory"),
    "loop.jpg": ("loop.jpg", "Too many levels of symbolic links"),
    "endless.png": ("/dev/zero", "a device, not a regular file"),
}
SPECIAL = {
    "pipe.png": "a named pipe, not a regular file",
    "socket.jpg": "a socket, not a regular file",
    "huge.jpg": "257.0 MiB, over the 256 MiB of --max-file-mib",
}


@pytest.fixture(scope="module")
def strange(tmp_path_factory):
    """Twelve good images and one of every kind of bad and odd ones."""
    root = write_photos(tmp_path_factory.mktemp("strange"), {"train": 4, "val": 2})
    folder = root / "train/cat"
    for name, data in {**{name: data for name, (data, _) in BAD.items()}, **ODD}.items():
        (folder / name).write_bytes(data)
    for name, (target, _) in LINKS.items():
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "pipe.png")
    with socket.socket(socket.AF_UNIX) as endpoint, chdir(folder):  # its path must be short
        endpoint.bind("socket.jpg")
    with (folder / "huge.jpg").open("wb") as file:
        file.truncate(257 * 2**20)  # without a block on the disk
    return root


WHY = {**{name: why for name, (_, why) in (BAD | LINKS).items()}, **SPECIAL}


def check_named(lines):
    """Every bad image has its line, which says why; no other image has one."""
    assert len(lines) == len(WHY), lines
    for name, why in WHY.items():
        [line] = [line for line in lines if f"cat/{name}: " in line]
        assert why in line


def train(root, run, *more):
    words = ["--model", "resnet8", "--image-size", "24", "--batch-size", "5", "--epochs", "2"]
    words += ["--warmup-epoch", "0", "--device", "cpu", *more]
    code = main(["train", "--data-dir", str(root), "--run-dir", str(run), *words])
    return code, read_result(run) if code == 0 else None


@pytest.mark.parametrize("to", FORMS)
def test_a_build_leaves_out_what_cannot_be_read_and_keeps_what_is_odd(
    strange, tmp_path, to, capsys
):
    line = ["data", "build", str(strange), "--to", to, "--workers", "1", "--json", "--out"]
    assert main([*line, str(tmp_path / "out"), "--max-bad", f"{len(WHY)}"]) == 0
    check_named(json.loads(capsys.readouterr().out)["splits"]["train"]["bad"])
    train = find_source_splits(tmp_path / "out")[0]
    assert train.images == 12 + len(ODD)
    names = " ".join(train.source.name(n) for n in range(train.images))
    assert "ünï cödé 名前.jpg" in names and "turned.jpg" in names
    for number in range(train.images):
        assert train.source.read(number).ndim == 3
    few = len(WHY) - 1
    assert main([*line, str(tmp_path / "strict"), "--max-bad", f"{few}"]) == 3
    assert f"train: more than {few} images cannot be read" in capsys.readouterr().err


def test_verify_names_all_of_them(strange, capsys):
    assert main(["data", "verify", str(strange), "--workers", "1", "--json"]) == 3
    single = json.loads(capsys.readouterr().out)["single"]
    kinds = ("zero-size", "undecodable", "truncated")
    check_named([f"{p['name']}: {p['why']}" for kind in kinds for p in single[kind]])
    assert [place["name"] for place in single["CMYK"]] == ["train/cat/four inks.jpg"]
    assert [place["name"] for place in single["wrong extension"]] == ["train/cat/animated.jpg"]
    assert {"train/cat/bomb.jpg", "train/cat/bomb.png"} <= {
        p["name"] for p in single["undecodable"]
    }


def test_training_goes_on_without_them_and_the_report_lists_them(strange, tmp_path, capsys):
    code, summary = train(strange, tmp_path / "run", "--max-bad", f"{len(WHY)}", "--workers", "2")
    assert code == 0
    check_named(summary["bad_images"])
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert all(name in page for name in WHY)
    few = len(WHY) - 1
    code, _ = train(strange, tmp_path / "strict", "--max-bad", f"{few}", "--workers", "0")
    said = capsys.readouterr().err
    assert code == 3 and f"more than {few} training images cannot be read" in said


def test_predict_answers_for_the_others_and_says_what_is_wrong_with_them(
    strange, tmp_path, capsys, recwarn
):
    train(strange, tmp_path / "run", "--max-bad", f"{len(WHY)}", "--workers", "0")
    for images in ([strange / "train/cat"], sorted((strange / "train/cat").iterdir())):
        capsys.readouterr()
        assert main(["predict", str(tmp_path / "run"), *map(str, images), "--json"]) == 3
        said = capsys.readouterr()
        _, *told = said.err.splitlines()
        check_named(told)
        rows = [json.loads(line) for line in said.out.splitlines()]
        assert len([row for row in rows if row["guesses"]]) == 4 + len(ODD)
        bad = {f"{row['image']}: {row['problem']}" for row in rows if not row["guesses"]}
        assert bad == set(told)
    assert not [str(warning.message) for warning in recwarn if "pixels" in str(warning.message)]


# --- files of many images ---


@pytest.fixture
def photos(tmp_path):
    return write_photos(tmp_path / "photos", {"train": 4, "val": 2})


def flip_all(path, begin, size):
    data = bytearray(path.read_bytes())
    data[begin : begin + size] = bytes(byte ^ 255 for byte in data[begin : begin + size])
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("to", "why"),
    [
        ("tar", "not a JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF or HEIC image"),
        ("tfrecord", "the checksum of its data does not match"),
        ("packed", "its bytes changed after packing"),
    ],
)
def test_damage_inside_a_shard_is_one_bad_image(photos, tmp_path, to, why, capsys):
    root = tmp_path / "set"
    build_dataset(photos, root, BuildOptions(to=to), workers=1)
    source = find_source_splits(root)[0].source
    file = root / source.index.files[int(source.index.file_numbers[5])]
    flip_all(file, int(source.index.offsets[5]), int(source.index.sizes[5]))
    code, summary = train(root, tmp_path / "run", "--max-bad", "1", "--workers", "1")
    assert code == 0 and len(summary["bad_images"]) == 1
    assert summary["bad_images"][0].endswith(why)
    assert file.name in summary["bad_images"][0]
    capsys.readouterr()
    assert main(["data", "verify", str(root), "--workers", "1", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)["single"]
    assert len(found["undecodable"]) == 1
    line = ["data", "build", str(root), "--to", "folder", "--workers", "1", "--out"]
    assert main([*line, str(tmp_path / "back")]) == 0
    assert "could not read 1 image, left out:" in capsys.readouterr().out
    assert main([*line, str(tmp_path / "strict"), "--max-bad", "0"]) == 3


def check_one_bad(root, tmp_path, capsys, *, kind, why):
    """Every command names the one bad thing in training; all but it can be used."""
    code, summary = train(root, tmp_path / "run", "--max-bad", "1", "--workers", "1")
    assert code == 0 and summary["bad_images"] == [why]
    assert escape(why) in (tmp_path / "run/report.html").read_text(encoding="utf-8")
    capsys.readouterr()
    code, _ = train(root, tmp_path / "none", "--max-bad", "0", "--workers", "0")
    said = capsys.readouterr().err
    assert code == 3 and "more than 0 training images cannot be read" in said and why in said
    assert main(["data", "verify", str(root), "--workers", "1", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    wrong = {name: count for name, count in found["totals"].items() if count}
    assert wrong == {kind: 1}
    [place] = found["single"][kind]
    assert f"{place['name']}: {place['why']}" == why and place["label"] == "no class"
    line = ["data", "build", str(root), "--to", "folder", "--workers", "1", "--json", "--out"]
    assert main([*line, str(tmp_path / "back")]) == 0
    assert json.loads(capsys.readouterr().out)["splits"]["train"]["bad"] == [why]
    return find_source_splits(tmp_path / "back")[0]


@pytest.mark.parametrize("to", ["tar", "tfrecord"])
def test_what_a_cut_shard_has_lost_is_one_bad_image_for_every_command(photos, tmp_path, to, capsys):
    root = tmp_path / "set"
    build_dataset(photos, root, BuildOptions(to=to, shards=2), workers=1)
    (root / "metadata.json").unlink(missing_ok=True)
    source = find_source_splits(root)[0].source
    shard = root / source.index.files[1]
    begin = int(source.index.offsets[10])
    shard.write_bytes(shard.read_bytes()[: begin + 100])
    byte = int(find_source_splits(root)[0].source.index.offsets[10])
    assert begin - 2000 < byte < begin
    why = (
        f"{shard.name}: from byte {byte:,} on: the shard is truncated there and the rest is lost; "
    )
    why += "fetch it again"
    back = check_one_bad(root, tmp_path, capsys, kind="truncated", why=why)
    assert back.images == 10 and back.classes == ("cat", "dög", "fish")


def test_a_packed_file_that_is_cut_off_is_refused_by_every_command(photos, tmp_path, capsys):
    root = tmp_path / "set"
    build_dataset(photos, root, BuildOptions(to="packed"), workers=1)
    shard = root / "train.phx"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    for line in (
        ["data", "verify", str(root)],
        ["data", "build", str(root), "--to", "folder", "--out", str(tmp_path / "out")],
        ["train", "--data-dir", str(root), "--run-dir", str(tmp_path / "run")],
    ):
        capsys.readouterr()
        assert main(line) == 3
        said = capsys.readouterr().err
        assert shard.name in said and "truncated" in said, said


def spoil_tar(root):
    """The class of the sixth image becomes one that there is not."""
    shard = root / "train-000000.tar"
    data = bytearray(shard.read_bytes())
    data[data.index(b"00000005.cls") + 512] = ord("7")
    shard.write_bytes(data)
    return "train-000000.tar:dög/dög 001.jpg: label 7, but there are 3 classes, counted from 0"


def spoil_tfrecord(root):
    """The sixth image's record is written again with label 0."""
    [shard] = sorted(root.glob("train-*"))
    records = [record.data for record in read_records(shard)]
    old, new = (write_example({"image/class/label": [label]})[2:] for label in (2, 0))
    assert records[5].count(old) == 1
    records[5] = records[5].replace(old, new)
    with shard.open("wb") as file:
        for record in records:
            write_record(file, record)
    return f"{shard.name}:dög/dög 001.jpg: label 0, but there are 3 classes, counted from 1"


@pytest.mark.parametrize(("to", "spoil"), [("tar", spoil_tar), ("tfrecord", spoil_tfrecord)])
def test_an_image_with_a_wrong_label_is_bad_for_every_command(photos, tmp_path, to, spoil, capsys):
    root = tmp_path / "set"
    build_dataset(photos, root, BuildOptions(to=to, shards=1), workers=1)
    why = f"{spoil(root)}; fix it"
    back = check_one_bad(root, tmp_path, capsys, kind="label out of range", why=why)
    assert back.images == 11 and back.labels.tolist() == [0] * 4 + [1] * 3 + [2] * 4


def test_a_wrong_label_is_never_scored(photos, tmp_path, capsys):
    root = tmp_path / "set"
    build_dataset(photos, root, BuildOptions(to="tar"), workers=1)
    shard = root / "validation-000000.tar"
    data = bytearray(shard.read_bytes())
    data[data.index(b"00000003.cls") + 512] = ord("x")
    shard.write_bytes(data)
    _, summary = train(root, tmp_path / "run", "--workers", "0")
    assert summary["scored"] == 5
    assert summary["bad_images"] == [
        "validation-000000.tar:dög/dög 001.jpg (class 'x'): its class is not a whole number; fix it"
    ]


@pytest.mark.parametrize("cache", [[], ["--dataset-cache"]])
def test_an_index_that_cannot_be_kept_is_told_once(photos, tmp_path, monkeypatch, capsys, cache):
    (photos / ".phalanx").write_text("a file where a folder should be")
    (tmp_path / "cache").write_text("another")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, _ = train(photos, tmp_path / "run", "--workers", "1", *cache)
    output = capsys.readouterr()
    told = f"the index of {photos} could not be saved (Not a directory); it is rebuilt each time"
    assert code == 0 and (output.out + output.err).count(told) == 1


def test_a_folder_that_changes_while_it_is_trained_on_loses_those_images(tmp_path):
    root = write_photos(tmp_path / "photos", {"train": 20, "val": 2})
    words = ["--model", "resnet8", "--image-size", "24", "--batch-size", "4", "--epochs", "3"]
    words += ["--warmup-epoch", "0", "--device", "cpu", "--workers", "1", "--max-bad", "3"]
    run = tmp_path / "run"
    process = start_phalanx("train", "--data-dir", root, "--run-dir", run, *words)
    for line in process.stdout:
        if line.startswith("step "):
            break
    (root / "train/cat/cat 000.jpg").unlink()
    (root / "train/cat/cat 001.jpg").write_bytes(encode(photo(70, size=(50, 40))))
    os.truncate(root / "train/fish/fish 002.jpg", 500)
    (root / "train/fish/new.jpg").write_bytes(encode(photo(71)))
    said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    bad = read_result(run)["bad_images"]
    assert [line.partition(": ")[0] for line in bad] == [
        "train/cat/cat 000.jpg",
        "train/cat/cat 001.jpg",
        "train/fish/fish 002.jpg",
    ]
    assert "No such file" in bad[0] and "has changed" in bad[1] and "has changed: 500" in bad[2]


FULL_DISK = """
import resource, sys
from phalanx.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # as if no more fitted on the disk
sys.exit(main(sys.argv[1:]))
"""


def test_a_preset_that_a_full_disk_cuts_off_is_not_in_the_way(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, "presets", "cp", "demo", tmp_path / "mine.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 6 and "mine.yaml" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_where_the_index_is_kept_does_not_matter(photos, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, "data", "list", photos],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "12 + 6 images, 3 classes" in done.stdout, done.stderr
    left = [p for place in (photos / ".phalanx", tmp_path / "cache") for p in place.rglob("*.*")]
    assert left == []


# --- where nothing can be written ---


def test_a_place_that_cannot_be_written_to_is_told_with_the_option_it_came_by(
    photos, tmp_path, capsys
):
    too_long = tmp_path / ("x" * 300)
    blocked = tmp_path / "file"
    blocked.write_text("")
    for out in (too_long, blocked / "below"):
        for to in FORMS:
            assert (
                main(["data", "build", str(photos), "--to", to, "--out", str(out)])
                == DiskError.exit_code
            )
            said = capsys.readouterr().err
            assert "choose another --out" in said and "--run-dir" not in said
        page = str(out / "page.html")
        assert (
            main(["data", "verify", str(photos), "--workers", "1", "--out", page])
            == DiskError.exit_code
        )
        said = capsys.readouterr().err
        assert "choose another --out" in said and "--run-dir" not in said


@pytest.mark.parametrize(
    ("to", "place"),
    [
        ("folder", ".train.part"),
        ("tar", "train-000000.tar.part"),
        ("tfrecord", "train-00000-of-00001.part"),
        ("parquet", "train-00000-of-00001.parquet.part"),
        ("packed", "train.phx.part"),
    ],
)
def test_a_write_that_fails_in_the_middle_speaks_of_out(photos, tmp_path, to, place, capsys):
    line = ["data", "build", str(photos), "--to", to, "--workers", "1", "--out"]
    assert main([*line, str(tmp_path / "whole")]) == 0
    out = tmp_path / "out"
    (out / ".phalanx").mkdir(parents=True)
    note = (tmp_path / "whole/.phalanx/build.json").read_bytes()
    (out / ".phalanx/build.json").write_bytes(note)
    if to == "folder":
        (out / place).write_text("a file where a folder should be")
    else:
        (out / place).mkdir()
    capsys.readouterr()
    assert main([*line, str(out)]) == DiskError.exit_code
    said = capsys.readouterr().err
    assert "choose another --out" in said and "--run-dir" not in said
