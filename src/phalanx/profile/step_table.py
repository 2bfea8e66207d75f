"""Where a step spent its time, as tables: by part and by kernel."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.profile.attribution import (
    AROUND,
    BETWEEN,
    DATA,
    EXCHANGE,
    OTHER,
    REPLAY,
    Attribution,
    DeviceWork,
    Operation,
)
from phalanx.profile.segments import Segment, measure_union
from phalanx.units import align_columns, format_plural

_FORMAT = 1
_MOST_KERNELS = 15  # rows of the text; the JSON file has them all
_NAME_WIDTH = 56
_AFTER_UNITS = ("loss", AROUND, REPLAY, EXCHANGE, BETWEEN, "update")
_PART_HEAD = ("part", "forward ms", "backward ms", "ms", "share")
_KERNEL_HEAD = ("calls", "ms", "share", "mostly in")
_IDLE = "idle"
_WORDS = {  # what a reader sees
    DATA: "waiting for data",
    REPLAY: "graph, units unknown",
    OTHER: "other",
    _IDLE: "device idle",
}


@dataclass(frozen=True, kw_only=True)
class _PartTime:
    """The time of a unit, or of another part of the step."""

    part: str
    is_unit: bool
    forward_ms: float
    backward_ms: float
    ms: float  # of both, or of a part that has no passes
    share: float  # of the step


@dataclass(frozen=True, kw_only=True)
class _KernelTime:
    """All calls of a kernel in the step; on a CPU, of an operation without nested ones."""

    name: str
    calls: int
    ms: float
    share: float  # of all kernels
    part: str  # the part to which most of it belongs


@dataclass(frozen=True, kw_only=True)
class StepTable:
    """Where the time of one step went."""

    step: int
    images: int  # of the step, over all ranks
    title: str
    on_device: bool  # whether times are those of a GPU, else of the host
    ms: float  # of the whole step, with the wait for its images
    parts: tuple[_PartTime, ...]
    kernels: tuple[_KernelTime, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {"format": _FORMAT, **asdict(self)}

    def describe(self) -> str:
        """The step in one line."""
        sums = {
            "forward": sum(part.forward_ms for part in self.parts),
            "backward": sum(part.backward_ms for part in self.parts),
        }
        for part in self.parts:
            if part.part in (
                "update",
                EXCHANGE,
                describe_part(DATA),
                describe_part(_IDLE),
                BETWEEN,
            ):
                sums[part.part] = part.ms
        shares = (f"{name} {ms / self.ms:.0%}" for name, ms in sums.items())
        return f"step {self.step:,} took {self.ms:,.1f} ms: {', '.join(shares)}"

    def list_lines(self) -> list[str]:
        """The tables as text."""
        noun = "kernel" if self.on_device else "operation"
        where = "time on the GPU" if self.on_device else "time on the host"
        rest = max(0, len(self.kernels) - _MOST_KERNELS)
        more = f"and {rest:,} more in summary.json"
        return [
            f"{self.title}: step {self.step:,} with {format_plural(self.images, 'image')}",
            "",
            *align_columns([_PART_HEAD, *self._list_rows()], left=[0]),
            "",
            f"by {noun}, {where}",
            *align_columns([(noun, *_KERNEL_HEAD), *self._list_kernel_rows()], left=[0, 4]),
            *[more] * bool(rest),
            *(f"note: {note}" for note in self.notes),
        ]

    def _list_rows(self) -> list[tuple[str, ...]]:
        rows = []
        for part in self.parts:
            passes = [f"{ms:,.2f}" if ms else "" for ms in (part.forward_ms, part.backward_ms)]
            rows.append((part.part, *passes, f"{part.ms:,.2f}", f"{part.share:.1%}"))
        return [*rows, ("step", "", "", f"{self.ms:,.2f}", f"{1:.1%}")]

    def _list_kernel_rows(self) -> list[tuple[str, ...]]:
        return [
            (_shorten(one.name), f"{one.calls:,}", f"{one.ms:,.2f}", f"{one.share:.1%}", one.part)
            for one in self.kernels[:_MOST_KERNELS]
        ]


def build_step_table(
    attribution: Attribution,
    units: Sequence[str],
    *,
    step: int,
    images: int,
    title: str,
    device: str = "cpu",
) -> StepTable:
    """The tables of a step: with a GPU, of its time, and of the host only the wait for data.

    device: the type of the training device.
    """
    whole, on_device = attribution.end - attribution.start, bool(attribution.device)
    times = _new_times()
    work: Sequence[DeviceWork | Segment] = attribution.device or attribution.host
    for piece in work:
        times[piece.label.part][piece.label.phase] += piece.duration_us
    if on_device:
        waits = [part for part in attribution.host if part.label.part == DATA]
        busy = [Segment(work.start, work.end, "") for work in attribution.device] + waits
        times[DATA][""] = sum(part.duration_us for part in waits)
        times[_IDLE][""] = max(0.0, whole - measure_union(busy))
    order = [DATA, *units, *_AFTER_UNITS, *(name for name in times if name != OTHER), OTHER]
    names = [name for name in dict.fromkeys(order) if name in times]
    parts = [_build_part(name, times[name], whole, is_unit=name in units) for name in names]
    return StepTable(
        step=step,
        images=images,
        title=title,
        on_device=on_device,
        ms=whole / 1000,
        parts=tuple(parts),
        kernels=tuple(_count_kernels(attribution)),
        notes=tuple(_list_notes(attribution, device)),
    )


def _new_times() -> dict[str, dict[str, float]]:
    """Sums of times under two names, all zero."""
    return defaultdict(lambda: defaultdict(float))


def _build_part(name: str, times: Mapping[str, float], whole: float, *, is_unit: bool) -> _PartTime:
    total = sum(times.values())
    return _PartTime(
        part=describe_part(name),
        is_unit=is_unit,
        forward_ms=times.get("forward", 0.0) / 1000,
        backward_ms=times.get("backward", 0.0) / 1000,
        ms=total / 1000,
        share=total / whole,
    )


def _count_kernels(attribution: Attribution) -> list[_KernelTime]:
    """Every kernel, or operation, the longest first."""
    times = _new_times()  # of each, by part
    calls: Counter[str] = Counter()
    calls_made: Sequence[DeviceWork | Operation] = attribution.device or attribution.operations
    for call in calls_made:
        times[call.name][describe_part(call.label.part)] += call.duration_us
        calls[call.name] += 1
    total = sum(sum(own.values()) for own in times.values()) or 1.0
    rows = [
        _KernelTime(
            name=name,
            calls=calls[name],
            ms=sum(own.values()) / 1000,
            share=sum(own.values()) / total,
            part=max(own, key=lambda part: own[part]),
        )
        for name, own in times.items()
    ]
    return sorted(rows, key=lambda row: -row.ms)


def _list_notes(attribution: Attribution, device: str) -> list[str]:
    """What a reader must know about these figures."""
    if device == "cuda" and not attribution.device:
        return ["the driver gave no kernels: times are those of the host, which only launches them"]
    replayed = sum(work.replayed for work in attribution.device)
    if not replayed:
        return []
    return [
        f"{replayed:,} kernels were replayed by CUDA graphs, which have no units of their own; "
        f"{attribution.matched:.0%} of them were found, in the same order, in a pass that ran "
        "before the graphs were captured, and have the units of that pass"
    ]


def describe_part(part: str) -> str:
    """The name of a part, for readers."""
    return _WORDS.get(part, part)


def _shorten(name: str) -> str:
    """A shortened name; C++ templates can have hundreds of characters."""
    return name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 1]}…"
