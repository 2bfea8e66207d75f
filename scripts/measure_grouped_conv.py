"""Grouped 3x3 convolutions of ResNeXt: kernels of our own against the library, shape by shape.

    python scripts/measure_grouped_conv.py [--half float16] [--batch 256] [--beside 32 64]

Prints milliseconds of the forward pass and of the gradients of input and weight, each from a CUDA
graph; --beside: how many channels the kernels put side by side.
"""

import argparse
import json

import torch
from torch import Tensor

import phalanx.products.grouped_conv_fused as kernels
from phalanx.kernels.choices import CHOICES
from phalanx.products.grouped_conv import grouped_conv, grouped_conv_input, grouped_conv_weight

SHAPES = ((56, 128, 4), (28, 256, 8), (14, 512, 16), (7, 1024, 32))  # pixels, channels, of a group


def run(x: Tensor, weight: Tensor) -> None:
    """Every pass once."""
    y = grouped_conv(x, weight)
    grouped_conv_input(y, weight)
    grouped_conv_weight(y, x, weight)


def main() -> None:
    """Compile, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--half", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--beside", type=int, nargs="+", default=[32])
    words = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    half, images = getattr(torch, words.half), []
    for size, channels, group in SHAPES:
        x = torch.randn(words.batch, channels, size, size, device="cuda", dtype=half)
        w = torch.randn(channels, group, 3, 3, device="cuda", dtype=half) / (9 * group) ** 0.5
        layout = torch.channels_last
        images.append((x.contiguous(memory_format=layout), w.contiguous(memory_format=layout)))
    for beside in words.beside:
        kernels._FEWEST_CHANNELS = beside
        CHOICES.known.clear()
        CHOICES.timings.clear()
        count = CHOICES.compile_all(lambda: [run(*pair) for pair in images])
        print(f"beside {beside}: compiled {count}", flush=True)
        for pair in images:
            run(*pair)
        for key, found in CHOICES.timings.items():
            print(json.dumps({key: {name: round(ms, 4) for name, ms in found.items()}}), flush=True)


if __name__ == "__main__":
    main()
