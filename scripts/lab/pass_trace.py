"""Which operation of a training pass takes how long on the GPU, beside the least it could take.

A pass without a graph is recorded operation by operation, with the bytes and flops of each; its
kernels, in order, name those of a replayed graph of the same pass, whose times count. The floor of
an operation is its bytes (each tensor once) at the device's copy rate, or its flops at 700 TFLOP/s,
whichever takes longer.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.catalog.models import MODELS
from phalanx.fused.enable import fuse_units
from phalanx.fused.half_copies import cast_before_passes
from phalanx.kernels.choices import CHOICES
from phalanx.kernels.image_layout import count_rows
from phalanx.models.build import build_model
from phalanx.models.units import UnitModel

_FLOPS_A_SECOND = 700e12
_MARK = "operation "

Pass = Callable[[], Tensor]


def _count_matrix(x: Tensor, *weights: Tensor) -> int:
    """Flops of products of x's pixels with matrices."""
    return 2 * count_rows(x) * sum(w.numel() for w in weights)


_FLOPS: dict[str, Callable[[tuple[Any, ...], Any], int]] = {
    "conv_sums": lambda args, out: _count_matrix(args[0], args[1]),
    "conv_norm": lambda args, out: _count_matrix(args[0], args[1]),
    "conv_norm_relu": lambda args, out: _count_matrix(args[0], args[1]),
    "gram_matrix": lambda args, out: _count_matrix(args[0], out[0]),
    "gram_matrix_of_input": lambda args, out: _count_matrix(out[0], out[1]),
    "weight_gradient": lambda args, out: _count_matrix(args[0], out),
    "input_gradient": lambda args, out: _count_matrix(args[0], args[1], args[3]),
    "input_gradient_gated": lambda args, out: _count_matrix(args[0], args[1], args[3]),
    "skip_gradient": lambda args, out: _count_matrix(args[0], args[1]),
    "skip_gradient_gated": lambda args, out: _count_matrix(args[0], args[1]),
    "mm": lambda args, out: 2 * args[0].numel() * args[1].shape[1],
    "convolution": lambda args, out: _count_matrix(out, args[1]),
    "convolution_backward": lambda args, out: _count_matrix(args[0], args[2]) * sum(args[-1][:2]),
}


@dataclass(frozen=True)
class Operation:
    """A call of an operator."""

    name: str
    where: str  # size of its largest image, or else of its largest matrix
    bytes_moved: int
    flops: int


class OperationLog(TorchDispatchMode):
    """Records each operation, in a range of the profiler that has its number."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """The operation's result."""
        number = len(self.operations)
        self.operations.append(Operation(func.__name__, "", 0, 0))
        with torch.profiler.record_function(f"{_MARK}{number}"):
            out = func(*args, **(kwargs or {}))
        self.operations[number] = _describe(func, args, kwargs or {}, out)
        return out


def _describe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Operation:
    """What an operation had to do."""
    name, read = func._schema.name.partition("::")[2], list(args)
    label = name
    if name == "convolution_backward":
        wanted = args[-1][:2]
        label = {(True, False): "conv, input", (False, True): "conv, weight"}.get(
            tuple(wanted), name
        )
        if not wanted[1]:
            read[1] = None  # the image: only its shape is used
    tensors = [leaf for leaf in tree_leaves((read, kwargs, out)) if isinstance(leaf, Tensor)]
    storages = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
    images = [tensor for tensor in tensors if tensor.ndim == 4 and tensor.shape[2] > 3]
    where = "other"
    matrices = [tensor for tensor in tensors if tensor.ndim == 2]
    if matrices:
        where = f"matrix {'x'.join(map(str, max(matrices, key=Tensor.numel).shape))}"
    if images:
        largest = max(images, key=Tensor.numel)
        where = f"{largest.shape[2]}px {largest.shape[1]}c"
    if name.startswith("convolution") and args[-1 if name == "convolution" else -2] > 1:
        label = f"grouped {label}"
    flops = _FLOPS[name](args, out) if name in _FLOPS else 0
    return Operation(label, where, sum(storages.values()), flops)


# --- the pass ---


def build_pass(device: str, batch: int, half: torch.dtype) -> Pass:
    """Forward and backward of ResNeXt-101; on the CPU, of a small one."""
    small = device == "cpu"
    torch.manual_seed(0)
    name = "resnext50_32x4d" if small else "resnext101_32x4d"
    variant: Any = MODELS[name]
    variant = replace(variant, depths=(1, 1, 1, 1)) if small else variant
    model = build_model(variant, num_classes=1000).to(device).train()
    model.to(memory_format=torch.channels_last)
    print("units without kernels:", fuse_units(model, half, interpreted=small))
    cast_before_passes(model, half)
    edge = 64 if small else 224
    images = torch.randn(batch, 3, edge, edge, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.arange(batch, device=device) % 1000

    def run() -> Tensor:
        return _run_pass(model, images, labels, half)

    return run


def _run_pass(model: UnitModel, images: Tensor, labels: Tensor, half: torch.dtype) -> Tensor:
    """The loss, after the backward pass; gradients are new tensors."""
    for parameter in model.parameters():
        parameter.grad = None
    with torch.autocast(images.device.type, dtype=half):
        logits = model(images)
    loss = F.cross_entropy(logits.float(), labels)
    (loss * 128).backward()
    return loss


def _capture(run: Pass) -> torch.cuda.CUDAGraph:
    """A graph of the pass."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


# --- its kernels ---


@dataclass(frozen=True)
class Work:
    """A kernel, and the number of the operation that launched it; -1 if that is not known."""

    kernel: str
    ms: float
    operation: int


def _walk_events(event: Any) -> Iterator[Any]:
    """An event and those within it, in order."""
    yield event
    for child in sorted(event.cpu_children, key=lambda child: child.time_range.start):
        yield from _walk_events(child)


def _record_pass(run: Pass, device: str) -> tuple[list[Operation], list[Work]]:
    """The operations of a pass, and its kernels; without a GPU, each operation is one."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler, OperationLog() as log:
        run()
        if device == "cuda":
            torch.cuda.synchronize()
    marked = {
        int(event.name[len(_MARK) :]): event
        for event in profiler.events()
        if event.name.startswith(_MARK) and str(event.device_type).endswith("CPU")
    }
    works = []
    for number, event in sorted(marked.items()):
        if device == "cpu":
            works.append(Work(log.operations[number].name, event.cpu_time_total / 1e3, number))
        for part in _walk_events(event) if device == "cuda" else ():
            works += [
                Work(one.name, one.duration / 1e3, number)
                for one in part.kernels
                if not one.name.startswith(_MARK)  # the range itself, as the GPU saw it
            ]
    return log.operations, works


def _replay(graph: torch.cuda.CUDAGraph) -> list[Work]:
    """The kernels of a replay, in order, after some that warm up."""
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if str(event.device_type).endswith("CUDA")]
    events.sort(key=lambda event: event.time_range.start)
    return [Work(event.name, event.time_range.elapsed_us() / 1e3, -1) for event in events]


def label_works(unlabelled: list[Work], labelled: list[Work]) -> list[Work]:
    """The kernels of a replay with the operations of those of another pass, in the same order."""
    names = [[work.kernel for work in works] for works in (unlabelled, labelled)]
    found = list(unlabelled)
    for start, other, size in SequenceMatcher(None, *names, autojunk=False).get_matching_blocks():
        for place in range(size):
            number = labelled[other + place].operation
            found[start + place] = replace(unlabelled[start + place], operation=number)
    return found


# --- tables ---


def _make_rows(
    operations: list[Operation], works: Iterable[Work], rate: float
) -> list[tuple[str, str, int, float, float]]:
    """Name, size, number, ms and floor of each kind of operation, the longest first."""
    times: dict[int, float] = defaultdict(float)
    rows: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    unknown = Operation("not found", "", 0, 0)
    for work in works:
        times[work.operation] += work.ms
    for number, ms in times.items():
        one = operations[number] if number >= 0 else unknown
        row = rows[one.name, one.where]
        row[0] += 1
        row[1] += ms
        row[2] += 1e3 * max(one.bytes_moved / rate, one.flops / _FLOPS_A_SECOND)
    found = [(*key, int(row[0]), row[1], row[2]) for key, row in rows.items()]
    return sorted(found, key=lambda row: -row[3])


def describe_rows(rows: Iterable[tuple[str, str, int, float, float]]) -> list[str]:
    """The rows as text."""
    return [
        f"{name[:24]:24} {where:16} {count:4} {ms:7.3f} {floor:7.3f} {ms - floor:7.3f}"
        for name, where, count, ms, floor in rows
    ]


def _sum_rows(
    rows: list[tuple[str, str, int, float, float]], column: int
) -> list[tuple[str, str, int, float, float]]:
    """The rows added up by name (0) or by size (1)."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for row in rows:
        key = row[column].partition(" ")[0] if column else row[0]
        sums[key] = [old + new for old, new in zip(sums[key], row[2:], strict=True)]
    found = [(key, "", int(n), ms, floor) for key, (n, ms, floor) in sums.items()]
    return sorted(found, key=lambda row: -row[3])


def trace_pass(device: str, batch: int, rate: float) -> tuple[list[str], list[str]]:
    """The whole table and a short one, as lines."""
    half = torch.float16
    run = build_pass(device, batch, half)
    if device == "cuda":
        CHOICES.compile_all(run)
        for _ in range(3):
            run()
    operations, works = _record_pass(run, device)
    head = [f"one pass without a graph: {len(works)} kernels, {_add(works):.2f} ms"]
    if device == "cuda":
        graph = _capture(run)
        times = [_time_replays(graph) for _ in range(5)]
        works = label_works(_replay(graph), works)
        lost = sum(work.operation < 0 for work in works)
        head.append(
            f"replayed: {len(works)} kernels, {_add(works):.2f} ms, {lost} of them unknown; a pass "
            f"in {min(times):.2f} to {max(times):.2f} ms, {1e3 * batch / min(times):.0f} images/s"
        )
    rows = _make_rows(operations, works, rate)
    title = f"{'operation':24} {'largest':16} {'n':>4} {'ms':>7} {'floor':>7} {'gap':>7}"
    kernels: Counter[str] = Counter()
    for work in works:
        kernels[work.kernel[:90]] += work.ms  # type: ignore[assignment]
    whole = [*head, title, *describe_rows(rows), "", "by kernel, ms"]
    whole += [f"{ms:8.3f} {name}" for name, ms in kernels.most_common()]
    by_name, by_size = describe_rows(_sum_rows(rows, 0)[:14]), describe_rows(_sum_rows(rows, 1)[:6])
    top = describe_rows(rows[:20])
    return whole, [*head, title, *by_name, "- by size", *by_size, "- the longest", *top]


def _add(works: Iterable[Work]) -> float:
    """Milliseconds in all."""
    return sum(work.ms for work in works)


def _time_replays(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds of a replay among ten."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 10
