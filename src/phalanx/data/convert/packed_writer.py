"""Writes packed files, see `formats.packed`: images first, then the index from all blocks.

A split is written to SPLIT.phx.part, block by block. The record of a block holds its rows of the
index, and thus where the block ends in the file: anything after that is truncated when writing
continues.
"""

import json
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from phalanx.data.convert.sample import Sample
from phalanx.data.convert.writer import ShardWriter
from phalanx.data.formats.file_bytes import crc32c
from phalanx.data.formats.packed import ALIGN, END_MAGIC, FORMAT, HEAD, MAGIC, TAIL, packed_path
from phalanx.data.pillow_image import read_image_header
from phalanx.disk import sync_folder
from phalanx.errors import DataError

_COLUMNS = {  # of the index, with their dtypes
    "offsets": "<i8",
    "sizes": "<i8",
    "labels": "<i8",
    "widths": "<i4",
    "heights": "<i4",
    "checksums": "<u4",
}
_NO_BOX = (float("nan"),) * 4

_Block = dict[str, NDArray[Any]]  # rows [n, 6], letters, name_bytes [n], boxes [n, 4]


class PackedWriter(ShardWriter):
    """Writes one packed file."""

    only_jpeg = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path = packed_path(self.out, self.split)
        self.part = self.path.with_name(f"{self.path.name}.part")
        header = {
            "format": FORMAT,
            "images": self.count,
            "classes": self.classes,
            "encoding": "raw" if self.raw else "jpeg",
            "short_side": self.short_side,
            "source": self.source,
        }
        self.header = json.dumps(header, sort_keys=True).encode()
        self.head = HEAD.pack(MAGIC, len(self.header)) + self.header

    def is_finished(self) -> bool:
        """Whether the file has its final name."""
        return self.path.is_file()

    def find_files(self) -> Iterable[Path]:
        """The file under either name."""
        return self.part, self.path

    def count_whole_shards(self) -> int:
        """The number of recorded blocks; 0 if the file has another header or is too short."""
        whole = super().count_whole_shards()
        try:
            with self.part.open("rb") as file:
                same = file.read(len(self.head)) == self.head
                return whole if same and file.seek(0, os.SEEK_END) >= self._find_end(whole) else 0
        except FileNotFoundError:
            return 0

    def start(self, whole_shards: int) -> None:
        """Start with the header, or continue the existing file."""
        if not whole_shards:
            self.part.parent.mkdir(parents=True, exist_ok=True)
            self.part.write_bytes(self.head)

    def write_shard(self, file: BinaryIO, number: int, samples: Iterator[Sample]) -> None:
        """Append the images of a block to the packed file; its record is their index rows."""
        names, rows, boxes = [], [], []
        with self._open_part(number) as images:
            for sample in samples:
                images.write(bytes(-images.tell() % ALIGN))
                height, width = sample.shape or read_image_header(sample.data).shape
                checksum, size = crc32c(sample.data), len(sample.data)
                rows.append((images.tell(), size, sample.label, width, height, checksum))
                names.append(sample.name.encode(errors="surrogateescape"))
                boxes.append(sample.box or _NO_BOX)
                images.write(sample.data)
            images.flush()
            os.fsync(images.fileno())
        np.savez(
            file,
            rows=np.array(rows, np.int64),
            letters=np.frombuffer(b"".join(names), np.uint8),
            name_bytes=np.array([len(name) for name in names], np.int64),
            boxes=np.array(boxes, "<f4"),
        )

    def _open_part(self, number: int) -> BinaryIO:
        """The partial file, truncated to the start of a block, to be continued there."""
        file = self.part.open("r+b")
        file.truncate(self._find_end(number))
        file.seek(0, os.SEEK_END)
        return file

    def _find_end(self, blocks: int) -> int:
        """The size of the file after so many blocks."""
        if not blocks:
            return len(self.head)
        offset, size = self._read_block(blocks - 1)["rows"][-1, :2]
        return int(offset + size)

    def _read_block(self, number: int) -> _Block:
        path = self.shard_path(number)
        try:
            with np.load(path) as block:
                return dict(block)
        except (ValueError, EOFError, zipfile.BadZipFile):
            raise DataError(f"{path}: is damaged; remove {self.out} and build again") from None

    def finish(self) -> None:
        """Append the index, and give the file its final name."""
        blocks = [self._read_block(number) for number in range(self.num_shards)]
        joined = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
        index = {
            name: joined["rows"][:, column].astype(dtype)
            for column, (name, dtype) in enumerate(_COLUMNS.items())
        }
        index["names.letters"] = joined["letters"]
        index["names.ends"] = np.cumsum(joined["name_bytes"], dtype="<i8")
        if not np.isnan(joined["boxes"]).all():
            index["boxes"] = joined["boxes"]
        with self._open_part(len(blocks)) as file:
            _write_index(file, index, zlib.crc32(self.header))
            file.flush()
            os.fsync(file.fileno())
        self.part.replace(self.path)
        sync_folder(self.out)


def _write_index(file: BinaryIO, arrays: dict[str, NDArray[Any]], header_crc: int) -> None:
    """Write the arrays, a directory of them, and the tail."""
    file.write(bytes(-file.tell() % ALIGN))
    begin = file.tell()
    crc, directory = 0, {}
    for name, values in arrays.items():
        padding = bytes(-file.tell() % ALIGN)
        directory[name] = [values.dtype.str, list(values.shape), file.tell() + len(padding)]
        data = padding + values.tobytes()
        crc = zlib.crc32(data, crc)
        file.write(data)
    place = file.tell()
    text = json.dumps(directory).encode()
    file.write(text)
    crc = zlib.crc32(text, crc)
    file.write(TAIL.pack(begin, place, len(text), crc, header_crc, END_MAGIC))
