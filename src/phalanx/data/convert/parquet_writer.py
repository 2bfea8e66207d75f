"""Writes parquet files like Hugging Face's `datasets`: a column of images and one of labels.

An image is a struct of its bytes and its path; the class names are in the metadata, where
`datasets` and our own reader expect them. There is no column for boxes.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.data.convert.sample import Sample
from phalanx.data.convert.writer import ShardWriter
from phalanx.data.formats.parquet import import_pyarrow
from phalanx.data.formats.shards import SHARD_PREFIX

# A reader decodes a whole row group to get one image, so groups are small.
_GROUP_IMAGES, _GROUP_BYTES = 100, 64 * 2**20


class ParquetWriter(ShardWriter):
    """Writes parquet shards, see `formats.parquet`; images are not re-encoded."""

    only_jpeg = False
    takes_shards = True
    image_overhead = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        self._arrow = import_pyarrow()

    def shard_path(self, number: int) -> Path:
        """The path of a complete shard."""
        name = f"{SHARD_PREFIX[self.split]}-{number:05}-of-{self.num_shards:05}.parquet"
        return self.out / name

    def find_files(self) -> Iterable[Path]:
        """The shards."""
        return self.out.glob(f"{SHARD_PREFIX[self.split]}-*-of-*.parquet")

    def start(self, whole_shards: int) -> None:
        """Nothing to prepare: each shard contains the class names."""

    def write_shard(self, file: BinaryIO, number: int, samples: Iterator[Sample]) -> None:
        """Write a row for each image, in small row groups."""
        schema = self._build_schema()
        # JPEGs cannot be compressed further; statistics of whole images would only be long
        options = {"compression": "none", "write_statistics": ["label"]}
        with self._arrow.parquet.ParquetWriter(file, schema, **options) as writer:
            for rows in _group(samples):
                columns = {
                    "image": [{"bytes": row.data, "path": _to_utf8(row.name)} for row in rows],
                    "label": [row.label for row in rows],
                }
                writer.write_table(self._arrow.Table.from_pydict(columns, schema=schema))

    def _build_schema(self) -> Any:
        """The two columns, with the metadata from which `datasets` knows their types."""
        arrow = self._arrow
        image = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
        names = [_to_utf8(name) for name in self.classes]
        features = {
            "image": {"_type": "Image"},
            "label": {"names": names, "_type": "ClassLabel"},
        }
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        return arrow.schema([("image", image), ("label", arrow.int64())], metadata=metadata)


def _group(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """The samples in groups of limited numbers of images and bytes."""
    rows: list[Sample] = []
    size = 0
    for sample in samples:
        rows.append(sample)
        size += len(sample.data)
        if len(rows) == _GROUP_IMAGES or size >= _GROUP_BYTES:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _to_utf8(name: str) -> str:
    """A name with bytes that are not UTF-8 replaced, since Arrow cannot store them."""
    return name.encode(errors="surrogateescape").decode(errors="replace")
