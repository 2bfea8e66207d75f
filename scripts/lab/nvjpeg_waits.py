"""Whether nvJPEG waits for other work on the GPU while it decodes photographs.

    python scripts/lab/nvjpeg_waits.py DIR

DIR is a folder of photographs. Times torchvision's decode_jpeg for batches of 102 files on an idle
GPU and beside 100 ms of work on another stream: the same files every time, other files every time,
other files after one batch of large ones, and other files in pinned memory.

Training ResNet-50 takes 23.1 ms a step of 256 on an H200 and nvJPEG 8.5 and 10.6 ms for 40 and 50 %
of them, but a step with both takes 34.2 and 35.8 ms: about the sum, as if decoding waited for the
step. What to expect if the cause is that nvJPEG frees and allocates memory as sizes change, which
waits for the whole device: the same files take about 8 ms beside other work, other files 100 ms or
more. If the same files wait beside work on the default stream alone, that stream is the cause.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg, encode_jpeg

DEVICE = torch.device("cuda")
FILES, ROUNDS, BUSY_MS = 102, 30, 100.0
LARGE = (3, 1600, 2400)


def count_busy_cycles() -> int:
    """Clock cycles of the GPU that take BUSY_MS."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 50_000_000
    torch.cuda._sleep(cycles // 100)
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    return int(cycles * BUSY_MS / begin.elapsed_time(end))


def time_decode(files: list[Tensor], stream: torch.cuda.Stream) -> float:
    """Milliseconds that one call takes on the host."""
    with torch.cuda.stream(stream):
        stream.synchronize()
        begin = time.perf_counter()
        decode_jpeg(files, mode=ImageReadMode.RGB, device=DEVICE)
        return 1e3 * (time.perf_counter() - begin)


def measure(name: str, batches: Sequence[list[Tensor]], cycles: int) -> None:
    """Print the times of a kind of batches, on an idle GPU and on a busy one."""
    decoding, other = torch.cuda.Stream(), torch.cuda.Stream()
    busy = {"idle": None, "default stream": torch.cuda.default_stream(), "other stream": other}
    for work, stream in busy.items():
        times = []
        for batch in batches:
            if stream is not None:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(cycles)
            times.append(time_decode(batch, decoding))
            torch.cuda.synchronize()
        row = f"{name:<28}{work:<16}{statistics.median(times):>8.1f} ms"
        print(f"{row} ({min(times):.1f} to {max(times):.1f}), n = {len(times)}")


def main() -> int:
    """Measure each kind of batches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path)
    paths = sorted(
        p for p in parser.parse_args().dir.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg")
    )
    files = [
        torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) for path in paths[:300]
    ]
    random.seed(0)
    others = [random.sample(files, FILES) for _ in range(ROUNDS)]
    cycles = count_busy_cycles()
    measure("the same files", [files[:FILES]] * ROUNDS, cycles)
    measure("other files", others, cycles)
    large = encode_jpeg(torch.randint(0, 255, LARGE, dtype=torch.uint8), quality=75)
    time_decode([large] * FILES, torch.cuda.Stream())
    measure("other files, after large", others, cycles)
    measure("other files, pinned", [[f.pin_memory() for f in batch] for batch in others], cycles)
    return 0


if __name__ == "__main__":
    sys.exit(main())
