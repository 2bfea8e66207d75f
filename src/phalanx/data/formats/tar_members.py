"""The members of a tar file and where their bytes lie, read header by header.

Own code because Python's tarfile takes a damaged header in the middle for the end of the file.
Names and sizes may come as ustar, GNU or pax has them; nothing is ever unpacked.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from phalanx.data.formats.indexed_source import DAMAGED_SHARD, TRUNCATED_SHARD
from phalanx.data.formats.shards import UnreadableShard
from phalanx.errors import DataError

_BLOCK = 512
_REGULAR, _FOLDER = (b"0", b"\0", b"7"), b"5"
_GNU_NAME, _GNU_LINK, _PAX, _PAX_GLOBAL = b"L", b"K", b"x", b"g"
_EXTENSIONS = (_GNU_NAME, _GNU_LINK, _PAX, _PAX_GLOBAL)
_REFUSED = {
    b"1": "a link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a pipe",
    b"S": "a sparse file",
}
_EXTENSION_LIMIT = 2**20  # bytes of a long name or of pax facts


@dataclass(frozen=True)
class Member:
    """A regular file inside a tar file."""

    name: str
    offset: int
    size: int


def read_members(file: BinaryIO, path: Path) -> Iterator[Member]:
    """The regular files of a tar file, in order, up to its end mark.

    Raises DataError for what has no place in data, and CutOff where the file ends before its mark
    or cannot be read on.
    """
    total, place = os.fstat(file.fileno()).st_size, 0
    told: dict[str, str] = {}  # by an extension, about the member after it
    everywhere: dict[str, str] = {}
    while True:
        begin = place
        kind, name, size, place = _read_header(file, begin, {**everywhere, **told})
        if kind is None:
            return
        if kind not in _EXTENSIONS:
            told = {}
            _refuse(kind, name, path)
        if place + size > total:
            raise UnreadableShard(begin, TRUNCATED_SHARD)
        if kind in _EXTENSIONS:
            found = _read_extension(file, kind, size, begin)
            (everywhere if kind == _PAX_GLOBAL else told).update(found)
        if kind in _REGULAR:
            yield Member(name, place, size)
        place += size + -size % _BLOCK


def _read_header(
    file: BinaryIO, place: int, told: dict[str, str]
) -> tuple[bytes | None, str, int, int]:
    """Kind, name and size of the member at a place, and where its bytes begin; no kind: the end."""
    file.seek(place)
    block = file.read(_BLOCK)
    if len(block) < _BLOCK:
        raise UnreadableShard(place, TRUNCATED_SHARD)
    if not any(block):
        return None, "", 0, place
    blank = block[:148] + b" " * 8 + block[156:]
    if _number(block[148:156], place) != sum(blank):
        raise UnreadableShard(place, DAMAGED_SHARD)
    kind, size = block[156:157], _number(block[124:136], place)
    if kind in _EXTENSIONS:
        return kind, "", size, place + _BLOCK
    if any(key.startswith("GNU.sparse") for key in told):
        kind = b"S"
    size = int(told["size"]) if told.get("size", "").isdecimal() else size
    return kind, told.get("path") or _short_name(block), size, place + _BLOCK


def _short_name(block: bytes) -> str:
    name, prefix = (part.split(b"\0")[0] for part in (block[:100], block[345:500]))
    if block[257:263] == b"ustar\0" and prefix:  # GNU keeps other things in this place
        name = prefix + b"/" + name
    return name.decode(errors="surrogateescape")


def _number(field: bytes, place: int) -> int:
    if field[0] & 0x80:  # too large for octal digits
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    try:
        return int(field.split(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        raise UnreadableShard(place, DAMAGED_SHARD) from None


def _read_extension(file: BinaryIO, kind: bytes, size: int, begin: int) -> dict[str, str]:
    if size > _EXTENSION_LIMIT:
        raise UnreadableShard(begin, DAMAGED_SHARD)
    data = file.read(size)
    if kind in (_GNU_NAME, _GNU_LINK):
        key = "path" if kind == _GNU_NAME else "linkpath"
        return {key: data.split(b"\0")[0].decode(errors="surrogateescape")}
    try:
        return dict(_pax_facts(data))
    except ValueError:
        raise UnreadableShard(begin, DAMAGED_SHARD) from None


def _pax_facts(data: bytes) -> Iterator[tuple[str, str]]:
    """The facts of a pax header, each as "length key=value" and a new line."""
    while data:
        length = int(data.split(b" ", 1)[0])
        line, data = data[:length], data[length:]
        key, equals, value = line.partition(b" ")[2].removesuffix(b"\n").partition(b"=")
        if not equals or length < 5:
            raise ValueError(line)
        yield key.decode(errors="surrogateescape"), value.decode(errors="surrogateescape")


def _refuse(kind: bytes, name: str, path: Path) -> None:
    """Raise DataError for links, devices and names that lead out of the file."""
    what = _REFUSED.get(kind)
    if what is None and kind not in _REGULAR and kind != _FOLDER:
        what = f"of unknown kind {kind!r}"
    if name.startswith("/") or ".." in PurePosixPath(name).parts:
        what = "named outside of the file"
    if what is not None:
        raise DataError(
            f"{path}: member {name!r} is {what}, which image data never needs; do not trust this "
            "file, or write it anew without"
        )
