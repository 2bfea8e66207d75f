"""Forward and backward of a whole model with fused units, as one CUDA graph.

    python scripts/measure_fused_step.py MODEL ... [--half float16 ...] [--batch 256] [--out DIR]

Synthetic images on the device, channels_last. Prints a JSON line for each: milliseconds (median
of seven rounds of twelve replays, with the range), images/s, peak memory of a pass, and what the
first pass cost: kernels compiled, and the time to compile and to measure. With --out, writes the
kernels of a replay and what was measured of each choice. --plain leaves the units to their modules,
and measures memory alone.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.catalog.models import MODELS
from phalanx.fused.enable import fuse_units
from phalanx.fused.half_copies import attach_copies
from phalanx.kernels.choices import CHOICES
from phalanx.models.build import build_model, initialise
from phalanx.models.units import UnitModel

ROUNDS, REPLAYS = 7, 12


class Pass:
    """A model's forward and backward pass over one batch."""

    def __init__(self, name: str, half: str, words: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.half = getattr(torch, half)
        shape = (words.batch, 3, words.size, words.size)
        x = torch.randn(shape, device="cuda", dtype=self.half)
        self.x = x.contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(0, 1000, (words.batch,), device="cuda")
        with torch.device("cuda"):
            model = build_model(MODELS[name], num_classes=1000)
        assert isinstance(model, UnitModel)
        initialise(model, 0, zero_residual=True)
        self.model = model.to(memory_format=torch.channels_last).train()
        self.left = {} if words.plain else fuse_units(model, self.half)
        attach_copies(model.modules(), self.half)
        self.scale = 1024.0 if self.half == torch.float16 else 1.0

    def __call__(self) -> Tensor:
        """The loss; gradients are left in the model."""
        for weight in self.model.parameters():
            weight.grad = None
        with torch.autocast("cuda", self.half):
            loss = F.cross_entropy(self.model(self.x).float(), self.labels)
        (loss * self.scale).backward()
        return loss.detach()

    def capture(self) -> Callable[[], None]:
        """The pass as a graph; gives its replay."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self()
        return graph.replay


def time_ms(run: Callable[[], object], repeats: int) -> float:
    """Milliseconds of one run on the device."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def measure(name: str, half: str, words: argparse.Namespace) -> dict[str, Any]:
    """The figures of one model."""
    one = Pass(name, half, words)
    row: dict[str, Any] = {"model": name, "half": half, "plain": words.plain}
    row["left to modules"] = one.left
    begin = time.perf_counter()
    row["compiled"] = CHOICES.compile_all(one)
    torch.cuda.synchronize()
    row["compile_s"] = round(time.perf_counter() - begin, 1)
    begin = time.perf_counter()
    one()
    torch.cuda.synchronize()
    row["measure_s"] = round(time.perf_counter() - begin, 1)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    row["loss"] = round(float(one()), 4)
    row["peak_gib"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)
    if words.plain:
        return row
    replay = one.capture()
    times = [time_ms(replay, REPLAYS) for _ in range(ROUNDS)]
    middle = median(times)
    row |= {"ms": round(middle, 3), "range_ms": [round(min(times), 3), round(max(times), 3)]}
    row["images_per_s"] = round(words.batch / middle * 1e3)
    if words.out:
        found = {"row": row, "kernels": profile(replay), "known": CHOICES.known}
        found["timings"] = CHOICES.timings
        (words.out / f"{name}_{half}.json").write_text(
            json.dumps(found, indent=1), encoding="utf-8"
        )
    return row


def profile(replay: Callable[[], None]) -> list[Any]:
    """Milliseconds, launches and names of a replay's kernels, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            replay()
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.device_time_total > 0]
    events.sort(key=lambda event: -event.device_time_total)
    return [[round(e.device_time_total / 3e3, 4), e.count // 3, e.key[:140]] for e in events]


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", choices=MODELS)
    parser.add_argument("--half", nargs="+", default=["float16"], choices=["float16", "bfloat16"])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plain", action="store_true")
    words = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    for name in words.models:
        for half in words.half:
            gc.collect()
            torch.cuda.empty_cache()
            print(json.dumps(measure(name, half, words)), flush=True)


if __name__ == "__main__":
    main()
