"""ImageNet's development kit: the synset of each validation image.

The kit lists a number for each image, and in meta.mat the synset of each number. That is a MATLAB
file, version 5; only what it needs is read here: structures, text and numbers.
"""

import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.data.formats.arrays import read_archive
from phalanx.errors import DataError

_ARCHIVE = "ILSVRC2012_devkit_t12.tar.gz"
_TRUTH, _META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
SYNSET_LABELS = "imagenet_2012_validation_synset_labels.txt"  # one line with a synset per image
_HEADER_BYTES = 128
_MATRIX, _COMPRESSED = 14, 15
_STRUCT_CLASS, _CHAR_CLASS = 2, 4
_DTYPES = {
    1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8",
}  # fmt: skip
_CODECS = {
    16: "utf-8", 17: "utf-16-le", 18: "utf-32-le", 4: "utf-16-le", 2: "latin-1", 1: "latin-1",
}  # fmt: skip


def read_validation_synsets(root: Path) -> list[str]:
    """The synset of each validation image in the order of their names.

    From a text file with one synset per line if there is one, else from the kit's archive.
    """
    labels = root / SYNSET_LABELS
    if labels.is_file():
        return labels.read_text(encoding="utf-8").split()
    path = root / _ARCHIVE
    if not path.is_file():
        raise DataError(
            f"{path}: not found, and only it says what the validation images show; put it there, "
            f"or {SYNSET_LABELS}"
        )
    truth, meta = read_archive(path, (_TRUTH, _META), hint="download it again")
    try:
        synsets = read_numbered_synsets(meta)
    except (ValueError, KeyError, IndexError, struct.error, zlib.error) as cause:
        raise DataError(
            f"{path}: {_META}: cannot be read ({cause}); put {SYNSET_LABELS}, the synset of each "
            "validation image on a line of its own, beside the archive"
        ) from None
    numbers = [int(word) for word in truth.split()]
    unknown = sorted(set(numbers) - set(synsets))
    if unknown:
        raise DataError(
            f"{path}: {_META}: has no synset number {unknown[0]}, which {_TRUTH} uses; download it "
            "again"
        )
    return [synsets[number] for number in numbers]


def read_numbered_synsets(data: bytes) -> dict[int, str]:
    """The synset that each ILSVRC2012_ID stands for."""
    if data[126:128] != b"IM":
        raise ValueError("not a little-endian MATLAB 5 file")
    elements = _read_elements(data[_HEADER_BYTES:])
    table = dict(_read_matrix(content) for kind, content in elements if kind == _MATRIX)["synsets"]
    return {
        int(np.ravel(number)[0]): str(name)
        for number, name in zip(table["ILSVRC2012_ID"], table["WNID"], strict=True)
    }


def _read_elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The elements in order: the kind of each, and its bytes."""
    stream = io.BytesIO(data)
    while tag := stream.read(8):
        kind, size = struct.unpack("<II", tag)
        if kind >> 16:  # up to four bytes are in the tag itself
            yield kind & 0xFFFF, tag[4 : 4 + (kind >> 16)]
            continue
        content = stream.read(size)
        if len(content) < size:
            raise ValueError("the file is truncated")
        if kind == _COMPRESSED:  # the only kind that is not padded to eight bytes
            yield from _read_elements(zlib.decompress(content))
            continue
        stream.read(-size % 8)
        yield kind, content


def _read_matrix(data: bytes) -> tuple[str, Any]:
    """The name and the value of an array: text, numbers, or the fields of a structure."""
    parts = list(_read_elements(data))
    if not parts:
        return "", np.empty(0)
    flags, shape, name = (content for _, content in parts[:3])
    kind, content = parts[3] if len(parts) > 3 else (0, b"")
    if flags[0] == _STRUCT_CLASS:
        count = int(np.prod(np.frombuffer(shape, "<i4")))
        value: Any = _read_structure(parts[3:], count)
    elif flags[0] == _CHAR_CLASS:
        value = content.decode(_CODECS[kind]) if content else ""
    else:
        value = np.frombuffer(content, f"<{_DTYPES.get(kind, 'u1')}")  # cells are not parsed
    return name.decode("latin-1"), value


def _read_structure(parts: list[tuple[int, bytes]], count: int) -> dict[str, list[Any]]:
    """The list of values of each field."""
    width = int.from_bytes(parts[0][1], "little")
    names = parts[1][1]
    fields = [
        names[start : start + width].rstrip(b"\0").decode("latin-1")
        for start in range(0, len(names), width)
    ]
    values = [_read_matrix(content)[1] for _, content in parts[2 : 2 + count * len(fields)]]
    return {field: values[number :: len(fields)] for number, field in enumerate(fields)}
