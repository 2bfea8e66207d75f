"""The trace as a file that Perfetto opens, with the units of the step above torch's own rows."""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.profiler import profile

from phalanx.profile.attribution import AROUND, Attribution, Label

_ROWS = {1: "step: host", 2: "step: GPU"}
_PROCESS = 1 << 30  # no process of the system has such a number
_LEVEL = 5  # of the compression: higher ones take longer and save little


def read_trace(profiler: profile) -> dict[str, Any]:
    """What a profiler has recorded, as a Chrome trace."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace: dict[str, Any] = json.loads(file.read_bytes())
    return trace


def compress_trace(trace: Mapping[str, Any], attribution: Attribution, *, title: str) -> bytes:
    """The trace with the step by units, as the bytes of a .json.gz file."""
    events = [*trace["traceEvents"], *_list_unit_events(attribution, title)]
    text = json.dumps({**trace, "traceEvents": events}, separators=(",", ":"))
    return gzip.compress(text.encode(), compresslevel=_LEVEL, mtime=0)


def _list_unit_events(attribution: Attribution, title: str) -> Iterator[dict[str, Any]]:
    """Events of additional rows for the host and the GPU."""
    where = {"pid": _PROCESS, "tid": 0}
    yield {"ph": "M", "name": "process_name", **where, "args": {"name": title}}
    yield {"ph": "M", "name": "process_sort_index", **where, "args": {"sort_index": -1}}
    for row, name in _ROWS.items():
        work = attribution.host if row == 1 else attribution.device
        if work:
            named = {"ph": "M", "name": "thread_name", "pid": _PROCESS, "tid": row}
            yield {**named, "args": {"name": name}}
        # gaps between autograd's nodes are closed, so that a unit is one block
        pieces = (piece for piece in work if piece.label.part != AROUND)
        for label, start, end in join_neighbours((one.label, one.start, one.end) for one in pieces):
            yield {
                "ph": "X",
                "cat": "phalanx",
                "name": " ".join(filter(None, label)),
                "pid": _PROCESS,
                "tid": row,
                "ts": start,
                "dur": end - start,
                "args": {"part": label.part, "phase": label.phase},
            }


def join_neighbours(
    pieces: Iterable[tuple[Label, float, float]],
) -> Iterator[tuple[Label, float, float]]:
    """Consecutive pieces of the same part merged into one, from the first to the last."""
    open_one: tuple[Label, float, float] | None = None
    for label, start, end in pieces:
        if open_one is not None and open_one[0] == label:
            open_one = (label, open_one[1], max(end, open_one[2]))
            continue
        if open_one is not None:
            yield open_one
        open_one = (label, start, end)
    if open_one is not None:
        yield open_one
