"""How fast nvJPEG decodes while the GPU trains, called directly and through torchvision.

    python scripts/lab/nvjpeg_streams.py DIR [--batch 102 256]

DIR is a folder of photographs. First the cores alone: milliseconds per photograph in one process
and in as many as there are cores. Then each way of calling nvJPEG, on an idle GPU and beside a CUDA
graph that keeps it as busy as a training step does: images/s, and how much longer the graph takes.

What to expect: DALI's authors measured that nvJPEG keeps a pool of memory only after
nvjpegDecodeBatchedPreAllocate; without it, it allocates and frees in every call, which waits for
the whole device. So torchvision, which does not call it, should take turns with the graph, and the
direct calls with `pool` should not.
"""

import argparse
import ctypes
import glob
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, byref, c_int, c_size_t, c_ubyte, c_uint, c_void_p
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import simplejpeg
import torch
from torch import Tensor

HARDWARE, RGB, CSS_444 = 3, 3, 0
PLACES = ("torchvision.libs", "nvidia/cu13/lib", "nvidia/nvjpeg/lib")


class Image(ctypes.Structure):
    """nvjpegImage_t."""

    _fields_ = (("channel", c_void_p * 4), ("pitch", c_size_t * 4))


_ALLOCATE = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(c_void_p), c_size_t, c_void_p)
_FREE = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t, c_void_p)


class Allocator(ctypes.Structure):
    """nvjpegDevAllocatorV2_t."""

    _fields_ = (("malloc", _ALLOCATE), ("free", _FREE), ("context", c_void_p))


def find_library() -> str:
    """The file of libnvjpeg."""
    roots = [Path(p) / place for p in sys.path for place in PLACES]
    roots += [Path("/usr/local/cuda/lib64"), Path("/usr/lib/x86_64-linux-gnu")]
    found = [f for root in roots for f in sorted(glob.glob(f"{root}/libnvjpeg*.so*"))]
    print("libnvjpeg:", *found)
    return found[0]


class Decoder:
    """nvJPEG's hardware decoder by direct calls."""

    def __init__(self, library: ctypes.CDLL, *, pool: bool, cached: bool, high: bool) -> None:
        self.library, self.calls = library, 0
        self.stream = torch.cuda.Stream(priority=-1 if high else 0)
        self.handle, self.state = c_void_p(), c_void_p()
        self.allocator = Allocator(_ALLOCATE(self._malloc), _FREE(self._free), None)
        if cached:
            given = byref(self.allocator)
            self.check("CreateExV2", c_int(HARDWARE), given, None, c_uint(0), byref(self.handle))
        else:
            self.check("CreateEx", c_int(HARDWARE), None, None, c_uint(0), byref(self.handle))
        self.check("JpegStateCreate", self.handle, byref(self.state))
        if pool:
            self.check("DecodeBatchedPreAllocate", self.handle, self.state, 1, 1, 1, CSS_444, RGB)

    def _malloc(self, context: int, out: "ctypes._Pointer[c_void_p]", size: int, stream: int) -> int:
        self.calls += 1
        out[0] = torch.cuda.caching_allocator_alloc(size, stream=stream or 0)
        return 0

    def _free(self, context: int, pointer: int, size: int, stream: int) -> int:
        if pointer:
            torch.cuda.caching_allocator_delete(pointer)
        return 0

    def check(self, name: str, *words: object) -> None:
        status = getattr(self.library, f"nvjpeg{name}")(*words)
        if status:
            raise RuntimeError(f"nvjpeg{name}: {status}")

    def engines(self) -> str:
        engines, cores = c_uint(), c_uint()
        self.check("GetHardwareDecoderInfo", self.handle, byref(engines), byref(cores))
        return f"{engines.value} engines of {cores.value} cores"

    def __call__(self, files: list[Tensor], *, waits: bool = True) -> list[Tensor]:
        count, sides = len(files), []
        pointers = (c_void_p * count)(*(f.data_ptr() for f in files))
        lengths = (c_size_t * count)(*(len(f) for f in files))
        parts, kind = c_int(), c_int()
        widths, heights = (c_int * 4)(), (c_int * 4)()
        for n in range(count):
            self.check(
                "GetImageInfo", self.handle, c_void_p(pointers[n]), c_size_t(lengths[n]),
                byref(parts), byref(kind), widths, heights,
            )  # fmt: skip
            sides.append((heights[0], widths[0]))
        with torch.cuda.stream(self.stream):
            flat = torch.empty(sum(3 * h * w for h, w in sides), dtype=torch.uint8, device="cuda")
        images, out, place = (Image * count)(), [], 0
        for n, (high, wide) in enumerate(sides):
            size = high * wide
            for channel in range(3):
                images[n].channel[channel] = flat.data_ptr() + place + channel * size
                images[n].pitch[channel] = wide
            out.append(flat[place : place + 3 * size].view(3, high, wide))
            place += 3 * size
        self.check("DecodeBatchedInitialize", self.handle, self.state, count, 1, RGB)
        self.check(
            "DecodeBatched", self.handle, self.state, pointers, lengths, images,
            c_void_p(self.stream.cuda_stream),
        )  # fmt: skip
        if waits:
            self.stream.synchronize()
        return out


def time_cores(paths: list[Path]) -> None:
    """Print what one photograph costs the cores."""
    cores = len(os.sched_getaffinity(0))
    print(f"one process: {1e3 * _decode_all(paths):.2f} ms a photograph")
    with get_context("fork").Pool(cores) as pool:
        each = pool.map(_decode_all, [paths] * cores)
    print(f"{cores} processes: {1e3 * statistics.mean(each):.2f} ms a photograph")


def _decode_all(paths: list[Path]) -> float:
    files = [path.read_bytes() for path in paths]
    begin = time.process_time()
    for file in files:
        simplejpeg.decode_jpeg(file, fastdct=True)
    return (time.process_time() - begin) / len(files)


def make_load() -> torch.cuda.CUDAGraph:
    """About 23 ms of products and of passes over memory, as in a training step."""
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.half) for _ in range(2))
    big = torch.randn(2**26, device="cuda", dtype=torch.half)
    c, other = a @ b, big.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(75):
            torch.mm(a, b, out=c)
            torch.add(big, 1, out=other)
    return graph


def time_load(graph: torch.cuda.CUDAGraph, replays: int, work: Callable[[], int]) -> tuple[float, float]:
    """Milliseconds of a replay, and images/s of the work that is done meanwhile."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    images, since = 0, time.perf_counter()
    while not end.query():
        images += work()
    rate = images / (time.perf_counter() - since)
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / replays, rate


def measure(
    name: str, decode: Callable[[list[Tensor]], object], batches: list[list[Tensor]], graph: torch.cuda.CUDAGraph
) -> None:
    """A row of the table."""
    place = 0

    def work() -> int:
        nonlocal place
        batch = batches[place % len(batches)]
        place += 1
        decode(batch)
        return len(batch)

    for _ in range(3):
        work()
    torch.cuda.synchronize()
    begin, images = time.perf_counter(), 0
    while images < 6000:
        images += work()
    idle = images / (time.perf_counter() - begin)
    step, busy = time_load(graph, 60, work)
    alone, _ = time_load(graph, 20, lambda: time.sleep(1e-3) or 0)
    print(
        f"{name:<34}{len(batches[0]):>4}{idle:>9,.0f} idle{busy:>9,.0f} busy   "
        f"replay {step:.2f} ms, alone {alone:.2f}",
        flush=True,
    )


def main() -> int:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--batch", type=int, nargs="*", default=[102, 256])
    words = parser.parse_args()
    paths = sorted(p for p in words.dir.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))[:300]
    time_cores(paths)
    files = []
    for path in paths:
        data = path.read_bytes()
        if simplejpeg.decode_jpeg_header(data)[2] == "YCbCr":
            files.append(torch.from_numpy(np.frombuffer(data, np.uint8).copy()))
    from torchvision.io import ImageReadMode, decode_jpeg

    torch.ones(1, device="cuda")
    decode_jpeg(files[:2], mode=ImageReadMode.RGB, device="cuda")
    library = ctypes.CDLL(find_library())

    def with_torchvision(batch: list[Tensor]) -> object:
        return decode_jpeg(batch, mode=ImageReadMode.RGB, device="cuda")

    first = Decoder(library, pool=False, cached=False, high=False)
    print(first.engines())
    refused = []
    for n, file in enumerate(files):
        try:
            first([file])
        except RuntimeError as failure:
            refused.append((n, str(failure)))
    print("refused by the hardware:", refused)
    files = [file for n, file in enumerate(files) if n not in dict(refused)]
    expected, found = with_torchvision(files), first(files)
    same = sum(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    print(f"{same} of {len(files)} images have the same bits")
    graph = make_load()
    random = np.random.default_rng(0)
    for count in words.batch:
        batches = [[files[n] for n in random.permutation(len(files))[:count]] for _ in range(30)]
        measure("torchvision", with_torchvision, batches, graph)
        for pool in (False, True):
            for cached in (False, True):
                for high in (False, True):
                    name = "direct" + " pool" * pool + " cached" * cached + " priority" * high
                    try:
                        decoder = Decoder(library, pool=pool, cached=cached, high=high)
                        measure(name, decoder, batches, graph)
                        print(f"      {decoder.calls} allocations")
                    except RuntimeError as failure:
                        print(name, failure)
        pair = [Decoder(library, pool=True, cached=False, high=True) for _ in range(2)]
        with ThreadPoolExecutor(2) as threads:

            def with_two(batch: list[Tensor]) -> object:
                parts = batch[::2], batch[1::2]
                return list(threads.map(lambda d, p: d(p), pair, parts))

            measure("two direct, pool priority", with_two, batches, graph)
    return 0


if __name__ == "__main__":
    sys.exit(main())
