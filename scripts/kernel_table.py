"""Print the cost of each kernel: bytes it must move, the bound at the device's copy rate, and ms.

python scripts/kernel_table.py [NAME ...] [--batch 256] [--half float16] [--repeats 5]

NAME: only cases whose name contains one of these words. Bytes count every input and output once;
times are the median of graphs of ten launches, on an idle GPU. To add a family of kernels, add a
function that yields `Case`s to FAMILIES.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from phalanx.fused.stem_ops import arrange_image, pool_norm, pool_norm_back
from phalanx.kernels.batch_norm import (
    NONE,
    RELU,
    apply_norm,
    apply_norm_back,
    norm_vectors,
    pack_signs,
    reduce_norm,
    reduce_norm_gated,
)
from phalanx.kernels.choices import CHOICES
from phalanx.kernels.group_norm import group_norm_vectors, list_groups, reduce_group_norm_gated
from phalanx.products.grouped import ConvShape, convolve_groups, convolve_groups_back

RESNET50 = ((112, 64), (56, 64), (56, 256), (28, 128), (28, 512), (14, 256), (14, 1024), (7, 512))
RESNET50 = (*RESNET50, (7, 2048))  # edges and channels of the norms' inputs
LAUNCHES = 10


@dataclass(frozen=True)
class Case:
    """One use of a kernel: what runs, and the bytes that it must move."""

    name: str
    run: Callable[[], object]
    bytes_moved: int


def count_bytes(*tensors: Tensor) -> int:
    """Bytes of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def new_image(batch: int, channels: int, edge: int, half: torch.dtype) -> Tensor:
    """A random image in channels_last memory."""
    image = torch.randn(batch, channels, edge, edge, device="cuda", dtype=half)
    return image.contiguous(memory_format=torch.channels_last)


def list_norm_cases(batch: int, half: torch.dtype) -> Iterator[Case]:
    """The passes of batch norm and group norm in a ResNet-50."""
    for edge, channels in RESNET50:
        yield from _list_passes(new_image(batch, channels, edge, half))


def _list_passes(x: Tensor) -> Iterator[Case]:
    """The passes over one image."""
    channels = x.shape[1]
    y, dy, dz = (torch.randn_like(x) for _ in range(3))
    affine = [torch.ones(channels, device="cuda"), torch.zeros(channels, device="cuda")]
    v = norm_vectors(x, affine, [], 1e-5, 0.1)
    u, signs = reduce_norm(dy, x, v, RELU), pack_signs(y)
    groups = list_groups(32, channels, interleaved=False)
    w = group_norm_vectors(x, affine, groups, 1e-5)
    table: dict[str, tuple[Callable[[], object], float]] = {  # with the number of times x is moved
        "statistics": (lambda: norm_vectors(x, affine, [], 1e-5, 0.1), 1),
        "apply, ReLU": (lambda: apply_norm(x, v, RELU), 2),
        "apply, residual, ReLU": (lambda: apply_norm(x, v, RELU, y), 3),
        "reduce, ReLU": (lambda: reduce_norm(dy, x, v, RELU), 2),
        "reduce, gate": (lambda: reduce_norm_gated(dy, x, v, y), 4),
        "reduce, gate, two": (lambda: reduce_norm_gated(dy, x, v, y, dz), 5),
        "reduce, signs, two": (lambda: reduce_norm_gated(dy, x, v, signs, dz), 4 + 1 / 16),
        "apply back, ReLU": (lambda: apply_norm_back(dy, x, v, u, RELU), 3),
        "apply back": (lambda: apply_norm_back(dy, x, v, u, NONE), 3),
        "groups: statistics": (lambda: group_norm_vectors(x, affine, groups, 1e-5), 1),
        "groups: apply, ReLU": (lambda: apply_norm(x, w, RELU), 2),
        "groups: reduce, gate": (lambda: reduce_group_norm_gated(dy, x, w, groups, y), 4),
    }
    for name, (run, times) in table.items():
        where = f"{x.shape[2]} px, {channels} channels"
        yield Case(f"{name}, {where}", run, int(times * count_bytes(x)))


def list_stem_cases(batch: int, half: torch.dtype) -> Iterator[Case]:
    """The stem of a ResNet-50."""
    image = new_image(batch, 3, 224, torch.float32)
    for size, name in ((0, "four channels"), (7, "blocks of pixels")):
        moved = count_bytes(image, arrange_image(image, size, half))
        run = partial(arrange_image, image, size, half)
        yield Case(f"image as {name}, 224 px", run, moved)
    x = new_image(batch, 64, 112, half)
    v = norm_vectors(x, [torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")], [], 0.1, 0)
    y, argmax, x_at_max = pool_norm(x, v, 3)
    dy = torch.randn_like(y)
    yield Case(
        "norm, ReLU, pool, 112 px", lambda: pool_norm(x, v, 3), count_bytes(x, y, argmax, x_at_max)
    )
    moved = count_bytes(dy, x_at_max, dy, argmax, x, x)
    run_back = lambda: pool_norm_back(dy, argmax, x_at_max, x, v, 3, [])  # noqa: E731
    yield Case("norm, ReLU, pool, back, 112 px", run_back, moved)


def list_group_cases(batch: int, half: torch.dtype) -> Iterator[Case]:
    """The grouped convolutions of a ResNeXt-101 32x4d."""
    for edge, channels in ((56, 128), (28, 256), (14, 512), (7, 1024)):
        x, dy = (new_image(batch, channels, edge, half) for _ in range(2))
        weight = torch.randn(channels, channels // 32, 3, 3, device="cuda", dtype=half)
        weight = weight.contiguous(memory_format=torch.channels_last)
        shape, where = ConvShape((1, 1), (1, 1), (1, 1), 32), f"{edge} px, {channels} channels"
        run = partial(convolve_groups, x, weight, shape)
        yield Case(f"32 groups, {where}", run, count_bytes(x, x))
        back = partial(convolve_groups_back, dy, x, weight, shape)
        for name, wanted, times in (("weight", False, 2), ("input and weight", True, 5)):
            run = partial(back, needs_input_grad=wanted)
            yield Case(f"32 groups, gradient of {name}, {where}", run, times * count_bytes(x))


FAMILIES = (list_norm_cases, list_stem_cases, list_group_cases)


def time_on_device(run: Callable[[], object], repeats: int) -> float:
    """Milliseconds of one launch, the median of graphs of several."""
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(LAUNCHES):
                run()
        times = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / LAUNCHES)
    return median(times)


def measure_copy_rate() -> float:
    """Bytes per second, read and written, of a copy on the device."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    begin.record()
    for _ in range(LAUNCHES):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return LAUNCHES * 2 * source.numel() / begin.elapsed_time(end) * 1e3


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--half", default="float16")
    parser.add_argument("--repeats", type=int, default=5)
    words = parser.parse_args()
    rate = measure_copy_rate()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, batch {words.batch}, ", end=""
    )
    print(f"{words.half}, device copy {rate / 1e12:.2f} TB/s, n = {words.repeats}\n")
    print("| kernel | MB | lower bound, ms | measured, ms | lower bound / measured |")
    print("|---|---:|---:|---:|---:|")
    half = getattr(torch, words.half)
    cases = [case for family in FAMILIES for case in family(words.batch, half)]
    if words.names:
        cases = [case for case in cases if any(name in case.name for name in words.names)]
    CHOICES.compile_all(lambda: [case.run() for case in cases])
    for case in cases:
        ms, floor = time_on_device(case.run, words.repeats), case.bytes_moved / rate * 1e3
        row = f"| {case.name} | {case.bytes_moved / 1e6:.0f} | {floor:.4f} | {ms:.4f} |"
        print(f"{row} {floor / ms:.2f} |", flush=True)


if __name__ == "__main__":
    main()
