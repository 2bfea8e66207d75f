"""The index of a packed file while it grows, and the note by which its writing goes on.

Beside the growing file two more are kept in .phalanx/: a journal with a line for each image, and a
note of how many images, bytes of the file and bytes of the journal are on the disk. What was
written after the last note is cut off.
"""

import json
import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.data.convert.sample import Box
from phalanx.data.formats.index import PHALANX_FOLDER
from phalanx.data.formats.packed import packed_path
from phalanx.disk import disk_errors, remove_quietly, sync_folder, write_atomically
from phalanx.errors import DataError

_NO_BOX = (float("nan"),) * 4


class PackedEntry(NamedTuple):
    """One image of a packed file: what it is called, what it shows and where it lies."""

    name: str
    label: int
    box: Box | None
    offset: int
    size: int
    width: int
    height: int
    checksum: int


class PackedIndexBuilder:
    """The entries of a packed file, in packed arrays."""

    def __init__(self) -> None:
        self.offsets, self.sizes, self.labels = array("q"), array("q"), array("q")
        self.widths, self.heights, self.checksums = array("i"), array("i"), array("I")
        self.letters, self.ends, self.boxes = bytearray(), array("q"), array("f")
        self.has_boxes = False

    def add(self, entry: PackedEntry) -> None:
        """Note one image that was written."""
        self.offsets.append(entry.offset)
        self.sizes.append(entry.size)
        self.labels.append(entry.label)
        self.widths.append(entry.width)
        self.heights.append(entry.height)
        self.checksums.append(entry.checksum)
        self.letters += entry.name.encode(errors="surrogateescape")
        self.ends.append(len(self.letters))
        self.boxes.extend(entry.box or _NO_BOX)
        self.has_boxes = self.has_boxes or entry.box is not None

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays by the name they have in the file, little-endian everywhere."""
        found: dict[str, NDArray[Any]] = {
            "offsets": np.array(self.offsets, "<i8"),
            "sizes": np.array(self.sizes, "<i8"),
            "labels": np.array(self.labels, "<i8"),
            "widths": np.array(self.widths, "<i4"),
            "heights": np.array(self.heights, "<i4"),
            "checksums": np.array(self.checksums, "<u4"),
            "names.letters": np.frombuffer(bytes(self.letters), np.uint8),
            "names.ends": np.array(self.ends, "<i8"),
        }
        if self.has_boxes:
            found["boxes"] = np.array(self.boxes, "<f4").reshape(-1, 4)
        return found


class _PackedProgress(NamedTuple):
    """How much of a packed file is on the disk."""

    images: int = 0
    file_bytes: int = 0
    journal_bytes: int = 0


NOTHING = _PackedProgress()


def part_path(out: Path, split: str) -> Path:
    """The packed file of a split until it is whole."""
    path = packed_path(out, split)
    return path.with_name(f"{path.name}.part")


def journal_path(out: Path, split: str) -> Path:
    """The entries of the images that are written."""
    return out / PHALANX_FOLDER / f"packed-{split}.jsonl"


def note_path(out: Path, split: str) -> Path:
    """The note of how far it is."""
    return out / PHALANX_FOLDER / f"packed-{split}.json"


def read_note(out: Path, split: str, head: bytes) -> _PackedProgress:
    """How far a file with this head was written; nothing where that cannot be relied on."""
    part, journal = part_path(out, split), journal_path(out, split)
    try:
        note = _PackedProgress(*json.loads(note_path(out, split).read_bytes()))
        enough = part.stat().st_size >= note.file_bytes >= len(head)
        enough = enough and journal.stat().st_size >= note.journal_bytes
        with part.open("rb") as file:
            return note if enough and file.read(len(head)) == head else NOTHING
    except (OSError, ValueError, TypeError):
        return NOTHING


def read_entries(out: Path, split: str, note: _PackedProgress) -> Iterator[PackedEntry]:
    """The entries that a note vouches for."""
    with journal_path(out, split).open("rb") as journal:
        for number in range(note.images):
            try:
                name, label, box, *place = json.loads(journal.readline())
            except ValueError:
                raise DataError(
                    f"{journal_path(out, split)}: line {number + 1} is damaged; remove {out} and "
                    "build again"
                ) from None
            yield PackedEntry(name, label, None if box is None else tuple(box), *place)


def clear_away(out: Path, split: str) -> None:
    """Remove the journal and the note, which a whole file does without."""
    for path in (note_path(out, split), journal_path(out, split)):
        remove_quietly(path)


class PackedJournal:
    """Writes down which images of a growing file are on the disk."""

    def __init__(self, out: Path, split: str, note: _PackedProgress):
        self.out, self.split, self.note = out, split, note
        self.lines: list[str] = []

    def add(self, entry: PackedEntry) -> None:
        """Keep the entry of an image until the next note."""
        self.lines.append(json.dumps(entry) + "\n")

    def keep(self, file: BinaryIO) -> None:
        """Note all images so far, once they and their entries are on the disk."""
        file.flush()
        os.fsync(file.fileno())
        path = journal_path(self.out, self.split)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as journal:
            journal.truncate(self.note.journal_bytes)
            journal.write("".join(self.lines).encode())
            journal.flush()
            os.fsync(journal.fileno())
            size = journal.tell()
        self.note = _PackedProgress(self.note.images + len(self.lines), file.tell(), size)
        self.lines = []
        write_atomically(note_path(self.out, self.split), json.dumps(self.note))


@contextmanager
def growing_file(out: Path, split: str, note: _PackedProgress) -> Iterator[BinaryIO]:
    """A file to go on writing after a note; whole, it gets its name, and broken off, it waits.

    One that was broken off before its first note is taken away.
    """
    path, part = packed_path(out, split), part_path(out, split)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with _open_at(part, note) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            if not note_path(out, split).exists():
                remove_quietly(part)
            raise
        sync_folder(path.parent)
    clear_away(out, split)


def _open_at(part: Path, note: _PackedProgress) -> BinaryIO:
    """The growing file, without what was written after the note."""
    if not note.images:
        return part.open("wb")
    file = part.open("r+b")
    file.truncate(note.file_bytes)
    file.seek(note.file_bytes)
    return file
