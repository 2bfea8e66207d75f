"""What nvJPEG makes of damaged photographs that still begin and end as they should.

    python scripts/lab/nvjpeg_damage.py DIR

DIR is a folder of photographs. Each kind of damage is done to 40 of them; each damaged file is
decoded four times among others. Prints how many of them nvJPEG refuses, how many come out different
from time to time, and how many the CPU's decoder refuses; with nvJPEG's usual flags, with its flag
for strict bitstreams, and with its output memory cleared beforehand. At last all photographs are
damaged, and those that the CPU's decoder still takes without a complaint are given to nvJPEG: by
default it decodes whatever the CPU has taken so. What to expect: none of them changes.
"""

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import simplejpeg
import torch
from torch import Tensor

from phalanx.data.loading import nvjpeg
from phalanx.data.loading.gpu_share import _is_baseline

STRICT = 4  # NVJPEG_FLAGS_BITSTREAM_STRICT
COUNT, LENGTH, ROUNDS = 40, 1000, 4
Damage = Callable[[bytes, int], bytes]
DAMAGES: dict[str, Damage] = {
    "whole": lambda data, at: data,
    "bytes missing": lambda data, at: data[:at] + data[at + LENGTH :],
    "zeros": lambda data, at: data[:at] + bytes(LENGTH) + data[at + LENGTH :],
    "noise": lambda data, at: data[:at] + random.randbytes(LENGTH) + data[at + LENGTH :],
    "a flipped bit": lambda data, at: data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :],
    "second half missing": lambda data, at: data[:at] + data[-2:],
}


class StrictNvJpeg(nvjpeg.NvJpeg):
    """nvJPEG with its flag for strict bitstreams."""

    def _create(self, backend: int) -> int:
        handle = nvjpeg.byref(self._handle)
        status: int = self._library.nvjpegCreateEx(backend, None, None, STRICT, handle)
        return status


def to_tensor(data: bytes) -> Tensor:
    """A file's bytes, as nvJPEG gets them."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def is_refused_by_cpu(file: Tensor) -> bool:
    """Whether the CPU's decoder says that the file is damaged."""
    try:
        simplejpeg.decode_jpeg(file.numpy())
    except ValueError:
        return True
    return False


def measure(decode: nvjpeg.NvJpeg, files: list[Tensor], others: list[Tensor]) -> str:
    """What becomes of the files, in words."""
    refused, changing = 0, 0
    for file in files:
        found = []
        for _ in range(ROUNDS):
            decode(random.sample(others, 40))
            try:
                (image,) = decode([file])
            except RuntimeError:
                refused += 1
                break
            found.append(image.cpu())
        changing += any(not torch.equal(image, found[0]) for image in found)
    return f"{refused:>3} refused, {changing:>3} change"


def main() -> int:
    """Try every kind of damage in every way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path)
    paths = sorted(
        p for p in parser.parse_args().dir.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg")
    )
    whole = [data for path in paths[:200] if _is_baseline(data := path.read_bytes())]
    random.seed(0)
    others = [to_tensor(data) for data in whole]
    usual = nvjpeg.NvJpeg(torch.device("cuda"))
    strict = StrictNvJpeg(torch.device("cuda"))
    for name, damage in DAMAGES.items():
        files = [to_tensor(damage(data, len(data) // 2)) for data in whole[:COUNT]]
        row = f"{name:<20} usual {measure(usual, files, others)}; strict"
        row += f" {measure(strict, files, others)}; cleared "
        with patch.object(torch, "empty", torch.zeros):
            row += measure(usual, files, others)
        print(f"{row}; the CPU refuses {sum(map(is_refused_by_cpu, files))} of {COUNT}", flush=True)
        taken = [
            file
            for data in whole
            for place in (0.3, 0.6, 0.9)
            for file in [to_tensor(damage(data, int(len(data) * place)))]
            if not is_refused_by_cpu(file)
        ]
        found = measure(usual, taken, others)
        print(f"    of {3 * len(whole)}, the CPU takes {len(taken)}; usual {found}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
