"""Why a ResNet-50 step takes longer than its kernels, and longer in turns than alone.

    python scripts/lab/step_gaps.py --out DIR [--variant small+rows] [--dtype float16]

Reads the tiles that resnet50_step.py left in DIR, prepares the baseline and the variant twice, and
prints what tells the possible causes apart: heat and power (replays after a pause and at a stretch,
with the clocks), changing graphs (in turns with the baseline, with another copy of itself, with
nothing), the first replays of a turn against the later ones, a graph of empty kernels, and the gaps
between kernels by neighbours. Everything is in DIR/step_gaps.json.
"""

import argparse
import json
import subprocess
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from resnet50_step import VARIANTS, Report, compile_variants, prepare
from step_kernels import launcher

FIELDS = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"
EMPTY = 600  # kernels of the empty graph: about as many as a step launches
Replay = Callable[[], object]


class Clocks:
    """What nvidia-smi says every 50 ms, with the time it was said."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, list[str]]] = []
        command = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
        try:
            self.process = subprocess.Popen(
                [*command, "-lms", "50"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        except OSError as problem:
            print("no clocks:", problem, flush=True)
            return
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        """Keep what comes."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.rows.append((time.perf_counter(), [part.strip() for part in line.split(",")]))

    def between(self, begin: float, end: float) -> dict[str, Any]:
        """Means over a stretch of time, and every reason to slow down that was given."""
        rows = [row for at, row in self.rows if begin <= at <= end and len(row) == 5]
        found: dict[str, Any] = {"samples": len(rows)}
        for place, name in enumerate(("sm_mhz", "mem_mhz", "watt", "celsius")):
            values = [float(row[place]) for row in rows if row[place].replace(".", "").isdigit()]
            if values:
                found[name] = round(mean(values))
        return {**found, "reasons": sorted({row[4] for row in rows})}

    def stop(self) -> None:
        """End nvidia-smi."""
        if hasattr(self, "process"):
            self.process.terminate()


def each_ms(replays: list[Replay]) -> list[float]:
    """Milliseconds of each of several replays that follow one another without a pause."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(replays) + 1)]
    marks[0].record()
    for replay, mark in zip(replays, marks[1:], strict=True):
        replay()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def in_turns(own: Replay, other: Replay | None, rounds: int = 7, each: int = 12) -> dict[str, Any]:
    """The variant's replays by their place in a turn, after as many of another graph."""
    turns = []
    for _ in range(rounds):
        if other is not None:
            each_ms([other] * each)
        turns.append(each_ms([own] * each))
    places = [round(median(turn[i] for turn in turns), 3) for i in range(each)]
    return {"ms": round(median(mean(turn[2:]) for turn in turns), 3), "by_place": places}


def empty_graph() -> Replay:
    """A graph of kernels that do next to nothing, each after the other."""
    x = torch.zeros(64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(EMPTY):
            x.add_(1)
    return graph.replay


def gaps(replay: Replay) -> dict[str, Any]:
    """Time without a kernel within one replay, by neighbours; profiled, so somewhat longer."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            replay()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    third = len(spans) // 3
    spans = spans[third : 2 * third]
    pairs: dict[str, list[float]] = {}
    idle, last = [], spans[0][1]
    for (_, _, before), (start, end, name) in pairwise(spans):
        idle.append(max(0.0, start - last))
        pairs.setdefault(f"{before[:40]} > {name[:40]}", []).append(idle[-1])
        last = max(last, end)
    worst = sorted(pairs.items(), key=lambda pair: -sum(pair[1]))[:16]
    edges = (0.5, 1, 1.5, 2, 3, 5, 1e9)
    counts, low = {}, -1.0
    for edge in edges:
        counts[f"to {edge:g} us"] = sum(low < gap <= edge for gap in idle)
        low = edge
    return {
        "kernels": len(spans), "span_ms": round((spans[-1][1] - spans[0][0]) / 1e3, 3),
        "busy_ms": round(sum(end - start for start, end, _ in spans) / 1e3, 3),
        "idle_ms": round(sum(idle) / 1e3, 3), "median_us": round(median(idle), 2),
        "counts": counts,
        "worst": {key: [len(values), round(sum(values), 1)] for key, values in worst},
    }  # fmt: skip


def measure(words: argparse.Namespace) -> None:
    """All phases."""
    report = Report(words.out, "gaps")
    report.path = words.out / "step_gaps.json"
    state = words.out / "resnet50_step_state.json"
    if state.exists():
        known = json.loads(state.read_text(encoding="utf-8"))
        launcher.tiles, launcher.options = known["tiles"], known["options"]
        launcher.banned = set(known["banned"])
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    dtype = getattr(torch, words.dtype)
    (variant,) = (v for v in VARIANTS if v.name == words.variant)
    compile_variants([VARIANTS[0], variant], dtype, words, report)
    launcher.mode = "tune"
    steps = [prepare(v, dtype, words) for v in (VARIANTS[0], variant, variant)]
    baseline, own, copy = (made["replay"] for _, made in steps)
    clocks, empty = Clocks(), empty_graph()

    def phase(name: str, run: Callable[[], Any], idle: float = 0.0) -> None:
        torch.cuda.synchronize()
        time.sleep(idle)
        begin = time.perf_counter()
        found = report.attempt(name, run)
        torch.cuda.synchronize()
        end = time.perf_counter()
        time.sleep(0.1)  # nvidia-smi is late
        report.add("phases", {"phase": name, "found": found, **clocks.between(begin, end)}, 700)

    def pause_between() -> list[float]:
        found = []
        for _ in range(12):
            time.sleep(0.05)
            found += each_ms([own])
        return [round(ms, 3) for ms in found]

    def stretch() -> list[float]:
        found = each_ms([own] * 160)
        return [round(mean(found[i : i + 10]), 3) for i in range(0, len(found), 10)]

    phase("10 after a pause of 3 s", lambda: [round(ms, 3) for ms in each_ms([own] * 10)], 3)
    phase("160 at a stretch, by tens", stretch)
    phase("10 after a pause of 3 s, again", lambda: [round(ms, 3) for ms in each_ms([own] * 10)], 3)
    phase("7 x 12 with nothing between", lambda: in_turns(own, None))
    phase("7 x 12 in turns with the baseline", lambda: in_turns(own, baseline))
    phase("7 x 12 in turns with a copy", lambda: in_turns(own, copy))
    phase("12, 50 ms apart", pause_between)
    phase("empty graph, us a kernel",
          lambda: [round(ms * 1e3 / EMPTY, 2) for ms in each_ms([empty] * 5)])  # fmt: skip
    for name, replay in ((words.variant, own), ("baseline", baseline)):
        found = report.attempt(f"gaps of {name}", gaps, replay)
        report.add("gaps", {"variant": name, **(found or {})}, 2600)
    clocks.stop()


def main() -> None:
    """One variant in one type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--variant", default="small+rows")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
