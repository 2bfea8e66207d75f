"""Only regular files are opened, as images and as shards, and none that is too large is read."""

import os
import subprocess
import sys

import pytest
from PIL import Image

from phalanx.cli.main import main
from phalanx.data.formats.decode import BadImage
from phalanx.data.formats.image_file import DEFAULT_LIMITS, ReadLimits, open_regular
from phalanx.data.formats.image_file import read_image_file as read
from phalanx.data.formats.sources import DATA_FORMATS
from phalanx.errors import DataError
from small_photos import encode, photo, write_photos

ONE_MIB = ReadLimits(max_file_mib=1)


def test_a_file_is_read_whole_up_to_the_limit(tmp_path):
    path = tmp_path / "a.jpg"
    for size in (0, 1, 4096, 2**20):
        data = os.urandom(size)
        path.write_bytes(data)
        assert read(path, "a", ONE_MIB) == data
    path.write_bytes(bytes(2**20 + 1))
    with pytest.raises(BadImage, match=r"^a: 1\.0 MiB, over the 1 MiB of --max-file-mib$"):
        read(path, "a", ONE_MIB)


def test_pieces_from_a_slow_network_are_put_together(tmp_path, monkeypatch):
    (tmp_path / "a.jpg").write_bytes(bytes(range(100)))
    whole_read = os.read
    monkeypatch.setattr(os, "read", lambda descriptor, size: whole_read(descriptor, min(size, 7)))
    assert read(tmp_path / "a.jpg", "a", ONE_MIB) == bytes(range(100))


def test_a_file_that_grows_while_it_is_read_is_bad_and_is_not_read_on(tmp_path, monkeypatch):
    path, whole_read = tmp_path / "a.jpg", os.read
    path.write_bytes(bytes(10))

    def grow(descriptor, size):
        with path.open("ab") as file:
            file.write(bytes(2**16))
        return whole_read(descriptor, size)

    monkeypatch.setattr(os, "read", grow)
    with pytest.raises(
        BadImage, match="a: has changed: it grew beyond 10 bytes while it was being read"
    ):
        read(path, "a", ONE_MIB)


def test_a_file_of_the_system_that_tells_no_size_is_bad():
    with pytest.raises(BadImage, match="has changed: it grew beyond 0 bytes"):
        read("/proc/cpuinfo", "a", ONE_MIB)


def test_a_pipe_that_takes_the_place_of_a_file_is_noticed_when_it_is_open(tmp_path, monkeypatch):
    path = tmp_path / "a.jpg"
    path.write_bytes(b"")
    whole_open = os.open

    def swap(name, flags):
        path.unlink()
        os.mkfifo(path)
        return whole_open(name, flags)

    monkeypatch.setattr(os, "open", swap)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="a named pipe, not a regular file"):
        open_regular(path)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("data", "shard"),
    [
        ("tar", "train-000000.tar"),
        ("tfrecord", "train-00000-of-00001"),
        ("parquet", "train-00000-of-00001.parquet"),
        ("packed", "train.phx"),
        ("tar", "classes.txt"),
        ("tar", "metadata.json"),
        ("tfrecord", "labels.txt"),
        ("cifar10", "data_batch_3.bin"),
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_shard_that_is_no_regular_file_is_named(tmp_path, data, shard, kind):
    photos = write_photos(tmp_path / "photos", {"train": 2, "val": 1})
    root = tmp_path / "set"
    if data in ("tar", "tfrecord"):
        line = ["data", "build", str(photos), "--to", data, "--workers", "1", "--out", str(root)]
        assert main([*line, "--shards", "1"]) == 0
    root.mkdir(exist_ok=True)
    if data == "cifar10":
        for number in range(1, 6):
            (root / f"data_batch_{number}.bin").write_bytes(bytes(3073))
    path = root / shard
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    what = {"pipe": "a named pipe", "device": "a device"}[kind]
    with pytest.raises(DataError, match=rf"{shard}: cannot be read \(.*{what}, not a regular file"):
        DATA_FORMATS[data].open(root, "train")


def test_a_pipe_in_place_of_an_index_is_not_waited_for(tmp_path):
    root = write_photos(tmp_path, {"train": 2, "val": 1})
    (root / ".phalanx").mkdir()
    os.mkfifo(root / ".phalanx/folder-train.index")
    assert len(DATA_FORMATS["folder"].open(root, "train")) == 6


@pytest.mark.parametrize("form", ["tar", "tfrecord", "packed"])
def test_the_limits_hold_inside_of_shards(tmp_path, form):
    photos, root = write_photos(tmp_path / "photos", {"train": 2, "val": 1}), tmp_path / "set"
    line = ["data", "build", str(photos), "--to", form, "--workers", "1", "--out", str(root)]
    assert main(line) == 0
    source = DATA_FORMATS[form].open(root, "train")
    source.limits = ReadLimits(max_file_mib=0)
    with pytest.raises(BadImage, match="over the 0 MiB of --max-file-mib"):
        source.read_encoded(0)
    source.limits = ReadLimits(max_pixels=10)
    for read_image in (source.read, source.image):
        with pytest.raises(BadImage, match="over the 10 of --max-pixels"):
            read_image(0)
    source.limits = DEFAULT_LIMITS
    assert source.read(0).ndim == 3


def test_kaggles_tree_is_converted_without_its_special_files(tmp_path, capsys):
    folder = tmp_path / "src/ILSVRC/Data/CLS-LOC/train/n00000001"
    folder.mkdir(parents=True)
    (folder / "a.JPEG").write_bytes(encode(photo(1)))
    os.mkfifo(folder / "b.JPEG")
    (folder / "c.JPEG").write_bytes(encode(photo(2)))
    line = ["data", "build", str(tmp_path / "src"), "--to", "tar", "--out", str(tmp_path / "out")]
    assert main([*line, "--max-bad", "1"]) == 0
    said = capsys.readouterr().out
    assert "train: 2 images" in said and "b.JPEG: a named pipe, not a regular file" in said


def test_memory_stays_small_when_a_large_image_is_refused(tmp_path):
    """169 million pixels in a few bytes, by the real command."""
    root = write_photos(tmp_path, {"train": 2, "val": 1})
    program = "\n".join(
        [
            "import re, sys",
            "from pathlib import Path",
            "from phalanx.cli.main import main",
            "code = main(sys.argv[1:])",
            "status = Path('/proc/self/status').read_text()",
            "print('peak', int(re.search(r'VmHWM:\\s+(\\d+) kB', status)[1]) // 1024)",
            "sys.exit(code)",
        ]
    )
    Image.new("1", (13_000, 13_000)).save(root / "train/cat/large.png")
    line = ["data", "verify", str(root), "--workers", "1"]
    done = subprocess.run(
        [sys.executable, "-c", program, *line], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3 and "13000x13000 pixels, over the 64,000,000" in done.stdout
    assert "Warning" not in done.stderr
    assert int(done.stdout.split("peak ")[1]) < 400  # MiB
