"""TensorFlow's Example message: lists of bytes, floats or integers by name.

Only as much of the protobuf wire format as this one message needs. An Example holds Features
(field 1), which holds entries (field 1) of a key (1) and a Feature (2); that holds one list,
whose number says of what: 1 bytes, 2 floats, 3 integers; the list's values are its field 1.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

_VARINT, _FIXED64, _COUNTED, _FIXED32 = 0, 1, 2, 5  # wire types
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_BYTES, _FLOATS, _INTEGERS = 1, 2, 3

FeatureValues = Sequence[bytes] | Sequence[float] | Sequence[int]


class _Field(NamedTuple):
    """One field of a message: its number, its wire type and where its content lies."""

    number: int
    wire: int
    begin: int
    end: int


class Feature(NamedTuple):
    """One named list of an Example: what it holds and where."""

    kind: int
    begin: int
    end: int


def _read_varint(data: bytes, place: int, end: int) -> tuple[int, int]:
    """An unsigned number of seven bits a byte, and the place after it."""
    value = shift = 0
    while place < end and shift < 70:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    raise ValueError("a number has no end")


def _read_fields(data: bytes, place: int, end: int) -> Iterator[_Field]:
    """The fields of the message between two places; raises ValueError when it is none."""
    while place < end:
        tag, place = _read_varint(data, place, end)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            stop = _read_varint(data, place, end)[1]
        elif wire == _COUNTED:
            size, place = _read_varint(data, place, end)
            stop = place + size
        elif wire in _FIXED:
            stop = place + _FIXED[wire]
        else:
            raise ValueError(f"a field of unknown type {wire}")
        if stop > end:
            raise ValueError("a field reaches past the end")
        yield _Field(number, wire, place, stop)
        place = stop


def read_example(data: bytes) -> dict[str, Feature]:
    """Where the lists of an Example lie, by name; raises ValueError when it is none."""
    found: dict[str, Feature] = {}
    for features in _messages(data, 0, len(data), 1):
        for entry in _messages(data, features.begin, features.end, 1):
            found.update(_read_entry(data, entry))
    return found


def _read_entry(data: bytes, entry: _Field) -> list[tuple[str, Feature]]:
    """One name with its list; nothing where either is missing."""
    parts = {field.number: field for field in _read_fields(data, entry.begin, entry.end)}
    if 1 not in parts or 2 not in parts:
        return []
    key = data[parts[1].begin : parts[1].end].decode(errors="replace")
    lists = _read_fields(data, parts[2].begin, parts[2].end)
    return [(key, Feature(one.number, one.begin, one.end)) for one in lists]


def _messages(data: bytes, begin: int, end: int, number: int) -> list[_Field]:
    fields = _read_fields(data, begin, end)
    return [field for field in fields if field.number == number and field.wire == _COUNTED]


def read_spans(data: bytes, feature: Feature | None) -> list[tuple[int, int]]:
    """Begin and end of each value of a list of bytes; none when it is of something else."""
    if feature is None or feature.kind != _BYTES:
        return []
    return [(f.begin, f.end) for f in _messages(data, feature.begin, feature.end, 1)]


def read_integers(data: bytes, feature: Feature | None) -> list[int]:
    """The values of a list of integers, packed or not; none when it is of something else."""
    if feature is None or feature.kind != _INTEGERS:
        return []
    values = []
    for field in _read_fields(data, feature.begin, feature.end):
        place = field.begin
        while place < field.end:
            value, place = _read_varint(data, place, field.end)
            values.append(value - (1 << 64) if value >> 63 else value)
    return values


def read_floats(data: bytes, feature: Feature | None) -> list[float]:
    """The values of a list of floats, packed or not; none when it is of something else."""
    if feature is None or feature.kind != _FLOATS:
        return []
    fields = _read_fields(data, feature.begin, feature.end)
    return [float(x) for f in fields for x in np.frombuffer(data[f.begin : f.end], "<f4")]


def write_example(features: dict[str, FeatureValues]) -> bytes:
    """An Example with these lists, ordered by name: the same bytes every time."""
    entries = [
        _counted(1, _counted(1, key.encode()) + _counted(2, _write_list(features[key])))
        for key in sorted(features)
    ]
    return _counted(1, b"".join(entries))


def _write_list(values: FeatureValues) -> bytes:
    if any(isinstance(value, bytes) for value in values):
        content = b"".join(_counted(1, value) for value in values)  # type: ignore[arg-type]
        return _counted(_BYTES, content)
    if all(isinstance(value, int) for value in values):
        packed = b"".join(_varint(value % (1 << 64)) for value in values)  # type: ignore[arg-type]
        return _counted(_INTEGERS, _counted(1, packed))
    return _counted(_FLOATS, _counted(1, struct.pack(f"<{len(values)}f", *values)))


def _counted(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | _COUNTED) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
