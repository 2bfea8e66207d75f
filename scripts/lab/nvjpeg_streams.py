"""How fast nvJPEG decodes while the GPU trains, and what it waits for.

    python scripts/lab/nvjpeg_streams.py DIR [--batch 256] [--ways "direct x2,..."] [--loads ...]

DIR is a folder of photographs. Each row: a way to call nvJPEG, and a load that keeps the GPU as
busy as a training step does. Prints images/s on the idle GPU and beside the load, and how long the
load takes then. Ways: torchvision's decode_jpeg; direct calls; "x2", two of them at once, each with
batches of its own; "single", with the flag against pipelines inside nvJPEG. Loads: one CUDA graph,
ten graphs, single kernels; "high", a graph captured and started on a stream of high priority;
"started high", only started there.

Found on an H200: a call takes 8 ms for 102 images on an idle GPU, and beside a kernel that leaves
the chip free, so it waits neither for memory nor for the default stream; a memory pool
(nvjpegDecodeBatchedPreAllocate) changes nothing. Beside a graph it takes as long as seven of them
for 102 images as for 256: 249 images/s. The reason is queues: a stream of nvJPEG that shares one
with the graph's stream waits for the whole graph. With CUDA_DEVICE_MAX_CONNECTIONS=32 instead of
the usual 8 it is 13,133 images/s.
"""

import argparse
import ctypes
import glob
import sys
import threading
import time
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p
from itertools import cycle
from pathlib import Path

import numpy as np
import simplejpeg
import torch
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

HARDWARE, RGB = 3, 3
NO_PIPELINE = 1  # NVJPEG_FLAGS_HW_DECODE_NO_PIPELINE
PLACES = ("torchvision.libs", "nvidia/cu13/lib", "nvidia/nvjpeg/lib")
WAYS = ("torchvision", "direct", "direct x2", "direct x4", "single x2", "single x4")
LOADS = ("idle", "graph", "high", "started high")
Decode = Callable[[list[Tensor]], object]


class Image(ctypes.Structure):
    """nvjpegImage_t."""

    _fields_ = (("channel", c_void_p * 4), ("pitch", c_size_t * 4))


def find_library() -> str:
    """The file of libnvjpeg."""
    roots = [Path(p) / place for p in sys.path for place in PLACES]
    return next(f for root in roots for f in sorted(glob.glob(f"{root}/libnvjpeg*.so*")))


class Decoder:
    """nvJPEG's hardware decoder by direct calls."""

    def __init__(self, library: ctypes.CDLL, flags: int) -> None:
        self._library, self._stream = library, torch.cuda.Stream()
        self._handle, self._state = c_void_p(), c_void_p()
        self._call("CreateEx", c_int(HARDWARE), None, None, c_uint(flags), byref(self._handle))
        self._call("JpegStateCreate", self._handle, byref(self._state))

    def _call(self, name: str, *words: object) -> None:
        status = getattr(self._library, f"nvjpeg{name}")(*words)
        if status:
            raise RuntimeError(f"nvjpeg{name}: {status}")

    def __call__(self, files: list[Tensor]) -> list[Tensor]:
        """The images, once they are decoded."""
        count, sides = len(files), []
        lengths = (c_size_t * count)(*(len(f) for f in files))
        few, numbers = [c_int(), c_int()], [(c_int * 4)(), (c_int * 4)()]
        for file in files:
            words = c_void_p(file.data_ptr()), c_size_t(len(file))
            self._call("GetImageInfo", self._handle, *words, *map(byref, few), *numbers)
            sides.append((numbers[1][0], numbers[0][0]))
        with torch.cuda.stream(self._stream):
            flat = torch.empty(sum(3 * h * w for h, w in sides), dtype=torch.uint8, device="cuda")
        pointers = (c_void_p * count)(*(f.data_ptr() for f in files))
        images, out, place = (Image * count)(), [], 0
        for n, (high, wide) in enumerate(sides):
            size = high * wide
            for channel in range(3):
                images[n].channel[channel] = flat.data_ptr() + place + channel * size
                images[n].pitch[channel] = wide
            out.append(flat[place : place + 3 * size].view(3, high, wide))
            place += 3 * size
        own = self._handle, self._state
        self._call("DecodeBatchedInitialize", *own, count, 1, RGB)
        stream = c_void_p(self._stream.cuda_stream)
        self._call("DecodeBatched", *own, pointers, lengths, images, stream)
        self._stream.synchronize()
        return out


class Load:
    """About 20 ms of products and of passes over memory, as in a training step."""

    def __init__(self, kind: str) -> None:
        high = torch.cuda.Stream(priority=-1)
        self._stream = high if kind.endswith("high") else torch.cuda.default_stream()
        self._a, self._b = (torch.randn(4096, 4096, device="cuda").half() for _ in range(2))
        self._big = torch.randn(2**26, device="cuda").half()
        self._c, self._other = self._a @ self._b, self._big.clone()
        pieces = {"ten graphs": 10, "kernels": 0}.get(kind, 1)
        self._graphs = [torch.cuda.CUDAGraph() for _ in range(pieces)]
        for graph in self._graphs:
            with torch.cuda.graph(graph, stream=high if kind == "high" else None):
                self._launch(80 // pieces)
        torch.cuda.synchronize()

    def _launch(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._a, self._b, out=self._c)
            torch.add(self._big, 1, out=self._other)

    def run(self, times: int = 4) -> None:
        """Queue it a few times, as in training, and wait."""
        with torch.cuda.stream(self._stream):
            for _ in range(times):
                if not self._graphs:
                    self._launch(80)
                for graph in self._graphs:
                    graph.replay()
            self._stream.synchronize()


def build_decoders(way: str, library: ctypes.CDLL) -> list[Decode]:
    """What decodes, each in a thread of its own."""
    if way == "torchvision":
        return [lambda files: decode_jpeg(files, mode=ImageReadMode.RGB, device="cuda")]
    flags = NO_PIPELINE if way.startswith("single") else 0
    return [Decoder(library, flags) for _ in range(int(way.partition(" x")[2] or 1))]


def measure(decoders: list[Decode], batches: list[list[Tensor]], load: Load | None) -> str:
    """Images/s beside a load of about a second, and milliseconds of the load."""
    done, images, turns = threading.Event(), [0], cycle(batches)

    def work(decode: Decode) -> None:
        while not done.is_set():
            batch = next(turns)
            decode(batch)
            images[0] += len(batch)

    threads = [threading.Thread(target=work, args=(decode,)) for decode in decoders]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    begin, first, rounds = time.perf_counter(), images[0], 0
    while time.perf_counter() - begin < 0.8:
        if load is None:
            time.sleep(0.02)
        else:
            load.run()
            rounds += 4
    elapsed, found = time.perf_counter() - begin, images[0] - first
    done.set()
    for thread in threads:
        thread.join()
    took = f", load {1e3 * elapsed / rounds:.2f} ms" if rounds else ""
    return f"{found / elapsed:>8,.0f} images/s{took}"


def main() -> int:
    """Measure every way beside every load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--loads", default=",".join(LOADS))
    words = parser.parse_args()
    paths = sorted(p for p in words.dir.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))[:300]
    contents = [path.read_bytes() for path in paths]
    files = [
        torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        for data in contents
        if simplejpeg.decode_jpeg_header(data)[2] == "YCbCr"
    ]
    library, random = ctypes.CDLL(find_library()), np.random.default_rng(0)
    batches = [[files[n] for n in random.permutation(len(files))[: words.batch]] for _ in range(30)]
    loads = {kind: None if kind == "idle" else Load(kind) for kind in words.loads.split(",")}
    for way in words.ways.split(","):
        decoders = build_decoders(way, library)
        for decode in decoders:
            decode(batches[0])
        for kind, load in loads.items():
            print(f"{way:<14}{kind:<15}{measure(decoders, batches, load)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
