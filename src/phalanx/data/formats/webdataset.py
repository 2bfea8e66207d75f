"""WebDataset shards: tar files train-000000.tar and so on; the files of an image share a name.

An image (jpg, jpeg, png, ...) has its class in a file .cls, as a number in text, or in .json as
"label" or "cls"; .json may also contain "bbox" (left, top, right, bottom in 0..1, or a list of
them) and "filename". Class names are in classes.txt next to the shards.

Tar files are read header by header, by our own code, because Python's tarfile mistakes a damaged
header in the middle for the end of the file. Headers may be ustar, GNU or pax; nothing is ever
unpacked.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from phalanx.data.formats.image_file import open_data_file, read_data_file
from phalanx.data.formats.index import (
    DAMAGED_SHARD,
    NO_LABEL,
    TRUNCATED_SHARD,
    Box,
    IndexedSource,
    enclosing_box,
)
from phalanx.data.formats.shards import (
    SHARD_PREFIX,
    ScannedImage,
    ShardFiles,
    ShardFormat,
    ShardScan,
    UnreadableShard,
    pack_scan,
    read_class_names,
    refuse_unusable,
)
from phalanx.data.string_array import replace_unstorable
from phalanx.errors import DataError

SHARD_FILES = ShardFiles(r"(?:-of-(?P<total>\d+))?\.tar")
CLASSES_FILE, METADATA = "classes.txt", "metadata.json"
_IMAGE_SUFFIXES = (  # the first one found in a sample is used; formats added later come last
    *("jpg", "jpeg", "png", "webp", "bmp", "gif"),
    *("jfif", "tif", "tiff", "avif", "heic", "heif"),
)
_FACTS_LIMIT = 2**20  # bytes of a cls or json member
_MAX_DIGITS = 18  # of a label, to fit into the index
_BOX_SHOWN = 80  # characters of an invalid bbox in a message
_CLASS_SHOWN = 40  # characters of a class that is not a number

_BLOCK = 512
_REGULAR, _FOLDER = (b"0", b"\0", b"7"), b"5"
_GNU_NAME, _GNU_LINK, _PAX, _PAX_GLOBAL = b"L", b"K", b"x", b"g"
_EXTENSIONS = (_GNU_NAME, _GNU_LINK, _PAX, _PAX_GLOBAL)  # headers about the member after them
_REFUSED = {
    b"1": "a link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a pipe",
    b"S": "a sparse file",
}
_EXTENSION_LIMIT = 2**20  # bytes of a long name or a pax header


class _Member(NamedTuple):
    """A regular file inside a tar file."""

    name: str
    offset: int
    size: int


_Parts = dict[str, _Member]  # the files of one image, by suffix


def open_tar(root: Path, split: str) -> IndexedSource:
    """One split of a dataset in tar shards."""
    index = _FORMAT.open_index(root, split)
    if index is None:
        raise DataError(
            f"{root}: no shard such as {SHARD_PREFIX[split]}-000000.tar; point --data-dir at the "
            "folder with the tar files"
        )
    metadata = _read_metadata(root / METADATA)
    promised = metadata.get(f"{SHARD_PREFIX[split]}_length")
    lost = np.flatnonzero(np.isin(index.sizes, (TRUNCATED_SHARD, DAMAGED_SHARD)))
    held = len(index) - len(lost)
    if isinstance(promised, int) and promised != held:
        where = f" (lost: {index.name(int(lost[0]))})" if len(lost) else ""
        raise DataError(
            f"{root / METADATA}: lists {promised:,} images, but the shards of {split} hold "
            f"{held:,}{where}; fetch the shards that are missing"
        )
    listed = read_class_names(root / CLASSES_FILE) or _read_listed(metadata.get("classes"))
    source = IndexedSource(root, _FORMAT.assign_classes(index, root, split, listed or None))
    refuse_unusable(source)
    return source


def _read_metadata(path: Path) -> dict[str, Any]:
    """The contents of metadata.json, which some tools write; empty without it."""
    try:
        found = json.loads(read_data_file(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as cause:
        raise DataError(f"{path}: cannot be read ({cause}); fix or remove it") from None
    return found if isinstance(found, dict) else {}


def _read_listed(found: Any) -> tuple[str, ...]:
    """The class names in metadata.json; empty if it has no list of them."""
    return tuple(replace_unstorable(str(n)) for n in found) if isinstance(found, list) else ()


# --- the images of a shard ---


def _scan_shard(path: Path) -> ShardScan:
    """The images of one shard."""
    groups: dict[str, _Parts] = {}
    lost: list[ScannedImage] = []
    with open_data_file(path) as file:
        try:
            for member in _read_members(file, path):
                _add_member(groups, member, path)
        except UnreadableShard as error:
            lost = [error.to_image(path)]
            groups = {key: parts for key, parts in groups.items() if _is_complete(parts)}
        images = [_read_image(file, parts, f"{path}: sample {k!r}") for k, parts in groups.items()]
    return pack_scan(images + lost, {})


_FORMAT = ShardFormat(key="tar", find=SHARD_FILES.find, scan=_scan_shard)


def _add_member(groups: dict[str, _Parts], member: _Member, path: Path) -> None:
    """Add a file to the files of its image."""
    folder, slash, base = member.name.rpartition("/")
    stem, _, suffixes = base.partition(".")
    if not stem:
        return  # hidden files, such as ._name from macOS
    parts = groups.setdefault(f"{folder}{slash}{stem}", {})
    suffix = suffixes.lower().rpartition(".")[2]
    if suffix in parts:
        raise DataError(
            f"{path}: member {member.name!r} is in the file twice; write the file again"
        )
    parts[suffix] = member


def _is_complete(parts: _Parts) -> bool:
    """Whether an image and its class were read before the shard broke off."""
    return not parts.keys().isdisjoint(_IMAGE_SUFFIXES) and ("cls" in parts or "json" in parts)


def _read_image(file: BinaryIO, parts: _Parts, where: str) -> ScannedImage:
    image = next((parts[suffix] for suffix in _IMAGE_SUFFIXES if suffix in parts), None)
    if image is None:
        has, readable = ", ".join(sorted(parts)), ", ".join(_IMAGE_SUFFIXES)
        raise DataError(f"{where}: has no image, only {has}; {readable} can be read")
    facts = _read_json(file, parts["json"], where) if "json" in parts else {}
    written = facts.get("label", facts.get("cls"))
    if "cls" in parts:
        written = _read_small(file, parts["cls"], where).decode(errors="replace").strip()
    name = replace_unstorable(str(facts.get("filename") or image.name))
    digits = str(written).removeprefix("-")
    box = _read_box(facts.get("bbox"), where)
    if not digits.isdecimal() or len(digits) > _MAX_DIGITS:
        name = f"{name} (class {replace_unstorable(repr(written)):.{_CLASS_SHOWN}})"
        return ScannedImage(name=name, offset=image.offset, size=NO_LABEL, label=-1, box=box)
    label = int(str(written))
    return ScannedImage(name=name, offset=image.offset, size=image.size, label=label, box=box)


def _read_json(file: BinaryIO, member: _Member, where: str) -> dict[str, Any]:
    try:
        facts = json.loads(_read_small(file, member, where))
    except (ValueError, RecursionError):
        raise DataError(f"{where}: its json cannot be read; write the file again") from None
    return facts if isinstance(facts, dict) else {"label": facts}


def _read_small(file: BinaryIO, member: _Member, where: str) -> bytes:
    if member.size > _FACTS_LIMIT:
        raise DataError(
            f"{where}: {member.name!r} has {member.size:,} bytes, too long for metadata"
        )
    file.seek(member.offset)
    return file.read(member.size)


def _read_box(found: Any, where: str) -> Box | None:
    if not found:
        return None
    try:
        boxes = found if isinstance(found[0], list) else [found]
        return enclosing_box([float(left), float(t), float(r), float(b)] for left, t, r, b in boxes)
    except (TypeError, ValueError, KeyError, OverflowError):
        raise DataError(
            f"{where}: its bbox is {found!r:.{_BOX_SHOWN}}, expected left, top, right, bottom"
        ) from None


# --- the members of a tar file ---


def _read_members(file: BinaryIO, path: Path) -> Iterator[_Member]:
    """The regular files of a tar file, in order, up to its end mark.

    Raises DataError for links, devices and the like, and UnreadableShard where the file ends
    before its mark or is damaged.
    """
    total, offset = os.fstat(file.fileno()).st_size, 0
    extensions: dict[str, str] = {}  # attributes of the next member
    everywhere: dict[str, str] = {}  # attributes of all following members
    while True:
        begin = offset
        kind, name, size = _read_header(file, begin, {**everywhere, **extensions})
        if kind is None:
            return
        offset += _BLOCK
        if kind not in _EXTENSIONS:
            extensions = {}
            _refuse_member(kind, name, path)
        if offset + size > total:
            raise UnreadableShard(begin, TRUNCATED_SHARD)
        if kind in _EXTENSIONS:
            found = _read_extension(file, kind, size, begin)
            (everywhere if kind == _PAX_GLOBAL else extensions).update(found)
        if kind in _REGULAR:
            yield _Member(name, offset, size)
        offset += size + -size % _BLOCK


def _read_header(
    file: BinaryIO, begin: int, extensions: dict[str, str]
) -> tuple[bytes | None, str, int]:
    """Kind, name and size of the member whose header is at `begin`; no kind: the end mark."""
    file.seek(begin)
    block = file.read(_BLOCK)
    if len(block) < _BLOCK:
        raise UnreadableShard(begin, TRUNCATED_SHARD)
    if not any(block):
        return None, "", 0
    blank = block[:148] + b" " * 8 + block[156:]
    if _read_number(block[148:156], begin) != sum(blank):
        raise UnreadableShard(begin, DAMAGED_SHARD)
    kind, size = block[156:157], _read_number(block[124:136], begin)
    if kind in _EXTENSIONS:
        return kind, "", size
    if any(key.startswith("GNU.sparse") for key in extensions):
        kind = b"S"
    if extensions.get("size", "").isdecimal():
        size = int(extensions["size"])
    return kind, extensions.get("path") or _read_short_name(block), size


def _read_short_name(block: bytes) -> str:
    name, prefix = (part.split(b"\0")[0] for part in (block[:100], block[345:500]))
    if block[257:263] == b"ustar\0" and prefix:  # GNU stores other things here
        name = prefix + b"/" + name
    return name.decode(errors="surrogateescape")


def _read_number(field: bytes, begin: int) -> int:
    if field[0] & 0x80:  # too large for octal digits
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    try:
        return int(field.split(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        raise UnreadableShard(begin, DAMAGED_SHARD) from None


def _read_extension(file: BinaryIO, kind: bytes, size: int, begin: int) -> dict[str, str]:
    """The attributes in a GNU or pax header for the members after it, by pax's names."""
    if size > _EXTENSION_LIMIT:
        raise UnreadableShard(begin, DAMAGED_SHARD)
    data = file.read(size)
    if kind in (_GNU_NAME, _GNU_LINK):
        key = "path" if kind == _GNU_NAME else "linkpath"
        return {key: data.split(b"\0")[0].decode(errors="surrogateescape")}
    facts = {}
    try:
        while data:  # lines of "length key=value"
            length = int(data.split(b" ", 1)[0])
            line, data = data[:length].decode(errors="surrogateescape"), data[length:]
            key, equals, value = line.partition(" ")[2].removesuffix("\n").partition("=")
            if not equals or length < 5:
                raise ValueError(line)
            facts[key] = value
    except ValueError:
        raise UnreadableShard(begin, DAMAGED_SHARD) from None
    return facts


def _refuse_member(kind: bytes, name: str, path: Path) -> None:
    """Raise DataError for links, devices and names that point outside the archive."""
    what = _REFUSED.get(kind)
    if what is None and kind not in _REGULAR and kind != _FOLDER:
        what = f"of unknown kind {kind!r}"
    if name.startswith("/") or ".." in PurePosixPath(name).parts:
        what = "named outside the file"
    if what is not None:
        raise DataError(
            f"{path}: member {name!r} is {what}, which image data never needs; do not trust this "
            "file, or write it again without that"
        )
