"""Writing an image folder: train/CLASS/FILE and val/CLASS/FILE, and boxes as ImageNet has them.

A split grows in a folder of another name and appears when it is whole. A note of how many files
are done is kept beside it, and writing goes on from there.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path, PurePosixPath

from phalanx.data.convert.sample import Sample, counted, look_at
from phalanx.data.formats.folder import IMAGE_SUFFIXES
from phalanx.data.formats.imagenet import BOXES_FILE
from phalanx.data.formats.index import PHALANX_FOLDER
from phalanx.disk import disk_errors, remove_quietly, sync_folder, write_atomically

_NAMES = {"train": "train", "valid": "val"}
BLOCK_FILES = 1024  # between two notes of how far it is
_LONGEST_NAME = 200  # bytes, where file systems take 255
_ENDING_OF = {"PNG": ".png"}


def split_folder(out: Path, split: str) -> Path:
    """Where the class folders of a split end up."""
    return out / _NAMES[split]


def growing_folder(out: Path, split: str) -> Path:
    """Where they are until the split is whole."""
    return out / f".{_NAMES[split]}.part"


def note_path(out: Path, split: str) -> Path:
    """The note of how many files are done."""
    return out / PHALANX_FOLDER / f"files-{split}.json"


def boxes_path(out: Path, split: str) -> Path:
    """The boxes of one split, until both are whole."""
    return out / PHALANX_FOLDER / f"boxes-{split}.csv"


def class_folders(classes: tuple[str, ...]) -> tuple[str, ...]:
    """A folder name for each class; numbered where names alone would sort in another order."""
    plain = all(_is_safe(name) for name in classes)
    if plain and list(classes) == sorted(set(classes)):
        return classes
    digits = len(str(len(classes) - 1))
    return tuple(
        f"{label:0{digits}}_{name.replace('/', '_').replace(chr(0), '_')}"
        for label, name in enumerate(classes)
    )


def file_name(sample: Sample, number: int, *, numbered: bool) -> str:
    """What an image's file is called: as before, or by its number where that cannot be."""
    base = PurePosixPath(sample.name).name
    usable = _is_safe(base) and base.lower().endswith(IMAGE_SUFFIXES)
    if not usable:
        return f"{number:08}{_ENDING_OF.get(look_at(sample.data).form, '.jpg')}"
    return f"{number:08}_{base}" if numbered else base


def _is_safe(name: str) -> bool:
    """Whether a file or folder can be called that and is seen by the reader."""
    length = len(name.encode(errors="surrogateescape"))
    return 0 < length <= _LONGEST_NAME and not name.startswith(".") and not {"/", "\0"} & set(name)


def written_folder(out: Path, split: str, *, count: int) -> int:
    """How many files are done, from the first on: where to go on."""
    if split_folder(out, split).is_dir():
        return count
    return min(count, _read_note(out, split)[0])


def _read_note(out: Path, split: str) -> tuple[int, int]:
    """How many files are done, and how long the table of their boxes is."""
    try:
        files, box_bytes = json.loads(note_path(out, split).read_text(encoding="utf-8"))
        return int(files), int(box_bytes)
    except (OSError, ValueError):
        return 0, 0


def write_folder(
    samples: Iterator[Sample],
    out: Path,
    split: str,
    *,
    count: int,
    classes: tuple[str, ...],
    numbered: bool = False,
    start: int = 0,
) -> None:
    """Write a split as files, the images as they are; `numbered` puts a number before each name.

    The samples are those from number `start` of `count`.
    """
    incoming = counted(samples, count - start, out)
    home, boxes = growing_folder(out, split), boxes_path(out, split)
    folders = class_folders(classes)
    with disk_errors(home):
        boxes.parent.mkdir(parents=True, exist_ok=True)
        for name in folders:
            (home / name).mkdir(parents=True, exist_ok=True)
        with boxes.open("ab") as table:
            table.truncate(_read_note(out, split)[1] if start else 0)
    for first in range(start, count, BLOCK_FILES):
        lines = []
        for number, sample in enumerate(islice(incoming, BLOCK_FILES), first):
            name = file_name(sample, number, numbered=numbered)
            _write_file(home / folders[sample.label] / name, sample.data)
            lines += [] if sample.box is None else [_box_line(name, sample)]
        _note_block(out, split, min(count, first + BLOCK_FILES), "".join(lines))
    next(incoming, None)  # one too many is an error as well
    _finish(out, split)


def _write_file(path: Path, data: bytes) -> None:
    part = path.with_name(f".{path.name}.part")
    with disk_errors(path):
        try:
            part.write_bytes(data)
            part.replace(path)
        except OSError:
            remove_quietly(part)
            raise


def _box_line(name: str, sample: Sample) -> str:
    return ",".join([name, *(repr(float(side)) for side in sample.box or ())]) + "\n"


def _note_block(out: Path, split: str, done: int, lines: str) -> None:
    """Note a block as done, once it is on the disk: one sync for all of its files."""
    boxes = boxes_path(out, split)
    with disk_errors(boxes):
        with boxes.open("ab") as table:
            table.write(lines.encode(errors="surrogateescape"))
            size = table.tell()
        os.sync()
    write_atomically(note_path(out, split), json.dumps([done, size]))


def _finish(out: Path, split: str) -> None:
    """Give the whole split its name, and the set its table of boxes."""
    home = growing_folder(out, split)
    tables = [boxes_path(out, each) for each in _NAMES]
    lines = b"".join(table.read_bytes() for table in tables if table.is_file())
    if lines:
        write_atomically(out / BOXES_FILE, lines)
    with disk_errors(home):
        for folder in home.iterdir():
            with suppress(OSError):  # a class without images in this split has no folder
                folder.rmdir()
        home.replace(split_folder(out, split))
        sync_folder(out)
    remove_quietly(note_path(out, split))
