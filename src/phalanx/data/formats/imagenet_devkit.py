"""ImageNet's development kit: which synset each validation image shows.

The kit lists a number for each image, and says in meta.mat which synset a number stands for. That
is a MATLAB file, version 5, of which just as much is read here as this takes: structures, text and
numbers.
"""

import io
import struct
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.errors import DataError

_ARCHIVE = "ILSVRC2012_devkit_t12.tar.gz"
_TRUTH, _META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
SYNSET_LABELS = "imagenet_2012_validation_synset_labels.txt"  # one synset a line, image by image
_HEADER_BYTES = 128
_MATRIX, _COMPRESSED = 14, 15
_CELL_CLASS, _STRUCT_CLASS, _CHAR_CLASS = 1, 2, 4
_DTYPES = {
    1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8",
}  # fmt: skip
_CODECS = {
    16: "utf-8", 17: "utf-16-le", 18: "utf-32-le", 4: "utf-16-le", 2: "latin-1", 1: "latin-1",
}  # fmt: skip


def read_validation_synsets(root: Path) -> list[str]:
    """The synset of each validation image in the order of their names.

    From the kit's archive, or from a text file with a synset a line where that lies beside it.
    """
    labels = root / SYNSET_LABELS
    if labels.is_file():
        return labels.read_text(encoding="utf-8").split()
    kit = _read_kit(root / _ARCHIVE)
    where = f"{root / _ARCHIVE}: {_META}"
    try:
        synsets = read_numbered_synsets(kit[_META])
    except (ValueError, KeyError, IndexError, struct.error, zlib.error) as cause:
        raise DataError(
            f"{where}: cannot be read ({cause}); put {SYNSET_LABELS}, the synset of each "
            "validation image on a line of its own, beside the archive"
        ) from None
    numbers = [int(word) for word in kit[_TRUTH].split()]
    unknown = sorted(set(numbers) - set(synsets))
    if unknown:
        raise DataError(f"{where}: names no synset number {unknown[0]}, which {_TRUTH} has")
    return [synsets[number] for number in numbers]


def _read_kit(path: Path) -> dict[str, bytes]:
    """The two files of the kit that tell what validation images show."""
    if not path.is_file():
        raise DataError(
            f"{path}: not here, and without it nothing tells what the validation images show; "
            f"put it there, or {SYNSET_LABELS}"
        )
    try:
        with tarfile.open(path) as archive:
            members = {Path(member.name).name: member for member in archive if member.isfile()}
            files = {n: archive.extractfile(members[n]) for n in (_TRUTH, _META) if n in members}
            found = {name: file.read() for name, file in files.items() if file}
    except (OSError, EOFError, zlib.error, tarfile.TarError) as cause:
        raise DataError(f"{path}: cannot be read ({cause}); get it again") from None
    missing = [name for name in (_TRUTH, _META) if name not in found]
    if missing:
        raise DataError(f"{path}: has no {missing[0]}; get it again")
    return found


def read_numbered_synsets(data: bytes) -> dict[int, str]:
    """The synset that each ILSVRC2012_ID stands for."""
    variables = _read_mat(data)
    table = variables["synsets"]
    return {
        int(np.ravel(number)[0]): str(name)
        for number, name in zip(table["ILSVRC2012_ID"], table["WNID"], strict=True)
    }


def _read_mat(data: bytes) -> dict[str, Any]:
    """The variables of a MATLAB 5 file; a structure is a list of values for each field."""
    if data[126:128] != b"IM":
        raise ValueError("not a little-endian MATLAB 5 file")
    variables = {}
    for kind, content in _read_elements(data[_HEADER_BYTES:]):
        if kind == _MATRIX:
            name, value = _read_matrix(content)
            variables[name] = value
    return variables


def _read_elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The elements one after the other: what kind each is of, and its bytes."""
    stream = io.BytesIO(data)
    while tag := stream.read(8):
        kind, size = struct.unpack("<II", tag)
        if kind >> 16:  # up to four bytes lie in the tag itself
            yield kind & 0xFFFF, tag[4 : 4 + (kind >> 16)]
            continue
        content = stream.read(size)
        if len(content) < size:
            raise ValueError("the file is cut short")
        if kind == _COMPRESSED:  # the only kind that is not filled up to eight bytes
            yield from _read_elements(zlib.decompress(content))
            continue
        stream.read(-size % 8)
        yield kind, content


def _read_matrix(data: bytes) -> tuple[str, Any]:
    """The name and the value of an array."""
    parts = list(_read_elements(data))
    if not parts:
        return "", np.empty(0)
    flags, shape, name = (content for _, content in parts[:3])
    kind = flags[0]
    count = int(np.prod(np.frombuffer(shape, "<i4")))
    readers = {_CELL_CLASS: _read_cells, _STRUCT_CLASS: _read_structure, _CHAR_CLASS: _read_text}
    return name.decode("latin-1"), readers.get(kind, _read_numbers)(parts[3:], count)


def _read_cells(parts: list[tuple[int, bytes]], count: int) -> list[Any]:
    return [_read_matrix(content)[1] for _, content in parts[:count]]


def _read_structure(parts: list[tuple[int, bytes]], count: int) -> dict[str, list[Any]]:
    width = int.from_bytes(parts[0][1], "little")
    names = parts[1][1]
    fields = [
        names[start : start + width].rstrip(b"\0").decode("latin-1")
        for start in range(0, len(names), width)
    ]
    values = [_read_matrix(content)[1] for _, content in parts[2 : 2 + count * len(fields)]]
    return {field: values[number :: len(fields)] for number, field in enumerate(fields)}


def _read_text(parts: list[tuple[int, bytes]], count: int) -> str:
    return parts[0][1].decode(_CODECS[parts[0][0]]) if parts else ""


def _read_numbers(parts: list[tuple[int, bytes]], count: int) -> Any:
    kind, content = parts[0]
    return np.frombuffer(content, f"<{_DTYPES[kind]}")
