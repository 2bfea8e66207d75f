"""timm's EfficientNet-B0, compiled, with CUDA graphs: a step's images/s and its kernels.

    python scripts/lab/efficientnet_b0_peers.py --out DIR [--dtype float16] [--batch 256]

A process of its own, as torch.compile keeps its memory. Prints one JSON row, also kept in DIR.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

VENDORS = ("dgrad", "wgrad", "fprop", "depthwise", "nvjet", "gemm", "triton_red", "triton_per")
VENDORS += ("triton_poi", "multi_tensor", "cudnn", "conv2d")


def build_step(dtype: torch.dtype, batch: int, drop: float, mode: str | None) -> Callable[[], None]:
    """A training step: autocast, SGD by torch's fused kernel."""
    import timm

    torch.manual_seed(0)
    made = timm.create_model("efficientnet_b0", drop_rate=drop, drop_path_rate=drop)
    model = made.to("cuda", memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    x = torch.randn(batch, 3, 224, 224, device="cuda", dtype=dtype)
    x = x.to(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, (batch,), device="cuda")
    forward = torch.compile(model, mode=mode) if mode != "eager" else model

    def step() -> None:
        with torch.autocast("cuda", dtype):
            loss = F.cross_entropy(forward(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def time_rounds(step: Callable[[], None], rounds: int = 7, each: int = 12) -> list[float]:
    """Milliseconds of a step, one mean a round."""
    found = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(each):
            step()
        end.record()
        torch.cuda.synchronize()
        found.append(round(begin.elapsed_time(end) / each, 3))
    return found


def list_kernels(
    step: Callable[[], None], own: frozenset[str] = frozenset(), count: int = 3
) -> tuple[dict[str, Any], list[Any]]:
    """Milliseconds and launches a step by kind of kernel (`own` are kinds), and by kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    events = [e for e in profiler.key_averages() if e.device_time_total > 0]
    kinds: dict[str, list[float]] = {}
    for event in events:
        kind = event.key if event.key in own else None
        kind = kind or next((word for word in VENDORS if word in event.key), "other")
        row = kinds.setdefault(kind, [0.0, 0])
        row[0] += event.device_time_total / count / 1e3
        row[1] += event.count // count
    order = sorted(kinds.items(), key=lambda pair: -pair[1][0])
    every = [
        [round(e.device_time_total / count / 1e3, 4), e.count // count, e.key[:140]]
        for e in sorted(events, key=lambda e: -e.device_time_total)
    ]
    return {key: [round(ms, 3), int(n)] for key, (ms, n) in order}, every


def main() -> None:
    """Measure once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--drop", type=float, default=0.0)
    parser.add_argument("--mode", default="reduce-overhead")
    words = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    begin = time.perf_counter()
    step = build_step(getattr(torch, words.dtype), words.batch, words.drop, words.mode)
    for _ in range(8):
        step()
    torch.cuda.synchronize()
    row: dict[str, Any] = {"peer": words.mode, "dtype": words.dtype, "batch": words.batch}
    row |= {"drop": words.drop, "start_s": round(time.perf_counter() - begin)}
    row["all_ms"] = time_rounds(step)
    middle = sorted(row["all_ms"])[3]
    row |= {"ms": middle, "images_per_s": round(words.batch / middle * 1e3)}
    row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    row["kinds"], every = list_kernels(step)
    print(json.dumps(row), flush=True)
    for kernel in every[:12]:
        print(*kernel, flush=True)
    name = f"peer_{words.mode}_{words.dtype}.json"
    (words.out / name).write_text(json.dumps({**row, "every": every}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
