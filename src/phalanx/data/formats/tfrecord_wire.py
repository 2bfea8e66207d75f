"""The wire format of TFRecord files: records, each with an Example message.

A record is a length, its checksum, the data and its checksum. The checksum is CRC-32C (Castagnoli),
rotated and with a constant added, so that the checksum of data that contains checksums is not
weak.

An Example is a protobuf message of TensorFlow: lists of bytes, floats or integers by name. Only the
part of the protobuf wire format that this message needs is implemented. An Example contains
Features (field 1), which contains entries (field 1) of a key (1) and a Feature (2); that contains
one list, whose field number is its type: 1 bytes, 2 floats, 3 integers; its values are in field 1.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from phalanx.data.formats.file_bytes import crc32c
from phalanx.data.formats.image_file import open_data_file
from phalanx.data.formats.index import DAMAGED_SHARD, TRUNCATED_SHARD
from phalanx.data.formats.shards import UnreadableShard

RECORD_HEADER, _RECORD_FOOTER = 12, 4  # bytes before and after the data
_CRC_MASK = 0xA282EAD8

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5  # wire types
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}
_BYTES, _FLOATS, _INTEGERS = 1, 2, 3

FeatureValues = Sequence[bytes] | Sequence[float] | Sequence[int]


# --- records ---


class Record(NamedTuple):
    """The data of one record, its offset in the file, and whether its checksum is right."""

    begin: int
    data: bytes
    intact: bool


def mask_crc(crc: int) -> int:
    """A checksum as it is stored in the file."""
    return ((crc >> 15 | crc << 17) + _CRC_MASK) & 0xFFFFFFFF


def read_records(path: Path) -> Iterator[Record]:
    """All records of a file; raises UnreadableShard where the next record cannot be found."""
    with open_data_file(path) as file:
        size, begin = os.fstat(file.fileno()).st_size, 0
        while begin < size:
            header = file.read(RECORD_HEADER)
            length, crc = int.from_bytes(header[:8], "little"), int.from_bytes(header[8:], "little")
            # the checksum of the length first: a damaged length would look like a truncated file
            if len(header) == RECORD_HEADER and crc != mask_crc(crc32c(header[:8])):
                raise UnreadableShard(begin, DAMAGED_SHARD)
            end = begin + RECORD_HEADER + length + _RECORD_FOOTER
            if end > size:
                raise UnreadableShard(begin, TRUNCATED_SHARD)
            data, crc = file.read(length), int.from_bytes(file.read(_RECORD_FOOTER), "little")
            yield Record(begin + RECORD_HEADER, data, crc == mask_crc(crc32c(data)))
            begin = end


def write_record(file: BinaryIO, data: bytes) -> None:
    """Append one record."""
    length = len(data).to_bytes(8, "little")
    file.write(length + mask_crc(crc32c(length)).to_bytes(4, "little"))
    file.write(data)
    file.write(mask_crc(crc32c(data)).to_bytes(4, "little"))


# --- Example messages ---


class Field(NamedTuple):
    """One field of a message: its number, its wire type and the range of its content."""

    number: int
    wire_type: int
    begin: int
    end: int


def _read_varint(data: bytes, begin: int, end: int) -> tuple[int, int]:
    """An unsigned number of seven bits per byte, and the offset after it."""
    value = 0
    for number, byte in enumerate(data[begin : min(end, begin + 10)]):
        value |= (byte & 0x7F) << (7 * number)
        if byte < 0x80:
            return value, begin + number + 1
    raise ValueError("a number does not end")


def _read_fields(data: bytes, begin: int, end: int) -> Iterator[Field]:
    """The fields of the message between two offsets; raises ValueError if it is not a message."""
    while begin < end:
        tag, begin = _read_varint(data, begin, end)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            stop = _read_varint(data, begin, end)[1]
        elif wire_type == _LENGTH_DELIMITED:
            size, begin = _read_varint(data, begin, end)
            stop = begin + size
        elif wire_type in _FIXED_SIZES:
            stop = begin + _FIXED_SIZES[wire_type]
        else:
            raise ValueError(f"a field of unknown type {wire_type}")
        if stop > end:
            raise ValueError("a field reaches past the end")
        yield Field(number, wire_type, begin, stop)
        begin = stop


def _read_submessages(data: bytes, begin: int, end: int) -> list[Field]:
    """All submessages in field 1 of the message between two offsets."""
    fields = _read_fields(data, begin, end)
    return [field for field in fields if field.number == 1 and field.wire_type == _LENGTH_DELIMITED]


def read_example(data: bytes) -> dict[str, Field]:
    """The lists of an Example by name; raises ValueError if it is not an Example."""
    found: dict[str, Field] = {}
    for features in _read_submessages(data, 0, len(data)):
        for entry in _read_submessages(data, features.begin, features.end):
            parts = {field.number: field for field in _read_fields(data, entry.begin, entry.end)}
            if 1 not in parts or 2 not in parts:
                continue
            key = data[parts[1].begin : parts[1].end].decode(errors="replace")
            for values in _read_fields(data, parts[2].begin, parts[2].end):
                found[key] = values
    return found


def _read_list(data: bytes, values: Field | None, kind: int) -> Iterator[Field]:
    """The fields of a list of that kind; none if it is of another kind, or missing."""
    if values is not None and values.number == kind:
        yield from _read_fields(data, values.begin, values.end)


def read_spans(data: bytes, values: Field | None) -> list[tuple[int, int]]:
    """Begin and end of each value of a list of bytes; none if it is of another kind."""
    fields = _read_list(data, values, _BYTES)
    return [(f.begin, f.end) for f in fields if f.number == 1 and f.wire_type == _LENGTH_DELIMITED]


def read_integers(data: bytes, values: Field | None) -> list[int]:
    """The values of a list of integers, packed or not; none if it is of another kind."""
    integers = []
    for field in _read_list(data, values, _INTEGERS):
        begin = field.begin
        while begin < field.end:
            value, begin = _read_varint(data, begin, field.end)
            integers.append(value - (1 << 64) if value >> 63 else value)
    return integers


def read_floats(data: bytes, values: Field | None) -> list[float]:
    """The values of a list of floats, packed or not; none if it is of another kind."""
    fields = _read_list(data, values, _FLOATS)
    return [float(x) for f in fields for x in np.frombuffer(data[f.begin : f.end], "<f4")]


def write_example(features: dict[str, FeatureValues]) -> bytes:
    """An Example with these lists, sorted by name: the same bytes every time."""
    entries = [
        _encode_field(1, _encode_field(1, key.encode()) + _encode_field(2, _encode_list(values)))
        for key, values in sorted(features.items())
    ]
    return _encode_field(1, b"".join(entries))


def _encode_list(values: FeatureValues) -> bytes:
    if any(isinstance(value, bytes) for value in values):
        content = b"".join(_encode_field(1, value) for value in values)  # type: ignore[arg-type]
        return _encode_field(_BYTES, content)
    if all(isinstance(value, int) for value in values):
        packed = b"".join(_encode_varint(value % (1 << 64)) for value in values)  # type: ignore[arg-type]
        return _encode_field(_INTEGERS, _encode_field(1, packed))
    return _encode_field(_FLOATS, _encode_field(1, struct.pack(f"<{len(values)}f", *values)))


def _encode_field(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    tag = _encode_varint(number << 3 | _LENGTH_DELIMITED)
    return tag + _encode_varint(len(content)) + content


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
