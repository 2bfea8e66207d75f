"""Forward and backward of a model with our modules and with timm's, alternating.

    python scripts/race_with_timm.py [--model resnet50] [--batch-size 256] [--pairs 20] [--steps 10]

Needs timm and a CUDA device. bfloat16 autocast, channels_last, images on the device, no optimizer;
both eager, then both compiled. Prints the median of the paired ratios with its interval.
"""

import argparse
from collections.abc import Callable

import timm
import torch
import torch.nn.functional as F
from torch import nn

from phalanx.bench.paired_ratio import measure_pairs
from phalanx.catalog.models import MODELS
from phalanx.models.build import build_model

WARM_UP = 12


def make_block(model: nn.Module, images: torch.Tensor, steps: int) -> Callable[[], int]:
    """A call that runs some steps of forward and backward, and waits for the device."""
    labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)

    def block() -> int:
        for _ in range(steps):
            model.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(images)
            F.cross_entropy(logits.float(), labels).backward()
        torch.cuda.synchronize()
        return steps * len(images)

    return block


def race(ours: nn.Module, theirs: nn.Module, words: argparse.Namespace, how: str) -> None:
    """One line of the table."""
    size = MODELS[words.model].image_size
    images = torch.randn(words.batch_size, 3, size, size, device="cuda")
    images = images.to(memory_format=torch.channels_last)
    sides = [make_block(model.train(), images, words.steps) for model in (ours, theirs)]
    for side in sides:
        for _ in range(max(1, WARM_UP // words.steps)):
            side()
    ratio = measure_pairs(*sides, pairs=words.pairs, done=lambda _: None)
    low, high = ratio.interval95
    spans = [
        f"{sorted(s)[len(s) // 2]:,.0f} ({min(s):,.0f} to {max(s):,.0f})"
        for s in (ratio.ours, ratio.theirs)
    ]
    print(
        f"| {words.model} | {how} | {spans[0]} | {spans[1]} "
        f"| {ratio.median:.3f} | {low:.3f} to {high:.3f} |",
        flush=True,
    )


def main() -> None:
    """Compare eager, then compiled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    words = parser.parse_args()
    print(
        f"timm {timm.__version__}, torch {torch.__version__}, "
        f"{torch.cuda.get_device_name()}, batch {words.batch_size}\n"
    )
    print(
        "| model | how | Phalanx, images/s | timm, images/s | ratio | 95 % interval |\n"
        "|---|---|---:|---:|---:|---|"
    )
    torch.backends.cudnn.benchmark = True
    build = {"device": "cuda", "memory_format": torch.channels_last}
    ours = build_model(MODELS[words.model], num_classes=1000).to(**build)
    theirs = timm.create_model(words.model).to(**build)
    race(ours, theirs, words, "eager")
    race(torch.compile(ours), torch.compile(theirs), words, "compiled")


if __name__ == "__main__":
    main()
