"""Parquet files with an image column and a label column, as Hugging Face publishes them.

Parquet is read by row group, and reading one image decodes its whole group. A few groups are kept,
so reading in order is fast; in shuffled order every image costs a group, which is slow for groups
of hundreds of images: convert once with `phalanx data build --to packed`, and train from that.
"""

import hashlib
import json
import os
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.data.formats.decode import BadImage
from phalanx.data.formats.image_file import refuse_special
from phalanx.data.formats.index import NO_LABEL, WRONG_LABEL, Index, IndexedSource
from phalanx.data.formats.shards import (
    MAX_CLASSES,
    SCAN_DTYPE,
    SHARD_SPLITS,
    ShardFiles,
    ShardFormat,
    ShardScan,
    refuse_unusable,
)
from phalanx.data.string_array import pack_strings, replace_unstorable
from phalanx.errors import DataError

_SPLITS = {"train": SHARD_SPLITS["train"], "valid": (*SHARD_SPLITS["valid"], "test")}
_SHARD_FILES = ShardFiles(
    r"-of-(?P<total>\d+)(?:-[0-9a-f]+)?\.parquet", splits=_SPLITS, folders=("", "data", "default")
)
_IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "bytes")  # preferred if there are several
_WANTED = {
    "image": "store the bytes of image files there, not their paths",
    "label": "store class numbers there, as class_encode_column of Hugging Face's datasets does",
}
_LABEL_COLUMNS = ("label", "labels", "fine_label", "cls")
_GROUPS_KEPT, _BYTES_KEPT = 4, 256 * 2**20  # of decoded row groups, per process
_ARROW_ERRORS = (OSError, ValueError, NotImplementedError)


def import_pyarrow() -> Any:
    """The module that reads and writes parquet; DataError if it is not installed."""
    # Arrow's own allocator does not return the memory of row groups, and grows for many epochs
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            "parquet needs pyarrow, which is not installed; pip install 'phalanx[parquet]'"
        ) from None
    return pyarrow


def has_parquet_files(root: Path) -> bool:
    """Whether there are parquet files of a split in the folder."""
    return _SHARD_FILES.exist_in(root) or any(find_files(root, split) for split in _SPLITS)


def find_files(root: Path, split: str) -> list[Path]:
    """The files of a split: numbered ones, else all in a folder named after the split."""
    numbered = _SHARD_FILES.find(root, split)
    folders = [root / name for name in _SPLITS[split]]
    return numbered or next((files for f in folders if (files := sorted(f.glob("*.parquet")))), [])


class _ParquetFile:
    """One file: its columns of images and labels, and its row groups."""

    def __init__(self, path: Path):
        self.path = path
        refuse_special(path)
        self.file = import_pyarrow().parquet.ParquetFile(path)
        self.schema = self.file.schema_arrow
        metadata = self.file.metadata
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self.group_starts = np.cumsum([0, *rows])

    def locate_row(self, row: int) -> tuple[int, int]:
        """The row group of a row, and the row's number in it."""
        group = int(np.searchsorted(self.group_starts, row, side="right")) - 1
        if group >= len(self.group_starts) - 1:
            raise ValueError("the file has fewer rows than when its index was built")
        return group, row - int(self.group_starts[group])

    def read_group(self, group: int) -> Any:
        """The encoded images of one row group."""
        column = self.find_image_column()
        return self.file.read_row_group(group, [column], use_threads=False).flatten().column(0)

    def find_image_column(self) -> str:
        """The column with the bytes of images: a struct's "bytes", or a binary column."""
        types = import_pyarrow().types
        found = {}
        for field in self.schema:
            if types.is_binary(field.type) or types.is_large_binary(field.type):
                found[field.name] = field.name
            elif types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0:
                found[field.name] = f"{field.name}.bytes"
        return found[self._choose_column("image", list(found), _IMAGE_COLUMNS)]

    def find_label_column(self) -> str:
        """The column with the class numbers."""
        types = import_pyarrow().types
        found = [field.name for field in self.schema if types.is_integer(field.type)]
        return self._choose_column("label", found, _LABEL_COLUMNS)

    def _choose_column(self, what: str, found: list[str], usual: tuple[str, ...]) -> str:
        known = [name for name in usual if name in found]
        unfit = [field for field in self.schema if field.name in usual[:2]]  # no other is meant
        if known or (len(found) == 1 and not unfit):
            return (known or found)[0]
        if unfit:
            raise DataError(
                f"{self.path}: its column {unfit[0].name!r} is of type {unfit[0].type}; "
                f"{_WANTED[what]}"
            )
        has = ", ".join(f"{field.name} ({field.type})" for field in self.schema)
        raise DataError(
            f"{self.path}: cannot tell which column holds the {what} ({has}); name it {usual[0]!r}"
        )

    def read_class_names(self) -> dict[int, str]:
        """The class names in the metadata that Hugging Face adds; empty without it."""
        try:
            metadata = json.loads((self.schema.metadata or {})[b"huggingface"])
            names = metadata["info"]["features"][self.find_label_column()]["names"]
            return {label: replace_unstorable(str(n)) for label, n in enumerate(names)}
        except (KeyError, TypeError, ValueError, RecursionError):
            return {}


class _ParquetSource(IndexedSource):
    """Random access to the rows of parquet files."""

    def __init__(self, root: Path, index: Index):
        super().__init__(root, index)
        self._files: dict[int, _ParquetFile] = {}
        self._groups: OrderedDict[tuple[int, int], Any] = OrderedDict()

    def read_encoded(self, index: int) -> bytes:
        """The bytes of the encoded image in the row; raises BadImage."""
        number, row = int(self.index.file_numbers[index]), int(self.index.offsets[index])
        if self.index.sizes[index] < 0:
            raise self.known_bad(index)
        try:
            with self._lock:  # pyarrow crashes when two threads read a file at a time
                if number not in self._files:
                    self._files[number] = _ParquetFile(self.root / self.index.files[number])
                group, row_in_group = self._files[number].locate_row(row)
                value = self._read_group(number, group)[row_in_group].as_py()
        except _ARROW_ERRORS as cause:
            why = getattr(cause, "strerror", None) or str(cause)
            raise BadImage(self.name(index), why) from None
        if value is None:
            raise BadImage(self.name(index), "the row holds no image, at most the path to one")
        self.limits.refuse_too_large(len(value), self.name(index))
        return bytes(value)

    def _read_group(self, number: int, group: int) -> Any:
        """The images of one row group; the least recently used groups are dropped."""
        key = number, group
        if key not in self._groups:
            self._groups[key] = self._files[number].read_group(group)
        self._groups.move_to_end(key)
        while len(self._groups) > 1 and (
            len(self._groups) > _GROUPS_KEPT
            or sum(kept.nbytes for kept in self._groups.values()) > _BYTES_KEPT
        ):
            self._groups.popitem(last=False)
        return self._groups[key]

    def fingerprint(self) -> dict[str, Any]:
        """Counts, and a hash over labels and the names and sizes of the files."""
        fingerprint = self.index.fingerprint()
        digest = hashlib.sha256(fingerprint["sha256"].encode())
        for number in range(len(self.index.files)):
            size = -1  # a missing file is reported when it is read
            with suppress(OSError):
                size = (self.root / self.index.files[number]).stat().st_size
            digest.update(f"{size}\n".encode())
        return {**fingerprint, "sha256": digest.hexdigest()}


def open_parquet(root: Path, split: str) -> _ParquetSource:
    """One split of a dataset in parquet files."""
    index = _FORMAT.open_index(root, split)
    if index is None:
        raise DataError(
            f"{root}: no {_SPLITS[split][0]}-00000-of-00001.parquet here or in data/, and no "
            f"parquet files in {_SPLITS[split][0]}/; point --data-dir at the folder that holds them"
        )
    source = _ParquetSource(root, _FORMAT.assign_classes(index, root, split))
    refuse_unusable(source)
    return source


def _scan_file(path: Path) -> ShardScan:
    """The rows of one file; in its index an offset is a row, and the size of a good image is 0."""
    refuse_special(path)
    try:
        file = _ParquetFile(path)
        column = file.file.read([file.find_label_column()], use_threads=False).column(0)
    except _ARROW_ERRORS as cause:
        raise DataError(f"{path}: cannot be read as parquet ({cause}); fetch it again") from None
    file.find_image_column()  # raises now if there is none
    class_names = file.read_class_names()
    missing = column.is_null().to_numpy()
    labels = np.where(missing, -1, column.fill_null(0).to_numpy().astype(np.int64))
    wrong = (labels < 0) | (labels >= (len(class_names) or MAX_CLASSES))
    rows = np.zeros(len(labels), SCAN_DTYPE)
    rows["offset"], rows["label"], rows["box"] = np.arange(len(labels)), labels, np.nan
    rows["size"] = np.where(missing, NO_LABEL, np.where(wrong, WRONG_LABEL, 0))
    names = pack_strings(map(str, range(len(labels))))
    return ShardScan(names=names, rows=rows, class_names=class_names)


_FORMAT = ShardFormat(key="parquet", find=find_files, scan=_scan_file)
