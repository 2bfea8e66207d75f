"""Writing parquet files as Hugging Face's `datasets` does: a column of images and one of labels.

An image is a struct of its bytes and its path; the names of the classes lie in the metadata, where
`datasets` and our own reader look for them. There is no column for boxes.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.data.convert.sample import Sample
from phalanx.data.convert.writer import ShardWriter
from phalanx.data.formats.parquet import import_pyarrow
from phalanx.data.formats.shards import SHARD_PREFIX

# A reader decodes a whole row group to get at one image, so groups are small.
_GROUP_IMAGES, _GROUP_BYTES = 100, 64 * 2**20


class ParquetWriter(ShardWriter):
    """Writes parquet shards, see `formats.parquet`: images stay as they are."""

    only_jpeg = False
    takes_shards = True
    image_overhead = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        self._arrow = import_pyarrow()

    def shard_path(self, number: int) -> Path:
        """Where a shard appears when it is whole."""
        name = f"{SHARD_PREFIX[self.split]}-{number:05}-of-{self.num_shards:05}.parquet"
        return self.out / name

    def find_files(self) -> Iterable[Path]:
        """The shards."""
        return self.out.glob(f"{SHARD_PREFIX[self.split]}-*-of-*.parquet")

    def start(self, whole_shards: int) -> None:
        """Nothing: each shard names the classes itself."""

    def write_shard(self, file: BinaryIO, number: int, samples: Iterator[Sample]) -> None:
        """A row for each image, in small groups."""
        schema = self._build_schema()
        # JPEGs do not get smaller; statistics of whole images would only be long
        options = {"compression": "none", "write_statistics": ["label"]}
        with self._arrow.parquet.ParquetWriter(file, schema, **options) as writer:
            for rows in _group(samples):
                columns = {
                    "image": [{"bytes": row.data, "path": _to_utf8(row.name)} for row in rows],
                    "label": [row.label for row in rows],
                }
                writer.write_table(self._arrow.Table.from_pydict(columns, schema=schema))

    def _build_schema(self) -> Any:
        """The two columns, with the metadata by which `datasets` knows what they are."""
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
    """The samples in groups of not too many images or bytes."""
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
    """A name with question marks for bytes that are no UTF-8, which Arrow cannot hold."""
    return name.encode(errors="surrogateescape").decode(errors="replace")
