"""Parquet files as `datasets` writes them: read back by our own reader, and by what they hold."""

import json

import numpy as np
import pytest

from phalanx.data.convert.build import BuildOptions, build_dataset
from phalanx.data.convert.source_splits import find_source_splits, read_sample
from phalanx.data.formats.parquet import open_parquet
from small_photos import CLASSES, write_photos
from small_samples import make_samples, write_split

parquet = pytest.importorskip("pyarrow.parquet")


def test_a_built_set_has_the_bytes_labels_and_classes_of_its_source(tmp_path):
    photos, out = write_photos(tmp_path / "photos", {"train": 4, "val": 2}), tmp_path / "out"
    results = build_dataset(photos, out, BuildOptions(to="parquet", shards=2), workers=1)
    assert results["train"].written == 12 and results["train"].encoded == 0
    for split in find_source_splits(photos):
        source = open_parquet(out, split.name)
        assert source.classes == split.classes == CLASSES
        assert source.labels.tolist() == split.source.labels.tolist()
        for number in range(split.images):
            assert source.read_encoded(number) == split.source.read_encoded(number)
            assert np.array_equal(source.read(number), split.source.read(number))
    names = sorted(path.name for path in out.glob("*.parquet"))
    assert names[0] == "train-00000-of-00002.parquet" and "validation-00000" in names[2]


def test_the_columns_are_those_of_hugging_face(tmp_path):
    samples = make_samples(7)
    write_split("parquet", samples, tmp_path, shards=1)
    file = parquet.ParquetFile(tmp_path / "train-00000-of-00001.parquet")
    schema = file.schema_arrow
    assert str(schema.field("image").type) == "struct<bytes: binary, path: string>"
    assert str(schema.field("label").type) == "int64"
    features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    assert features == {
        "image": {"_type": "Image"},
        "label": {"names": ["cat", "dög", "n01440764"], "_type": "ClassLabel"},
    }
    rows = file.read().to_pylist()
    assert rows[4] == {
        "image": {"bytes": samples[4].data, "path": samples[4].name},
        "label": samples[4].label,
    }


def test_row_groups_stay_small(tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.data.convert.parquet_writer._GROUP_IMAGES", 4)
    write_split("parquet", make_samples(10), tmp_path / "images", shards=1)
    monkeypatch.setattr("phalanx.data.convert.parquet_writer._GROUP_BYTES", 1)
    write_split("parquet", make_samples(3), tmp_path / "bytes", shards=1)
    for name, rows in (("images", [4, 4, 2]), ("bytes", [1, 1, 1])):
        facts = parquet.ParquetFile(tmp_path / name / "train-00000-of-00001.parquet").metadata
        assert [facts.row_group(n).num_rows for n in range(facts.num_row_groups)] == rows


def test_a_name_that_is_no_utf8_is_no_obstacle(tmp_path):
    photos = write_photos(tmp_path / "photos", {"train": 1, "val": 1})
    read_sample(find_source_splits(photos)[0].source, 0)
    (photos / "train/cat/cat 000.jpg").rename(photos / "train/cat/c\udcff.jpg")
    build_dataset(photos, tmp_path / "out", BuildOptions(to="parquet"), workers=1)
    file = next((tmp_path / "out").glob("train-*"))
    paths = [row["image"]["path"] for row in parquet.read_table(file).to_pylist()]
    assert paths[0] == "cat/c\ufffd.jpg"
