"""TFRecord's framing: length, its checksum, the data, its checksum, record after record.

The checksum is CRC-32C (Castagnoli), rotated and shifted by a constant, so that the checksum of
data that holds checksums is not a weak one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from phalanx.data.formats.indexed_source import DAMAGED_SHARD, TRUNCATED_SHARD
from phalanx.data.formats.shards import UnreadableShard
from phalanx.errors import DataError

try:
    import google_crc32c
except ImportError:  # told when a record is read: other data does without
    google_crc32c = None  # type: ignore[assignment]

RECORD_HEADER, _TAIL = 12, 4  # bytes before and after the data
_MASK = 0xA282EAD8


def crc32c(data: bytes) -> int:
    """The CRC-32C of some bytes.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    if google_crc32c is None:
        raise DataError(
            "TFRecord files are checked with google-crc32c, which is missing; "
            "pip install google-crc32c"
        )
    return int(google_crc32c.value(data))


def mask_crc(crc: int) -> int:
    """A checksum as it stands in the file."""
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


class Record(NamedTuple):
    """The data of one record, where it begins in the file, and whether its checksum fits."""

    begin: int
    data: bytes
    intact: bool


def read_records(path: Path) -> Iterator[Record]:
    """All records of a file; raises CutOff where it cannot be told where the next one begins."""
    size, place = path.stat().st_size, 0
    with path.open("rb") as file:
        while place < size:
            data, intact = _read_record(file, place, size - place)
            yield Record(place + RECORD_HEADER, data, intact)
            place += RECORD_HEADER + len(data) + _TAIL


def _read_record(file: BinaryIO, place: int, left: int) -> tuple[bytes, bool]:
    """The data, and whether its checksum fits."""
    head = file.read(RECORD_HEADER)
    length = int.from_bytes(head[:8], "little")
    # the length's own checksum first: a damaged length would look like a cut file
    if len(head) == RECORD_HEADER and int.from_bytes(head[8:], "little") != mask_crc(
        crc32c(head[:8])
    ):
        raise UnreadableShard(place, DAMAGED_SHARD)
    if left < RECORD_HEADER + length + _TAIL:
        raise UnreadableShard(place, TRUNCATED_SHARD)
    data, tail = file.read(length), file.read(_TAIL)
    return data, int.from_bytes(tail, "little") == mask_crc(crc32c(data))


def write_record(file: BinaryIO, data: bytes) -> None:
    """Add one record."""
    head = len(data).to_bytes(8, "little")
    file.write(head + mask_crc(crc32c(head)).to_bytes(4, "little"))
    file.write(data)
    file.write(mask_crc(crc32c(data)).to_bytes(4, "little"))
