"""TensorBoard's event files: records with checksums, each a small protobuf message.

They are written here because the package that writes them brings seven others and 55 MB, and only
two rules are needed. A record is its length, the length's checksum, the data and the data's
checksum. A message is a sequence of fields, each a number and a value.
"""

import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c

_HEAD = struct.Struct("<QI")  # the length of a record and its checksum
_TAIL = struct.Struct("<I")
_MASK = 0xA282EAD8  # added by TFRecord: a checksum over checksums would be degenerate
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of protobuf
_FLOAT, _STRING = 1, 7  # tensor dtypes
_SUCCESS, _FAILURE = 1, 2  # status of a run on the hyperparameters page


def _masked_checksum(data: bytes) -> int:
    crc = int(google_crc32c.value(data))
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def _varint(number: int) -> bytes:
    """An integer as a varint, seven bits per byte."""
    number &= 2**64 - 1
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def _field(number: int, value: float | str | bytes, *, single: bool = False) -> bytes:
    """One field of a message; single: a float of 32 bits."""
    if isinstance(value, int):
        return _varint(number << 3 | _VARINT) + _varint(value)
    if isinstance(value, float):
        kind, layout = (_FIXED32, "<f") if single else (_FIXED64, "<d")
        return _varint(number << 3 | kind) + struct.pack(layout, value)
    # a folder name that is not UTF-8 contains surrogates
    data = value.encode(errors="replace") if isinstance(value, str) else value
    return _varint(number << 3 | _BYTES) + _varint(len(data)) + data


def _fit_single(value: float) -> float:
    """The value, or infinity if float32 cannot hold it."""
    try:
        struct.pack("<f", value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    return value


def build_scalar_summary(values: Mapping[str, float]) -> bytes:
    """A summary of numbers, by tag."""
    return b"".join(
        _field(1, _field(1, tag) + _field(2, _fit_single(float(value)), single=True))
        for tag, value in values.items()
    )


def build_text_summary(tag: str, content: str) -> bytes:
    """A summary with a text in Markdown."""
    shape = _field(2, _field(2, _field(1, 1)))
    tensor = _field(1, _STRING) + shape + _field(8, content)
    return _field(1, _field(1, tag) + _field(9, _plugin("text")) + _field(8, tensor))


def build_hyperparameter_start(values: Mapping[str, Any], *, group: str, begin: float) -> bytes:
    """A summary for the hyperparameters page: what a run was started with."""
    pairs = [(_field(1, name) + _field(2, _struct_value(value))) for name, value in values.items()]
    start = b"".join(_field(1, pair) for pair in pairs)
    start += _field(4, group) + _field(5, begin)
    return _hyperparameter_summary("session_start_info", _field(3, start))


def build_hyperparameter_end(*, is_finished: bool, end: float) -> bytes:
    """A summary for the hyperparameters page: how a run has ended."""
    status = _field(1, _SUCCESS if is_finished else _FAILURE)
    return _hyperparameter_summary("session_end_info", _field(4, status + _field(2, end)))


def _hyperparameter_summary(name: str, content: bytes) -> bytes:
    """A message for that page, attached to an empty tensor."""
    tensor = _field(1, _FLOAT) + _field(2, _field(2, b""))
    tag, plugin = f"_hparams_/{name}", _plugin("hparams", content)
    return _field(1, _field(1, tag) + _field(9, plugin) + _field(8, tensor))


def _plugin(name: str, content: bytes = b"") -> bytes:
    """The plugin (page) of TensorBoard that a summary is for."""
    return _field(1, _field(1, name) + (_field(2, content) if content else b""))


def _struct_value(value: Any) -> bytes:
    """A value as google.protobuf.Value."""
    if isinstance(value, bool):
        return _field(4, int(value))
    if isinstance(value, int | float):
        return _field(2, float(value))
    return _field(3, "none" if value is None else str(value))


class EventFile:
    """The event file of one run, continued where an earlier process ended."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted(folder.glob("*tfevents*"))
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.phalanx"
        self.path = found[-1] if found else folder / name
        self.newest = self._truncate_incomplete_record() if found else {}
        self._file: BinaryIO = self.path.open("ab")
        if self._file.tell() == 0:
            self.add(_field(3, "brain.Event:2"))

    @property
    def is_new(self) -> bool:
        """Whether nothing was logged before."""
        return not self.newest

    def add_summary(self, summary: bytes, *, step: int = 0) -> None:
        """Append an event with a summary in it."""
        self.add(_field(2, step) + _field(5, summary))

    def add(self, content: bytes) -> None:
        """Append an event with the current time."""
        data = _field(1, time.time()) + content
        head = struct.pack("<Q", len(data))
        record = head + _TAIL.pack(_masked_checksum(head)) + data
        self._file.write(record + _TAIL.pack(_masked_checksum(data)))

    def flush(self) -> None:
        """Let readers see all of it."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()

    def _truncate_incomplete_record(self) -> dict[str, int]:
        """Cut off a record that a kill left incomplete; returns the newest step by tag."""
        newest: dict[str, int] = {}
        end = 0
        with self.path.open("rb") as file:
            for data in _read_records(file):
                end = file.tell()
                step, tags = _read_event(data)
                newest |= dict.fromkeys(tags, step)
        if end < self.path.stat().st_size:
            os.truncate(self.path, end)
        return newest


def _read_records(file: BinaryIO) -> Iterator[bytes]:
    """The records of a file up to the first incomplete one."""
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        length, checksum = _HEAD.unpack(head)
        if _masked_checksum(head[:8]) != checksum:
            return
        data, tail = file.read(length), file.read(_TAIL.size)
        if len(tail) < _TAIL.size or _TAIL.unpack(tail)[0] != _masked_checksum(data):
            return
        yield data


def _read_event(data: bytes) -> tuple[int, list[str]]:
    """The step of an event, and the tags of its summary."""
    fields = list(_read_fields(data))
    step = next((value for number, value in fields if number == 2), 0)
    summaries = [value for number, value in fields if number == 5]
    values = [value for summary in summaries for _, value in _read_fields(summary)]
    tags = [
        value.decode() for part in values for number, value in _read_fields(part) if number == 1
    ]
    return step, tags


def _read_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message: each number with an integer or with bytes."""
    place = 0
    while place < len(data):
        key, place = _read_varint(data, place)
        if key & 7 == _VARINT:
            value, place = _read_varint(data, place)
            yield key >> 3, value
            continue
        length = {_FIXED64: 8, _FIXED32: 4}.get(key & 7)
        if length is None:
            length, place = _read_varint(data, place)
        yield key >> 3, data[place : place + length]
        place += length


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[place]
        number |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return number, place
