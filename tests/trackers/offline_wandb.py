"""Reads the offline files of wandb, as its own uploader does, with its own messages."""

import json
import struct
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7  # a file is a row of blocks; it begins with a header of its own
HEAD = struct.Struct("<IHB")  # checksum, length, and which piece of a record it is
FULL, LAST = 1, 4


def read_records(path: Path) -> list[Any]:
    """All records of a file, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, pieces, records = path.read_bytes(), HEADER, b"", []
    assert content[:4] == b":W&B"
    while place + HEAD.size <= len(content):
        if BLOCK - place % BLOCK < HEAD.size:  # no room for a head: it was filled up
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = HEAD.unpack_from(content, place)
        place += HEAD.size
        pieces += content[place : place + length]
        place += length
        if kind in (FULL, LAST):
            record = Record()
            record.ParseFromString(pieces)
            records.append(record)
            pieces = b""
    return records


def read_history(run: Path) -> list[dict[str, float]]:
    """The rows that were logged offline, over all files of a run in the order of their making."""
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    rows = [r.history for file in files for r in read_records(file) if r.HasField("history")]
    return [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row.item}
        for row in rows
    ]
