"""From the events of a trace to the parts of a step: which unit each piece of work belongs to.

In forward passes, we put a range around every unit. The backward pass is autograd's: each of its
nodes has the sequence number of its forward operation, which gives the unit. What a GPU runs was
launched by the host, and belongs to the unit of that launch.

A replay of a CUDA graph is a single launch of many kernels. They are those of a pass that ran
before the graph was captured, in the same order, and get their units from there.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from phalanx.profile.segments import Segment, find_segment, flatten_nested

_Event = Mapping[str, Any]
"""An event of a Chrome trace; times in microseconds."""

AROUND, OTHER, REPLAY = "around the units", "other", "replay"
DATA, STEP, EXCHANGE, BETWEEN = "data", "step", "sum of gradients", "between stages"
_PARTS = {  # from the names of the step's ranges to part and phase
    DATA: (DATA, ""),
    STEP: (OTHER, ""),
    "forward": (AROUND, "forward"),
    "backward": (AROUND, "backward"),
    "loss": ("loss", "forward"),
    EXCHANGE: (EXCHANGE, ""),
    BETWEEN: (BETWEEN, ""),
    "update": ("update", ""),
    REPLAY: (REPLAY, ""),
}
_NODE = "autograd::engine::evaluate_function:"
_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_FORWARD = " forward"  # ends the name of a unit's range
_LEAST_MATCH = 0.5  # of a replay's kernels; with fewer it is a different pass


class Label(NamedTuple):
    """The part of the step to which a piece of work belongs."""

    part: str  # a unit, or another part of the step
    phase: str  # forward, backward, or empty


class DeviceWork(NamedTuple):
    """Something a GPU ran."""

    name: str
    start: float
    end: float
    label: Label
    launched: float  # when the host launched it
    replayed: bool  # by a graph, whose kernels are all launched at once

    @property
    def duration_us(self) -> float:
        """Its length in microseconds."""
        return self.end - self.start


class Operation(NamedTuple):
    """A call of one of torch's operations on the host, without the calls inside it."""

    name: str
    label: Label
    duration_us: float


class Attribution(NamedTuple):
    """What happened in a step, by part."""

    start: float  # of the step, with the wait for its images
    end: float
    passes: list[float]  # when each forward pass began on the host; empty if all were replayed
    host: list[Segment]  # of the training thread, labelled; they cover the step
    device: list[DeviceWork]  # in order of time; empty on a CPU
    operations: list[Operation]  # of all threads of the host
    matched: float  # share of the replayed kernels that were found in the uncaptured pass


def name_unit_range(unit: str) -> str:
    """The name of the range around a unit's forward pass."""
    return f"{unit}{_FORWARD}"


def attribute_events(
    events: Iterable[_Event], units: Iterable[str], order: Sequence[tuple[str, Label]] = ()
) -> Attribution:
    """The parts of the step in these events.

    units: those that have ranges. order: the kernels of an uncaptured pass, to label replays.
    ValueError if they contain no step.
    """
    timed = [event for event in events if event.get("ph") == "X"]
    names = {name_unit_range(unit): Label(unit, "forward") for unit in units}
    names |= {name: Label(*label) for name, label in _PARTS.items()}
    ranges = [
        event for event in timed if event.get("cat") == "user_annotation" and event["name"] in names
    ]
    steps = [event for event in ranges if event["name"] in (DATA, STEP)]
    if not steps:
        raise ValueError("the trace has no step in it")
    threads = _label_threads(timed, ranges, names)
    device = _label_device(timed, threads)
    matched = 1.0
    if any(work.replayed for work in device):
        device, matched = _label_replays(device, order)
    return Attribution(
        start=min(event["ts"] for event in steps),
        end=max(event["ts"] + event["dur"] for event in steps),
        passes=[event["ts"] for event in ranges if event["name"] == "forward"],
        host=threads[steps[0]["tid"]],
        device=device,
        operations=_list_operations(timed, threads),
        matched=matched,
    )


def list_pass_order(attribution: Attribution) -> list[tuple[str, Label]]:
    """The kernels of the last pass of a step without graphs, in their order, with their parts."""
    begun = max(attribution.passes, default=attribution.start)
    own = (work for work in attribution.device if work.label.phase and work.launched >= begun)
    return [(work.name, work.label) for work in own]


def _label_threads(
    timed: Sequence[_Event], ranges: Sequence[_Event], names: Mapping[str, Label]
) -> dict[Any, list[Segment]]:
    """The time of each thread, split into labelled segments."""
    intervals: dict[Any, list[Segment]] = defaultdict(list)
    for event in ranges:
        intervals[event["tid"]].append(_to_segment(event, names[event["name"]]))
    firsts, labels = _list_first_numbers(timed, ranges, names)
    nodes: dict[Any, list[_Event]] = defaultdict(list)
    for event in timed:
        if event["name"].startswith(_NODE):
            nodes[event["tid"]].append(event)
    for thread, own in nodes.items():
        label, end = Label(AROUND, "backward"), float("-inf")
        for event in sorted(own, key=lambda event: event["ts"]):
            if event["ts"] < end:  # nested in another, as in recomputation
                continue
            end = event["ts"] + event["dur"]
            number = event["args"].get("Sequence number")
            if number is not None and firsts:
                place = max(0, bisect_right(firsts, number) - 1)
                label = labels[place]
            # a node without a sequence number stores the gradient of the node before it
            intervals[thread].append(_to_segment(event, label))
    return {thread: flatten_nested(own) for thread, own in intervals.items()}


def _list_first_numbers(
    timed: Sequence[_Event], ranges: Sequence[_Event], names: Mapping[str, Label]
) -> tuple[list[int], list[Label]]:
    """The first sequence number of each range, and the label of its backward pass."""
    forward = [event for event in ranges if names[event["name"]].phase == "forward"]
    by_thread: dict[Any, list[Segment]] = defaultdict(list)
    for event in forward:
        by_thread[event["tid"]].append(_to_segment(event, (event["ts"], names[event["name"]])))
    segments = {thread: flatten_nested(own) for thread, own in by_thread.items()}
    firsts: dict[tuple[float, Label], int] = {}
    for event in timed:
        number = (event.get("args") or {}).get("Sequence number")
        if number is None or event["name"].startswith(_NODE) or event["tid"] not in segments:
            continue
        segment = find_segment(segments[event["tid"]], event["ts"])
        if segment is not None:
            firsts[segment.label] = min(firsts.get(segment.label, number), number)
    rows = sorted((number, start, label) for (start, label), number in firsts.items())
    return [row[0] for row in rows], [Label(row[2].part, "backward") for row in rows]


def _label_device(
    timed: Sequence[_Event], threads: Mapping[Any, Sequence[Segment]]
) -> list[DeviceWork]:
    """What the GPU ran, each with the label of the launch on the host."""
    launches: dict[Any, _Event] = {}
    for event in timed:
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {}):
            launches[event["args"]["correlation"]] = event
    found = []
    for event in timed:
        if event.get("cat") not in _DEVICE_CATEGORIES:
            continue
        launch = launches.get(event["args"].get("correlation"))
        label, replayed, launched = Label(OTHER, ""), False, event["ts"]
        if launch is not None:
            replayed, launched = "GraphLaunch" in launch["name"], launch["ts"]
            segment = find_segment(threads.get(launch["tid"], ()), launch["ts"])
            label = segment.label if segment else label
        if "nccl" in event["name"].lower() and label.part != BETWEEN:
            label = Label(EXCHANGE, "")
        end = event["ts"] + event["dur"]
        found.append(DeviceWork(event["name"], event["ts"], end, label, launched, replayed))
    return sorted(found, key=lambda work: work.start)


def _label_replays(
    device: Sequence[DeviceWork], order: Sequence[tuple[str, Label]]
) -> tuple[list[DeviceWork], float]:
    """Replayed kernels with the labels of an uncaptured pass, and the share that was found."""
    labelled, found, total = list(device), 0, 0
    replays: dict[float, list[int]] = defaultdict(list)  # the indices of each one's kernels
    for place, work in enumerate(device):
        if work.replayed:
            replays[work.launched].append(place)
    known: dict[tuple[str, ...], dict[int, Label]] = {}  # a step may have many equal replays
    for run in replays.values():
        names = tuple(device[place].name for place in run)
        if names not in known:
            known[names] = _match_order(names, order)
        labels, total = known[names], total + len(run)
        found += len(labels)
        if not labels or len(labels) < _LEAST_MATCH * len(run):
            continue
        label = labels[min(labels)]
        for number, place in enumerate(run):
            label = labels.get(number, label)  # an extra one reduces what the one before it made
            labelled[place] = device[place]._replace(label=label)
    return labelled, found / total if total else 1.0


def _match_order(names: Sequence[str], order: Sequence[tuple[str, Label]]) -> dict[int, Label]:
    """The labels of the kernels that are found in `order`, by index."""
    matcher = SequenceMatcher(None, [name for name, _ in order], names, autojunk=False)
    return {
        block.b + offset: order[block.a + offset][1]
        for block in matcher.get_matching_blocks()
        for offset in range(block.size)
    }


def _list_operations(
    timed: Sequence[_Event], threads: Mapping[Any, Sequence[Segment]]
) -> list[Operation]:
    """The operations of the host, in order of thread and time."""
    by_thread: dict[Any, list[_Event]] = defaultdict(list)
    for event in timed:
        if event.get("cat") == "cpu_op":
            by_thread[event["tid"]].append(event)
    found = []
    for thread, events in by_thread.items():
        durations: dict[int, float] = defaultdict(float)
        for part in flatten_nested(_to_segment(event, place) for place, event in enumerate(events)):
            durations[part.label] += part.duration_us
        for place, event in enumerate(events):
            segment = find_segment(threads.get(thread, ()), event["ts"])
            label = segment.label if segment else Label(OTHER, "")
            found.append(Operation(event["name"], label, durations[place]))
    return found


def _to_segment(event: _Event, label: Any) -> Segment:
    return Segment(event["ts"], event["ts"] + event["dur"], label)
