"""Writing packed files, see `packed`: images are prepared on all cores and written in order."""

import json
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar

from numpy.typing import NDArray

from phalanx.data.convert.packed_index import (
    NOTHING,
    PackedEntry,
    PackedIndexBuilder,
    PackedJournal,
    clear_away,
    growing_file,
    read_entries,
    read_note,
)
from phalanx.data.convert.sample import Sample, counted, look_at, shrink, to_jpeg
from phalanx.data.formats.decode import BadImage, decode
from phalanx.data.formats.packed import (
    ALIGN,
    END_MAGIC,
    FORMAT,
    HEAD,
    MAGIC,
    TAIL,
    packed_path,
)
from phalanx.plan.machine import count_cores

BLOCK_IMAGES = 1024  # between two notes of how far it is

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


@dataclass(frozen=True, kw_only=True)
class PackedForm:
    """How images are packed: as JPEG or raw pixels, and how long their short side may be."""

    encoding: Literal["jpeg", "raw"] = "jpeg"
    short_side: int | None = None
    source: dict[str, Any] = field(default_factory=dict)  # the fingerprint of what was packed


class _Payload(NamedTuple):
    """An image as it is put into the file."""

    data: bytes
    width: int
    height: int


def _prepare(sample: Sample, form: PackedForm) -> _Payload:
    """The image in its packed form; a raw one that cannot be decoded becomes empty."""
    if form.encoding == "jpeg":
        data = to_jpeg(sample, form.short_side)
        looks = look_at(data)
        return _Payload(data, looks.width, looks.height)
    try:
        pixels = shrink(decode(sample.data, sample.name), form.short_side)
    except BadImage:
        return _Payload(b"", 0, 0)
    return _Payload(pixels.tobytes(), pixels.shape[1], pixels.shape[0])


def written_packed(
    out: Path, split: str, *, count: int, classes: tuple[str, ...], form: PackedForm | None = None
) -> int:
    """How many images are packed already, from the first on: where to go on."""
    if packed_path(out, split).is_file():
        return count
    head = _make_head(count, classes, form or PackedForm())
    return read_note(out, split, head).images


def write_packed(
    samples: Iterator[Sample],
    out: Path,
    split: str,
    *,
    count: int,
    classes: tuple[str, ...],
    form: PackedForm | None = None,
    start: int = 0,
) -> None:
    """Write a split as one packed file, which appears when it is whole.

    The samples are those from number `start` of `count`, which is 0 or what `written_packed` gave.
    """
    form = form or PackedForm()
    head = _make_head(count, classes, form)
    note = read_note(out, split, head) if start else NOTHING
    if note.images != start:
        raise ValueError(f"{note.images} images are packed, not {start}")
    ledger, journal = PackedIndexBuilder(), PackedJournal(out, split, note)
    for entry in read_entries(out, split, note) if start else ():
        ledger.add(entry)
    incoming = counted(samples, count - start, packed_path(out, split))
    if not start:
        clear_away(out, split)
    with growing_file(out, split, note) as file:
        file.write(b"" if start else head)
        for sample, payload in _made_ahead(lambda s: (s, _prepare(s, form)), incoming):
            entry = _write_image(file, sample, payload)
            ledger.add(entry)
            journal.add(entry)
            if len(journal.lines) == BLOCK_IMAGES:
                journal.keep(file)
        _write_index(file, ledger.arrays(), zlib.crc32(head[HEAD.size :]))


def _make_head(count: int, classes: tuple[str, ...], form: PackedForm) -> bytes:
    """What a packed file begins with: the magic word, and the header with its length."""
    header = {
        "format": FORMAT,
        "images": count,
        "classes": classes,
        "encoding": form.encoding,
        "short_side": form.short_side,
        "source": form.source,
    }
    text = json.dumps(header, sort_keys=True).encode()
    return HEAD.pack(MAGIC, len(text)) + text


def _write_image(file: BinaryIO, sample: Sample, payload: _Payload) -> PackedEntry:
    offset = _align(file)
    file.write(payload.data)
    return PackedEntry(
        name=sample.name,
        label=sample.label,
        box=sample.box,
        offset=offset,
        size=len(payload.data),
        width=payload.width,
        height=payload.height,
        checksum=zlib.crc32(payload.data),
    )


def _align(file: BinaryIO) -> int:
    """Fill up to the next place where something may start; what comes back is that place."""
    file.write(bytes(-file.tell() % ALIGN))
    return file.tell()


def _write_index(file: BinaryIO, arrays: dict[str, NDArray[Any]], header_crc: int) -> None:
    begin = _align(file)
    crc, directory = 0, {}
    for name, values in arrays.items():
        fill = bytes(-file.tell() % ALIGN)
        directory[name] = [values.dtype.str, list(values.shape), file.tell() + len(fill)]
        data = fill + values.tobytes()
        crc = zlib.crc32(data, crc)
        file.write(data)
    place = file.tell()
    text = json.dumps(directory).encode()
    file.write(text)
    crc = zlib.crc32(text, crc)
    file.write(TAIL.pack(begin, place, len(text), crc, header_crc, END_MAGIC))


def _made_ahead(make: Callable[[_Item], _Made], items: Iterator[_Item]) -> Iterator[_Made]:
    """What `make` gives for each item, in order; threads are a few items ahead."""
    threads = count_cores()
    waiting: deque[Future[_Made]] = deque()
    with ThreadPoolExecutor(threads, "pack") as pool:
        for item in items:
            waiting.append(pool.submit(make, item))
            if len(waiting) > 4 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
