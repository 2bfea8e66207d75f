"""Writing packed files, see `packed`: images are prepared on all cores and written in order."""

import json
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from phalanx.data.packed import (
    ALIGN,
    END_MAGIC,
    FORMAT,
    HEAD,
    MAGIC,
    TAIL,
    packed_path,
)
from phalanx.data.pixels import BadImage, decode
from phalanx.data.sample import Sample, counted, look_at, shrink, to_jpeg, whole_file
from phalanx.plan.machine import count_cores

Item = TypeVar("Item")
Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class PackedForm:
    """How images are packed: as JPEG or raw pixels, and how long their short side may be."""

    encoding: Literal["jpeg", "raw"] = "jpeg"
    short_side: int | None = None
    source: dict[str, Any] = field(default_factory=dict)  # the fingerprint of what was packed


class Payload(NamedTuple):
    """An image as it is put into the file."""

    data: bytes
    width: int
    height: int


def prepare(sample: Sample, form: PackedForm) -> Payload:
    """The image in its packed form; a raw one that cannot be decoded becomes empty."""
    if form.encoding == "jpeg":
        data = to_jpeg(sample, form.short_side)
        looks = look_at(data)
        return Payload(data, looks.width, looks.height)
    try:
        pixels = shrink(decode(sample.data, sample.name), form.short_side)
    except BadImage:
        return Payload(b"", 0, 0)
    return Payload(pixels.tobytes(), pixels.shape[1], pixels.shape[0])


class Ledger:
    """The index of a packed file while it grows, in packed arrays."""

    def __init__(self) -> None:
        self.offsets, self.sizes, self.labels = array("q"), array("q"), array("q")
        self.widths, self.heights, self.checksums = array("i"), array("i"), array("I")
        self.letters, self.ends, self.boxes = bytearray(), array("q"), array("f")
        self.has_boxes = False

    def add(self, sample: Sample, payload: Payload, offset: int) -> None:
        """Note one image that was written at an offset."""
        self.offsets.append(offset)
        self.sizes.append(len(payload.data))
        self.labels.append(sample.label)
        self.widths.append(payload.width)
        self.heights.append(payload.height)
        self.checksums.append(zlib.crc32(payload.data))
        self.letters += sample.name.encode(errors="surrogateescape")
        self.ends.append(len(self.letters))
        self.boxes.extend(sample.box or (float("nan"),) * 4)
        self.has_boxes = self.has_boxes or sample.box is not None

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


def write_packed(
    samples: Iterator[Sample],
    out: Path,
    split: str,
    *,
    count: int,
    classes: tuple[str, ...],
    form: PackedForm | None = None,
) -> None:
    """Write a split as one packed file, which appears when it is whole."""
    form = form or PackedForm()
    path, ledger = packed_path(out, split), Ledger()
    header = {
        "format": FORMAT,
        "images": count,
        "classes": classes,
        "encoding": form.encoding,
        "short_side": form.short_side,
        "source": form.source,
    }
    text = json.dumps(header, sort_keys=True).encode()
    with whole_file(path) as file:
        file.write(HEAD.pack(MAGIC, len(text)) + text)
        incoming = counted(samples, count, path)
        for sample, payload in made_ahead(lambda s: (s, prepare(s, form)), incoming):
            ledger.add(sample, payload, _align(file))
            file.write(payload.data)
        _write_index(file, ledger.arrays(), zlib.crc32(text))


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


def made_ahead(make: Callable[[Item], Made], items: Iterator[Item]) -> Iterator[Made]:
    """What `make` gives for each item, in order; threads are a few items ahead."""
    threads = count_cores()
    waiting: deque[Future[Made]] = deque()
    with ThreadPoolExecutor(threads, "pack") as pool:
        for item in items:
            waiting.append(pool.submit(make, item))
            if len(waiting) > 4 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
