"""Time a model's forward and backward pass with its units fused, against its plain modules.

python scripts/time_passes.py [MODEL ...] [--batch 256] [--half float16] [--norm batch] [--rounds 5]

Both in a CUDA graph of their own, with synthetic images on the device, in turns. Prints the median
and the range of images/s, and which units were left to their modules.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import Norm
from phalanx.fused.enable import fuse_units
from phalanx.fused.half_copies import cast_before_passes
from phalanx.kernels.choices import CHOICES
from phalanx.models.build import build_model, initialise
from phalanx.models.units import UnitModel

REPLAYS = 5


def build(name: str, norm: str) -> tuple[UnitModel, int]:
    """A model of the catalog, ready to train, and its image size."""
    variant = MODELS[name]
    variant = replace(variant, norm=Norm(type=norm, groups=32))
    model = build_model(variant, num_classes=variant.classes)
    initialise(model, 0, zero_residual=False)
    assert isinstance(model, UnitModel)
    model = model.to("cuda", memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    return model, variant.image_size


def make_pass(
    model: UnitModel, x: Tensor, labels: Tensor, half: torch.dtype, *, fused: bool
) -> Callable[[], None]:
    """One pass both ways."""
    if fused:
        cast_before_passes(model, half)

    def run() -> None:
        with torch.autocast("cuda", half):
            loss = F.cross_entropy(model(x).float(), labels)
        (loss * 128).backward()

    return run


def capture(model: UnitModel, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of one pass."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            run()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def measure(name: str, words: argparse.Namespace) -> None:
    """Print the rates of one model."""
    half, graphs, peaks = getattr(torch, words.half), {}, {}
    for way in ("fused", "plain"):
        model, size = build(name, words.norm)
        x = torch.randn(words.batch, 3, size, size, device="cuda")
        x = x.contiguous(memory_format=torch.channels_last)
        labels = torch.randint(0, 10, (words.batch,), device="cuda")
        begin = time.monotonic()
        if way == "fused":
            print(f"{name}: left alone: {fuse_units(model, half)}", flush=True)
        run = make_pass(model, x, labels, half, fused=way == "fused")
        if way == "fused":
            kernels = CHOICES.compile_all(run)
            print(f"{kernels} kernels compiled in {time.monotonic() - begin:.1f} s", flush=True)
        torch.cuda.reset_peak_memory_stats()
        graphs[way] = capture(model, run), model, x
        peaks[way] = torch.cuda.max_memory_allocated() / 2**30
        print(f"{way}: ready after {time.monotonic() - begin:.1f} s", flush=True)
    rates: dict[str, list[float]] = {way: [] for way in graphs}
    for _ in range(words.rounds):
        for way, (graph, *_) in graphs.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(REPLAYS):
                graph.replay()
            torch.cuda.synchronize()
            rates[way].append(words.batch * REPLAYS / (time.perf_counter() - begin))
    for way, found in rates.items():
        ms, spread = words.batch / median(found) * 1e3, f"{min(found):,.0f} to {max(found):,.0f}"
        rate = f"{median(found):,.0f} images/s ({spread}, n={len(found)}), {ms:.2f} ms"
        print(f"{name} {words.norm} {words.half} {way}: {rate}, {peaks[way]:.1f} GiB", flush=True)


def profile(name: str, words: argparse.Namespace) -> None:
    """Print the kernels of a fused pass."""
    half = getattr(torch, words.half)
    model, size = build(name, words.norm)
    x = torch.randn(words.batch, 3, size, size, device="cuda")
    x = x.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (words.batch,), device="cuda")
    fuse_units(model, half)
    run = make_pass(model, x, labels, half, fused=True)
    graph = capture(model, run)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda row: -row.device_time_total)
    for row in rows[:40]:
        ms = row.device_time_total / REPLAYS / 1e3
        print(f"{ms:8.3f} ms {row.count // REPLAYS:5d} x {row.key[:100]}")


def main() -> None:
    """Measure every model that was named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=["resnet50", "resnet18"])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--half", default="float16")
    parser.add_argument("--norm", default="batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    words = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    for name in words.models:
        (profile if words.profile else measure)(name, words)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
