"""Writes an image folder: train/CLASS/FILE and val/CLASS/FILE, and boxes in ImageNet's format.

A split is written to a hidden folder, which is renamed when it is finished. The record of a block
of files is the table of their boxes.
"""

import hashlib
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import numpy as np

from phalanx.data.convert.sample import (
    Sample,
    choose_suffix,
    find_promised_format,
    name_as_jpeg,
)
from phalanx.data.convert.source_splits import SourceSplit
from phalanx.data.convert.writer import ShardWriter
from phalanx.data.formats.imagenet import BOXES_FILE
from phalanx.data.formats.index import PHALANX_FOLDER
from phalanx.data.formats.sources import find_portable_name
from phalanx.data.layouts.image_files import find_image_suffixes
from phalanx.disk import sync_folder, write_atomically
from phalanx.errors import DataError

_NAMES = {"train": "train", "valid": "val"}
_MAX_NAME_BYTES = 200  # file systems accept 255


class FolderWriter(ShardWriter):
    """Writes images as files in class folders."""

    only_jpeg = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.folder = self.out / _NAMES[self.split]
        self.growing = self.out / f".{_NAMES[self.split]}.part"
        self.class_folders = name_class_folders(self.classes)

    def _boxes_path(self, split: str) -> Path:
        """The table of boxes of one split, from which that of both is made."""
        return self.out / PHALANX_FOLDER / f"boxes-{split}.csv"

    def is_finished(self) -> bool:
        """Whether the folder has its final name."""
        return self.folder.is_dir()

    def find_files(self) -> Iterable[Path]:
        """The folder under either name, and the table of boxes."""
        return self.growing, self.folder, self._boxes_path(self.split)

    def start(self, whole_shards: int) -> None:
        """Start with an empty folder, or continue the existing one."""
        if not whole_shards:
            shutil.rmtree(self.growing, ignore_errors=True)

    def write_shard(self, file: BinaryIO, number: int, samples: Iterator[Sample]) -> None:
        """Write the files of a block; its record is a table of boxes."""
        for place, sample in enumerate(samples, self.bounds[number]):
            name = _choose_file_name(sample, place, numbered=self.number_files)
            folder = self.growing / self.class_folders[sample.label]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(sample.data)
            if sample.box is not None:
                line = ",".join([name, *(repr(float(side)) for side in sample.box)])
                file.write(f"{line}\n".encode(errors="surrogateescape"))
        os.sync()  # once for all files, before the record says that they exist

    def finish(self) -> None:
        """Write the table of boxes, and rename the folder of the split."""
        records = [self.shard_path(number) for number in range(self.num_shards)]
        own = b"".join(record.read_bytes() for record in records)
        write_atomically(self._boxes_path(self.split), own)
        tables = [self._boxes_path(split) for split in _NAMES]
        boxes = b"".join(table.read_bytes() for table in tables if table.is_file())
        if boxes:
            write_atomically(self.out / BOXES_FILE, boxes)
        self.growing.replace(self.folder)
        sync_folder(self.out)


def name_class_folders(classes: tuple[str, ...]) -> tuple[str, ...]:
    """A folder name for each class; with numbers if the names would sort in another order."""
    if all(map(_is_usable, classes)) and list(classes) == sorted(set(classes)):
        return classes
    digits = len(str(len(classes) - 1))
    return tuple(
        f"{label:0{digits}}_{name.replace('/', '_').replace(chr(0), '_')}"
        for label, name in enumerate(classes)
    )


def _choose_file_name(sample: Sample, number: int, *, numbered: bool) -> str:
    """The name of an image's file: its own, or its number if that cannot be used."""
    name = PurePosixPath(sample.name).name
    if not _is_usable(name) or not name.lower().endswith(find_image_suffixes()):
        return f"{number:08}.{choose_suffix(sample.data)}"
    return f"{number:08}_{name}" if numbered else name


def _is_usable(name: str) -> bool:
    """Whether a file or folder can have that name, and is not ignored when read."""
    length = len(name.encode(errors="surrogateescape"))
    return (
        0 < length <= _MAX_NAME_BYTES and not name.startswith(".") and not {"/", "\0"} & set(name)
    )


def has_name_clash(split: SourceSplit, *, shrinks: bool) -> bool:
    """Whether two images of a class may get the same file name.

    shrinks: images are re-encoded, as JPEG unless they are PNG.
    """
    if split.labels is None:  # names in ImageNet are unique
        return False
    seen = np.empty(split.images, "S16")
    for number in range(split.images):
        name = find_portable_name(split.source, number)
        if shrinks and find_promised_format(name) != "PNG":
            name = name_as_jpeg(name)
        sample = Sample(name=name, data=b"", label=0)
        name = _choose_file_name(sample, number, numbered=False)
        key = f"{split.labels[number]}/{name}".encode(errors="surrogateescape")
        seen[number] = hashlib.blake2b(key, digest_size=8).hexdigest().encode()
    return len(np.unique(seen)) < split.images


def refuse_missing_classes(split: SourceSplit, bad: Collection[int]) -> None:
    """Raise DataError if a training class has no images: folders would number classes anew."""
    if split.labels is None or split.name != "train":
        return
    counts = split.count_classes(bad)
    if not counts.all():
        name = split.classes[int(counts.argmin())]
        raise DataError(
            f"{split.folder}: class {name!r} has no training image, which folders cannot express; "
            "choose --to tar, tfrecord, parquet or packed"
        )
