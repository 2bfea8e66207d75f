import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx.data.formats import parquet
from phalanx.data.formats.decode import BadImage
from phalanx.data.formats.index import NO_LABEL
from phalanx.data.formats.parquet import _ParquetFile, has_parquet_files, open_parquet
from phalanx.errors import DataError
from small_samples import encode, make_samples

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

JPEG = encode("RGB", "JPEG")
NAMES = ["cat", "dög", "fish"]


def write_table(path, columns, *, names=None, rows=4):
    """A parquet file, with Hugging Face's metadata when names are given."""
    table = pa.table(columns)
    if names:
        features = {"label": {"names": names, "_type": "ClassLabel"}}
        facts = json.dumps({"info": {"features": features}}).encode()
        table = table.replace_schema_metadata({b"huggingface": facts})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=rows)
    return path


def columns_of(samples):
    return {
        "id": [str(number) for number in range(len(samples))],
        "image": [{"bytes": sample.data, "path": sample.name} for sample in samples],
        "label": [sample.label for sample in samples],
    }


def write_both(folder, *, data="data", names=NAMES):
    samples = make_samples(20)
    for number in range(2):
        columns = columns_of(samples[10 * number :][:10])
        write_table(folder / data / f"train-{number:05}-of-00002.parquet", columns, names=names)
    columns = columns_of(samples[:5])
    write_table(folder / data / "validation-00000-of-00001.parquet", columns, names=names)
    return samples


def test_rows_are_read_in_any_order(tmp_path):
    samples = write_both(tmp_path)
    source = open_parquet(tmp_path, "train")
    assert len(source) == 20 and source.classes == tuple(NAMES)
    assert source.labels.tolist() == [sample.label for sample in samples]
    for number in [19, 0, 7, 12, 3, 11, 4, 9, 8, 1, 16, 15]:
        assert source.read_encoded(number) == samples[number].data
        assert source.read(number).shape == (16, 20, 3)
    assert source.name(13) == "data/train-00001-of-00002.parquet:3"
    assert source.box(0) is None and len(open_parquet(tmp_path, "valid")) == 5


def test_threads_take_turns_to_read(tmp_path, monkeypatch):
    samples, busy, read = write_both(tmp_path), threading.Lock(), _ParquetFile.read_group

    def read_alone(self, group):
        assert busy.acquire(blocking=False), "two threads read at a time"
        time.sleep(0.01)
        found = read(self, group)
        busy.release()
        return found

    monkeypatch.setattr(_ParquetFile, "read_group", read_alone)
    monkeypatch.setattr(parquet, "_GROUPS_KEPT", 1)
    source = open_parquet(tmp_path, "train")
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(source.read_encoded, [0, 5, 10, 15] * 3))
    assert found == [samples[number].data for number in [0, 5, 10, 15] * 3]


def test_only_a_few_row_groups_are_kept(tmp_path, monkeypatch):
    write_both(tmp_path)
    source = open_parquet(tmp_path, "train")
    for number in range(20):
        source.read_encoded(number)
    assert list(source._groups) == [(0, 2), (1, 0), (1, 1), (1, 2)]
    monkeypatch.setattr(parquet, "_BYTES_KEPT", 0)
    source.read_encoded(0)
    assert list(source._groups) == [(0, 0)]


@pytest.mark.parametrize(
    ("train", "valid"),
    [
        ("train-00000-of-00001.parquet", "test-00000-of-00001.parquet"),
        ("data/train-00000-of-00001-a09b74b3ef9c3b56.parquet", "data/val-00000-of-00001.parquet"),
        ("train/0000.parquet", "validation/0000.parquet"),
        ("train/part.parquet", "test/part.parquet"),
    ],
)
def test_files_are_found_as_they_are_published(tmp_path, train, valid):
    write_table(tmp_path / train, columns_of(make_samples(6)))
    write_table(tmp_path / valid, columns_of(make_samples(3)))
    assert has_parquet_files(tmp_path)
    assert len(open_parquet(tmp_path, "train")) == 6
    assert len(open_parquet(tmp_path, "valid")) == 3
    assert open_parquet(tmp_path, "valid").classes == ("class0000", "class0001", "class0002")


@pytest.mark.parametrize(
    "columns",
    [
        {"img": [{"bytes": JPEG, "path": None}] * 2, "labels": [1, 0]},
        {"picture": pa.array([JPEG] * 2, pa.binary()), "kind": [1, 0]},
        {
            "x": pa.array([JPEG] * 2, pa.large_binary()),
            "fine_label": [1, 0],
            "coarse_label": [0, 0],
        },
        {"image": [JPEG] * 2, "thumbnail": [b""] * 2, "label": pa.array([1, 0], pa.uint8())},
    ],
)
def test_columns_are_told_by_their_type_and_their_usual_names(tmp_path, columns):
    write_table(tmp_path / "train-00000-of-00001.parquet", columns)
    source = open_parquet(tmp_path, "train")
    assert source.labels.tolist() == [1, 0] and source.read_encoded(1) == JPEG


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"label": [1, 0]}, "cannot tell which column holds the image .label"),
        ({"a": [JPEG], "b": [JPEG], "label": [1]}, "cannot tell which column holds the image .a "),
        ({"image": [JPEG], "x": [1], "y": [1]}, "cannot tell which column holds the label"),
        (
            {"image": [JPEG], "label": ["cat"], "id": [7]},
            "its column 'label' is of type string; store class numbers there",
        ),
        (
            {"image": ["a.jpg"], "label": [1], "mask": [JPEG]},
            "its column 'image' is of type string; store the bytes of image files there",
        ),
        ({"image": pa.array([], pa.binary()), "label": pa.array([], pa.int64())}, "no images"),
    ],
)
def test_a_table_that_does_not_fit_is_named(tmp_path, columns, message):
    write_table(tmp_path / "train-00000-of-00001.parquet", columns)
    with pytest.raises(DataError, match=rf"train-00000-of-00001.parquet: .*{message}"):
        open_parquet(tmp_path, "train")


@pytest.mark.parametrize("keep", [0, 3, 400, -1])
def test_a_truncated_file_is_named(tmp_path, keep):
    write_both(tmp_path)
    path = tmp_path / "data/train-00001-of-00002.parquet"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"train-00001-of-00002.parquet: cannot be read"):
        open_parquet(tmp_path, "train")


@pytest.mark.parametrize(
    ("label", "names", "why"),
    [
        (3, NAMES, "label 3, but there are 3 classes, counted from 0; fix it"),
        (-1, NAMES, "label -1, but there are 3 classes, counted from 0; fix it"),
        (-1, None, "label -1, but there are 3 classes, counted from 0; fix it"),
        (2**40, None, f"label {2**40}, but there are 3 classes, counted from 0; fix it"),
        (None, NAMES, "its class is not a whole number; fix it"),
    ],
)
def test_a_label_that_no_class_has_is_one_bad_image(tmp_path, label, names, why):
    columns = {"image": [JPEG] * 5, "label": [0, 1, 2, label, 1]}
    write_table(tmp_path / "train-00000-of-00001.parquet", columns, names=names)
    source = open_parquet(tmp_path, "train")
    assert len(source) == 5 and len(source.classes) == 3
    for ask in (source.read_encoded, source.image, source.read):
        with pytest.raises(BadImage) as caught:
            ask(3)
        assert str(caught.value) == f"train-00000-of-00001.parquet:3: {why}"
    assert source.read(4).shape == (16, 20, 3)


def test_a_column_of_small_numbers_may_lack_a_label(tmp_path):
    columns = {"image": [JPEG] * 2, "label": pa.array([0, None], pa.uint8())}
    write_table(tmp_path / "train-00000-of-00001.parquet", columns)
    assert open_parquet(tmp_path, "train").fault(1) == NO_LABEL


def test_a_table_without_one_usable_row_is_refused(tmp_path):
    write_table(tmp_path / "train-00000-of-00001.parquet", {"image": [JPEG], "label": [-1]})
    with pytest.raises(
        DataError, match=r"images can be used .1 in all., the first is:\n.*:0: label -1"
    ):
        open_parquet(tmp_path, "train")


def test_a_missing_file_is_named(tmp_path):
    write_both(tmp_path)
    (tmp_path / "data/train-00000-of-00002.parquet").unlink()
    with pytest.raises(
        DataError, match=r"train-00000-of-00002\.parquet missing, 2 shards expected"
    ):
        open_parquet(tmp_path, "train")


def test_a_row_without_bytes_is_one_bad_image(tmp_path):
    columns = {"image": [{"bytes": JPEG, "path": "a"}, {"bytes": None, "path": "b"}]}
    write_table(tmp_path / "train-00000-of-00001.parquet", {**columns, "label": [0, 1]})
    source = open_parquet(tmp_path, "train")
    assert source.read_encoded(0) == JPEG
    with pytest.raises(BadImage, match=r"train-00000-of-00001.parquet:1: the row holds no image"):
        source.read(1)


def test_a_file_that_is_damaged_later_makes_bad_images(tmp_path):
    write_both(tmp_path)
    source = open_parquet(tmp_path, "train")
    (tmp_path / "data/train-00001-of-00002.parquet").unlink()
    assert source.read(0).shape == (16, 20, 3)
    with pytest.raises(BadImage, match=r"train-00001-of-00002\.parquet:0: "):
        source.read(10)
    assert source.fingerprint()["images"] == 20


def test_splits_that_disagree_on_classes_are_refused(tmp_path):
    write_both(tmp_path)
    path = tmp_path / "data/validation-00000-of-00001.parquet"
    write_table(path, columns_of(make_samples(3)), names=["cat", "fish", "dög"])
    with pytest.raises(DataError, match="class 1 is 'fish' here and 'dög' in training"):
        open_parquet(tmp_path, "valid")


def test_the_index_is_kept_and_made_anew_when_a_file_changes(tmp_path):
    write_both(tmp_path)
    first = open_parquet(tmp_path, "train").fingerprint()
    kept = tmp_path / ".phalanx" / "parquet-train.index"
    number = kept.stat().st_ino
    assert open_parquet(tmp_path, "train").fingerprint() == first
    assert kept.stat().st_ino == number
    path = tmp_path / "data/train-00000-of-00002.parquet"
    os.utime(path, ns=(0, 0))
    open_parquet(tmp_path, "train")
    assert kept.stat().st_ino != number
    write_table(path, columns_of(make_samples(3)), names=NAMES)
    assert len(open_parquet(tmp_path, "train")) == 13
    assert open_parquet(tmp_path, "train").fingerprint() != first


def test_a_fingerprint_follows_the_images(tmp_path):
    prints = set()
    for place, value in (("a", 10), ("b", 10), ("c", 200)):
        data = encode("RGB", "PNG", value=value, size=(20 + value, 16))
        path = tmp_path / place / "train-00000-of-00001.parquet"
        write_table(path, {"image": [data], "label": [0]})
        prints.add(open_parquet(tmp_path / place, "train").fingerprint()["sha256"])
    assert len(prints) == 2


def test_a_folder_without_parquet_says_what_it_wants(tmp_path):
    assert not has_parquet_files(tmp_path)
    with pytest.raises(DataError, match=r"no train-00000-of-00001.parquet.*--data-dir"):
        open_parquet(tmp_path, "train")


def test_without_pyarrow_the_way_to_get_it_is_told(tmp_path):
    write_both(tmp_path)
    script = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from pathlib import Path\n"
        "from phalanx.data.formats.parquet import open_parquet\n"
        f"open_parquet(Path({str(tmp_path)!r}), 'train')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("phalanx.errors.DataError: parquet needs pyarrow")
    assert "pip install 'phalanx[parquet]'" in last
