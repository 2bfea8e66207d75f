"""Packed and TFRecord files with any bytes in them: the images that were written, or an error.

Never another exception, and never another image without a word.
"""

import json
import os
import shutil
import zlib
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from phalanx.data.formats.decode import BadImage
from phalanx.data.formats.index import IndexedSource, snapshot_files
from phalanx.data.formats.packed import open_packed
from phalanx.data.formats.tfrecord import open_tfrecord
from phalanx.data.formats.tfrecord_wire import read_example, read_floats, read_integers, read_spans
from phalanx.errors import UserError
from small_samples import make_samples, write_split

COUNT = 4
OPEN = {"packed": open_packed, "raw": open_packed, "tfrecord": open_tfrecord}
FILES = {"packed": "train.phx", "raw": "train.phx", "tfrecord": "train-00000-of-00001"}
in_one_folder = settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SHARES = st.floats(0, 1, exclude_max=True)  # a place as a share of the file's length


class Written(NamedTuple):
    """A file as it was written, and what is read from it."""

    data: bytes
    source: IndexedSource
    images: list[np.ndarray]

    def __repr__(self) -> str:
        return "a file"  # a thousand lines otherwise


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A file of each form."""
    found = {}
    for form, open_split in OPEN.items():
        folder = tmp_path_factory.mktemp(form)
        to, job = (
            ("packed", {"raw": form == "raw"}) if form != "tfrecord" else (form, {"shards": 1})
        )
        write_split(to, make_samples(COUNT, boxes=True), folder, **job)
        source = open_split(folder, "train")
        images = [source.read(number) for number in range(COUNT)]
        found[form] = Written((folder / FILES[form]).read_bytes(), source, images)
    return found


def flip(data: bytes, places: list[float], mask: int) -> bytes:
    damaged = bytearray(data)
    for place in places:
        damaged[int(place * len(data))] ^= mask
    return bytes(damaged)


def check_damaged(form: str, written, folder, content: bytes) -> None:
    """Whatever can be read is what was written."""
    _, healthy, images = written[form]
    shutil.rmtree(folder / ".phalanx", ignore_errors=True)
    (folder / FILES[form]).write_bytes(content)
    try:
        source = OPEN[form](folder, "train")
    except UserError as error:
        assert str(folder) in str(error)
        return
    names = [healthy.name(number) for number in range(COUNT)]
    for number in range(len(source)):
        try:
            image = source.read(number)
        except BadImage:
            continue
        known = names.index(source.name(number))
        same = np.array_equal(image, images[known])
        assert same, f"{source.name(number)} is another image"
        assert source.labels[number] == healthy.labels[known]
        assert source.box(number) == healthy.box(known)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("form", OPEN)
@in_one_folder
@given(places=st.lists(SHARES, min_size=1, max_size=3, unique=True), mask=st.integers(1, 255))
def test_flipped_bytes_give_no_other_image(written, folder, form, places, mask):
    check_damaged(form, written, folder, flip(written[form].data, places, mask))


@pytest.mark.parametrize("form", OPEN)
@in_one_folder
@given(place=SHARES)
def test_a_file_that_is_cut_short_gives_no_other_image(written, folder, form, place):
    data = written[form].data
    check_damaged(form, written, folder, data[: int(place * len(data))])


@pytest.mark.parametrize("form", OPEN)
@in_one_folder
@given(place=SHARES, stray=st.binary(min_size=1, max_size=80), insert=st.booleans())
def test_foreign_bytes_give_no_other_image(written, folder, form, place, stray, insert):
    data = written[form].data
    begin = int(place * len(data))
    rest = data[begin if insert else begin + len(stray) :]
    check_damaged(form, written, folder, data[:begin] + stray + rest)


@pytest.mark.parametrize("form", OPEN)
@in_one_folder
@given(content=st.binary(max_size=200))
@example(b"phalanxP" + b"\xff" * 8 + b"{}")
@example(b"phalanxP" + (2).to_bytes(8, "little") + b"[]")
@example(b"phalanxP" + (2).to_bytes(8, "little") + b"{}")
def test_any_bytes_are_no_images(written, folder, form, content):
    check_damaged(form, written, folder, content)


@given(data=st.binary(max_size=200))
def test_any_bytes_are_an_example_or_refused(data):
    try:
        for values in read_example(data).values():
            read_spans(data, values)
            read_integers(data, values)
            read_floats(data, values)
    except ValueError:  # which the reader turns into a DataError
        pass


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """A TFRecord set whose index was kept."""
    folder = tmp_path_factory.mktemp("shards")
    write_split("tfrecord", make_samples(COUNT, boxes=True), folder, shards=1)
    open_tfrecord(folder, "train")
    return folder


def check_index(shards, written, content: bytes) -> None:
    """Whatever lies in place of the index, the images are those that were written."""
    (shards / ".phalanx" / "tfrecord-train.index").write_bytes(content)
    source, (_, healthy, images) = open_tfrecord(shards, "train"), written["tfrecord"]
    assert source.labels.tolist() == healthy.labels.tolist()
    assert source.fingerprint() == healthy.fingerprint() and source.classes == healthy.classes
    for number in range(COUNT):
        assert np.array_equal(source.read(number), images[number])
        assert source.box(number) == healthy.box(number)


@in_one_folder
@given(place=SHARES, mask=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_index_is_built_anew(shards, written, place, mask, cut):
    path = shards / ".phalanx" / "tfrecord-train.index"
    data = path.read_bytes()
    changed = data[: int(place * len(data))] if cut else flip(data, [place], mask)
    check_index(shards, written, changed)
    assert path.read_bytes() == data


HEADER = {"format": 2, "classes": [], "stamp": [], "sha256": "", "arrays": {}}


@pytest.mark.parametrize(
    "text",
    [
        b"[]", b"{}", b'"', b"[" * 100_000, b"\xff",
        json.dumps(HEADER).encode(),
        json.dumps({**HEADER, "arrays": {"labels": ["|O", [1]]}}).encode(),
        json.dumps({**HEADER, "arrays": {"labels": ["<i8", [-5]]}}).encode(),
        json.dumps({**HEADER, "arrays": {"labels": ["<i8", [2**70]]}}).encode(),
        json.dumps({**HEADER, "arrays": 5}).encode(),
    ],
)  # fmt: skip
def test_an_index_that_says_nonsense_is_built_anew(shards, written, text):
    stamp = json.dumps(snapshot_files(shards, [shards / FILES["tfrecord"]])).encode()
    text = text.replace(b'"stamp": []', b'"stamp": ' + stamp)
    content = b"phalanxI" + len(text).to_bytes(8, "little") + text
    check_index(shards, written, content + zlib.crc32(content).to_bytes(4, "little"))


def test_a_pipe_in_place_of_an_index_is_not_waited_for(shards, written):
    path = shards / ".phalanx" / "tfrecord-train.index"
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert len(open_tfrecord(shards, "train")) == COUNT
