"""Times forward and backward of a model in one CUDA graph: fused units, and plain modules.

    python scripts/time_passes.py resnet50:224:256:float16 [--norm group]

Prints a line of JSON for each result: seconds to compile and to choose kernels; the difference of
the first gradients, as one vector, from those of plain modules; milliseconds of forward and
backward (median, fastest and slowest of alternating rounds), images/s, peak memory, and the
kernels' time. No update is included. With --compile-only nothing is timed.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import Norm
from phalanx.fused.enable import fuse_units
from phalanx.fused.half_copies import cast_before_passes
from phalanx.kernels.choices import CHOICES
from phalanx.models.build import build_model
from phalanx.models.units import UnitModel

Pass = Callable[[], Tensor]
STARTED = time.perf_counter()


def say(**row: Any) -> None:
    """Print a row, with the seconds since the start."""
    row["at_s"] = round(time.perf_counter() - STARTED, 1)
    print(json.dumps(row), flush=True)


def build(name: str, *, norm: str | None, fused: bool, half: torch.dtype) -> UnitModel:
    """A model on the device."""
    torch.manual_seed(0)
    variant = replace(MODELS[name], norm=Norm(type=norm, groups=32)) if norm else MODELS[name]
    model = build_model(variant, num_classes=1000).cuda()
    model.to(memory_format=torch.channels_last).train()
    if fused:
        say(model=name, not_fused=fuse_units(model, half))
        cast_before_passes(model, half)
    return model


def make_pass(model: UnitModel, images: Tensor, half: torch.dtype) -> Pass:
    """Forward and backward with fixed noise; gradients stay in place."""
    batch = len(images)
    labels = torch.arange(batch, device="cuda") % 1000
    torch.manual_seed(1)
    noise = {
        path: torch.rand(batch, size, device="cuda") for path, size in model.noise_sizes.items()
    }
    scale = 1024.0 if half == torch.float16 else 1.0

    def run() -> Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        with torch.autocast("cuda", dtype=half):
            logits = model(images, noise) if noise else model(images)
        loss = F.cross_entropy(logits.float(), labels)
        (loss * scale).backward()
        return loss

    return run


def join_gradients(model: UnitModel) -> Tensor:
    """All gradients as one vector."""
    return torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])


def capture(run: Pass) -> torch.cuda.CUDAGraph:
    """A graph of the pass."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def time_in_turns(graphs: dict[str, torch.cuda.CUDAGraph], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each graph in each round of ten replays."""
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            for _ in range(10):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            found[name].append(begin.elapsed_time(end) / 10)
    return found


def profile(graph: torch.cuda.CUDAGraph) -> dict[str, float]:
    """Milliseconds of one replay by kernel, the longest first."""
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for event in profiler.events():
        times[event.name[:60]] += event.device_time / 1000
    return {name: round(value, 3) for name, value in times.most_common(30)}


def measure(case: str, args: argparse.Namespace) -> None:
    """One model at one size."""
    name, size, batch, dtype = case.split(":")
    half = getattr(torch, dtype)
    images = torch.randn(int(batch), 3, int(size), int(size), device="cuda", dtype=half)
    images = images.contiguous(memory_format=torch.channels_last)
    model = build(name, norm=args.norm, fused=True, half=half)
    run = make_pass(model, images, half)
    began = time.perf_counter()
    count = CHOICES.compile_all(run)
    say(case=case, kernels=count, compile_s=round(time.perf_counter() - began, 1))
    if args.compile_only:
        return
    began = time.perf_counter()
    loss = run().item()
    say(case=case, loss=loss, choose_s=round(time.perf_counter() - began, 1))
    own = join_gradients(model)
    graphs, peaks, kept = {}, {}, []  # kept: a graph uses the memory that its pass holds
    for kind in ("fused",) if args.no_plain else ("fused", "plain"):
        if kind == "plain":
            model = build(name, norm=args.norm, fused=False, half=half)
            run = make_pass(model, images, half)
            loss = run().item()
            plain = join_gradients(model)
            say(case=case, plain_loss=loss, difference=float((own - plain).norm() / plain.norm()))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        graphs[kind] = capture(run)
        kept.append(run)
        peaks[kind] = (torch.cuda.max_memory_allocated() - before) / 2**30
    for kind, times in time_in_turns(graphs, args.rounds).items():
        middle = statistics.median(times)
        say(
            case=case, kind=kind, ms=round(middle, 3), images_s=round(int(batch) / middle * 1000),
            range_ms=[round(min(times), 3), round(max(times), 3)], peak_gib=round(peaks[kind], 2),
        )  # fmt: skip
    if args.profile:
        say(case=case, kernels_ms=profile(graphs["fused"]))
        say(case=case, ways=CHOICES.chosen_names)
    if args.choices:
        with open(args.choices, "a", encoding="utf-8") as file:
            file.write(json.dumps({"case": case, "timings": CHOICES.timings}) + "\n")


def main() -> None:
    """Measure every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+", help="model:size:batch:type")
    parser.add_argument("--norm", choices=("batch", "group"), help="instead of the model's own")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--no-plain", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--choices", help="a file to append all timings of kernels to")
    args = parser.parse_args()
    for case in args.cases:
        try:
            measure(case, args)
        except Exception as failure:  # noqa: BLE001 - the other cases shall run
            say(case=case, failed=repr(failure)[:2000])
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
