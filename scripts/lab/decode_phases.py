"""Where a step spends its time while CPU cores and GPU decode its photographs together.

    python scripts/lab/decode_phases.py DIR [--share 1] [--decoders 2] [--steps 150] [OPTION...]

DIR is a folder of photographs, by split and class. Trains ResNet-50 as `phalanx train` does, with
whatever options follow, and prints for each phase how many milliseconds a step spends in it. Phases
of one thread follow one another; three threads work at the same time, and the slowest of them is
the limit: `collect` (of which `answers` waits for workers, and `files` copies JPEGs), `decode` (of
which `nvjpeg` decodes and `cut` resizes) and the training loop.

The training loop needs 23 ms for a step of 256 images on an H200. Found: with the usual eight
queues of the GPU (CUDA_DEVICE_MAX_CONNECTIONS) `nvjpeg` waits for the graphs of training, 31 ms a
step at a share of 0.4; with 32 queues it takes 21 ms there and 28 at a share of 1, by torchvision's
decoder. Two batches at a time, by direct calls: 42 ms each and 11 for `cut`, which is 27 a step. To
try next: --decoders 3 and 4 with --single, each with and without --high; a call of its own without
this script's timers would show what causes single stops of 0.3 s.
"""

import argparse
import ctypes
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from phalanx.cli.main import main as run_phalanx
from phalanx.data.loading import gpu_decode
from phalanx.data.loading.gpu_decode import GpuDecoder
from phalanx.data.loading.nvjpeg import NvJpeg
from phalanx.data.loading.worker_pool import WorkerPool

PHASES: dict[str, tuple[Any, str]] = {
    "collect": (GpuDecoder, "_collect"),
    "  answers": (WorkerPool, "_collect"),
    "  tasks": (WorkerPool, "_submit"),
    "  files": (gpu_decode._FileBuffer, "append"),
    "decode": (GpuDecoder, "_decode_batch"),
    "  nvjpeg": (NvJpeg, "__call__"),
    "  cut": (gpu_decode, "_crop_decoded"),
    "  rows": (GpuDecoder, "_write_rows"),
}
SECONDS: Counter[str] = Counter()


def time_phase(name: str) -> None:
    """Wrap a phase so that every call adds its time."""
    owner, function = PHASES[name]
    plain: Callable[..., Any] = getattr(owner, function)

    def timed(*args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return plain(*args, **options)
        finally:
            SECONDS[name] += time.perf_counter() - begin

    setattr(owner, function, timed)


def create_without_pipeline(nvjpeg: NvJpeg, backend: int) -> int:
    """Create a decoder with NVJPEG_FLAGS_HW_DECODE_NO_PIPELINE."""
    library, handle = nvjpeg._library, ctypes.byref(nvjpeg._handle)
    status: int = library.nvjpegCreateEx(backend, None, None, 1, handle)
    return status


def train_at_high_priority(is_high: bool) -> AbstractContextManager[object]:
    """Context whose work goes to a stream of high priority."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    return torch.cuda.stream(torch.cuda.Stream(priority=-1)) if is_high else nullcontext()


def main() -> int:
    """Train, and print the phases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--share", default="1")
    parser.add_argument("--decoders", type=int, default=gpu_decode._DECODERS)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--switch-us", type=float, default=1e6 * gpu_decode._SWITCH_S)
    parser.add_argument("--single", action="store_true", help="without nvJPEG's own pipeline")
    parser.add_argument("--high", action="store_true", help="train on a stream of high priority")
    words, options = parser.parse_known_args()
    gpu_decode._SWITCH_S = 1e-6 * words.switch_us
    gpu_decode._DECODERS, gpu_decode._BUFFERS = words.decoders, words.decoders + 2
    if words.single:
        NvJpeg._create = create_without_pipeline  # type: ignore[method-assign]
    for name in PHASES:
        time_phase(name)
    with TemporaryDirectory() as folder, train_at_high_priority(words.high):
        command = ["train", "synthetic-resnet50", "--batch-size=256", "--half-type=float16"]
        command += ["--loss-scaling=128", "--validation-mode=none", "--ckpts-per-epoch=0"]
        command += ["--data=folder", f"--data-dir={words.dir}", f"--gpu-decode={words.share}"]
        command += [f"--steps={words.steps}", f"--run-dir={folder}/run", *options]
        code = run_phalanx(command)
        if code:
            return code
        summary = json.loads(Path(folder, "run", "summary.json").read_text(encoding="utf-8"))
    rate = f"{summary['images_per_second']:,.0f} images/s, share {words.share}"
    print(f"{rate}, {words.decoders} decoders, {words.switch_us:.0f} us", *options)
    for name in PHASES:
        print(f"{name:<12}{1e3 * SECONDS[name] / words.steps:>8.2f} ms a step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
