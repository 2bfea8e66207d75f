"""How fast models score, as CUDA graphs.

    python scripts/measure_inference.py [MODEL:BATCH ...]

For every model and batch size: images/s of the folded model (five rounds: median, range), with
--plain the same of its own modules under autocast, and how far both are from float64.
--compile compiles the kernels and stops. --profile adds the kernels of one replay by time.
"""

import argparse
import json
import time
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.catalog.models import MODELS
from phalanx.inference.folded_model import FoldedModel, fold_model
from phalanx.kernels.choices import CHOICES
from phalanx.models.build import build_model, initialise_weights

_ROUNDS = 5


@torch.no_grad()
def make_model(name: str, images: Tensor) -> nn.Module:
    """A model whose norms have the images' statistics."""
    model = build_model(MODELS[name], num_classes=1000)
    initialise_weights(model, 0, zero_residual=False)
    model = model.to("cuda", memory_format=torch.channels_last)  # type: ignore[call-overload]
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    kept = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    with torch.autocast("cuda", torch.float16):
        model.train()(images[:32])
    for norm, momentum in zip(norms, kept, strict=True):
        norm.momentum = momentum
    return model.eval()


def time_rounds(run: Any, seconds: float) -> list[float]:
    """Milliseconds of one run, for each of several rounds."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    count = max(10, min(400, int(seconds * 1e3 / max(begin.elapsed_time(end), 0.01))))
    found = []
    for _ in range(_ROUNDS):
        begin.record()
        for _ in range(count):
            run()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / count)
    return found


def describe(rounds: list[float], batch: int) -> dict[str, Any]:
    """Median and range, as images/s and milliseconds."""
    rates = sorted(batch / ms * 1e3 for ms in rounds)
    return {
        "ms": round(median(rounds), 4),
        "images/s": round(median(rates)),
        "range": [round(rates[0]), round(rates[-1])],
    }


def difference(found: Tensor, wanted: Tensor) -> float:
    """The relative error."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def measure(name: str, batch: int, words: argparse.Namespace) -> dict[str, Any]:
    """One model at one batch size."""
    half, size = getattr(torch, words.dtype), words.size or MODELS[name].image_size
    torch.manual_seed(0)
    images = torch.randn(max(batch, 32), 3, size, size, device="cuda")
    images = images.contiguous(memory_format=torch.channels_last)
    model = make_model(name, images)
    x = images[:batch].contiguous(memory_format=torch.channels_last)
    folded = fold_model(model, half)
    assert folded is not None
    row: dict[str, Any] = {"model": name, "batch": batch, "dtype": words.dtype, "size": size}
    row["plain units"] = folded.unfolded_units
    began = time.perf_counter()
    with torch.inference_mode():
        if words.compile:
            row["compiled"] = CHOICES.compile_all(lambda: folded._run(x))
            row["seconds"] = round(time.perf_counter() - began, 1)
            return row
        return row | _measure_speed(model, folded, x, words)


def _measure_speed(
    model: nn.Module, folded: FoldedModel, x: Tensor, words: argparse.Namespace
) -> dict[str, Any]:
    began, row = time.perf_counter(), {}
    batch = len(x)
    folded(x)
    torch.cuda.synchronize()
    row["ready after s"] = round(time.perf_counter() - began, 1)
    torch.cuda.reset_peak_memory_stats()
    row |= describe(time_rounds(lambda: folded(x), words.seconds), batch)
    graph = next(g for g in reversed(folded._graphs.values()) if g is not None).graph
    row["graph alone"] = describe(time_rounds(graph.replay, words.seconds), batch)
    if words.profile:
        row["kernels"] = profile(lambda: folded(x))
    found = folded(x[:8] if batch > 8 else x)
    with torch.autocast("cuda", getattr(torch, words.dtype)):
        plain = model(x[:8])
        if words.plain:
            row["modules"] = describe(time_rounds(lambda: model(x), words.seconds / 2), batch)
    exact = model.double()(x[:8].double())
    model.float()
    row["error"] = [float(f"{difference(y, exact):.3g}") for y in (found, plain)]
    return row


def profile(run: Any) -> list[list[Any]]:
    """Kernels by microseconds: [microseconds, launches, name]."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    rows = [
        [round(e.device_time_total / 3, 1), e.count // 3, e.key[:90]] for e in found.key_averages()
    ]
    return sorted(rows, reverse=True)[:40]


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", default=["resnet50:256", "resnet50:1"])
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--size", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.4, help="of one round")
    for flag in ("--compile", "--plain", "--profile"):
        parser.add_argument(flag, action="store_true")
    words = parser.parse_args()
    for job in words.jobs:
        name, batch = job.split(":")
        try:
            print(json.dumps(measure(name, int(batch), words)), flush=True)
        except Exception as failure:  # noqa: BLE001 - the rest is measured all the same
            print(json.dumps({"job": job, "failed": repr(failure)[:600]}), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
