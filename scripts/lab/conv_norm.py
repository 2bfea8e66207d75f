"""Does a 3x3 convolution pay that takes in the norm and ReLU before it?

    python scripts/lab/conv_norm.py [--out DIR] [--seconds 100] [--dtype float16]

At the four shapes of ResNet-50's 3x3 convolutions of stride 1 (batch 256), times what a step does
today (normalise + ReLU, cuDNN's convolution, statistics of its result: three kernels) and one
Triton kernel in their place, an implicit product over nine shifted views of the raw input:

    plain       the convolution alone: is Triton's as fast as cuDNN's?
    norm        with norm and ReLU on the load, in float32 or in the input's 16 bits
    whole       norm, the normalised input kept for cuDNN's weight gradient, statistics

Each is checked against torch in float64 at a small size first, and against cuDNN at its full one.
Results are printed as they come and written to DIR/conv_norm.json; no shape begins after --seconds.
TRITON_INTERPRET=1 with --device cpu checks the small size without a GPU.
"""
# ruff: noqa: PLR0913, PLR0917  (kernels take pointers and sizes one by one)

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from resnet50_step import Report, compile_now, copy_rate, error, random_image, rounded
from step_kernels import (
    apply_norm,
    device_ms,
    flat,
    floats,
    launcher,
    make_tiles,
    narrow_tiles,
    norm_statistics,
)
from torch import Tensor

IN_FLOAT, IN_HALF = 1, 2  # NORM
WAYS: dict[str, dict[str, int]] = {
    "plain": {"NORM": 0, "KEEP": 0, "SUMS": 0},
    "norm": {"NORM": IN_FLOAT, "KEEP": 0, "SUMS": 0},
    "norm in 16 bits": {"NORM": IN_HALF, "KEEP": 0, "SUMS": 0},
    "whole": {"NORM": IN_FLOAT, "KEEP": 1, "SUMS": 1},
    "whole in 16 bits": {"NORM": IN_HALF, "KEEP": 1, "SUMS": 1},
}
SHAPES = ((56, 64, 3), (28, 128, 3), (14, 256, 5), (7, 512, 2))  # pixels, channels, how many
TILES = make_tiles(
    "BM BN BK",
    *((128, 64, 64, 4, 3), (128, 64, 64, 4, 4), (256, 64, 64, 8, 3), (128, 128, 64, 8, 3)),
    *((128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3)),
)
BATCH = 256


def name_conv(info: Any) -> str:
    """Tells the ways apart in a profile."""
    return "conv_" + "_".join(f"{key.lower()}{info.constants[key]}" for key in ("NORM", "KEEP"))


@triton.jit(repr=name_conv, do_not_specialize=["H", "W"])
def convolve(
    x, w, out, v, kept, s, M, H, W,
    C: tl.constexpr, N: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr, SUMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [M, N] = the 3x3 convolution of x [M, C] with w [N, 3, 3, C], padded by one.

    NORM: of max(x * scale + shift, 0) with the forward vectors v, 2 in x's own type. KEEP writes
    what the centre of the window reads. SUMS writes partial sums of the result and its squares.
    """
    blocks: tl.constexpr = N // BN
    steps: tl.constexpr = C // BK
    row, column = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    m, n = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    h, wide, inside = (m // W) % H, m % W, (m < M)[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(0, 9 * steps):
        tap, k = step // steps, (step % steps) * BK + tl.arange(0, BK)
        down, right = tap // 3 - 1, tap % 3 - 1
        ok = (h + down >= 0) & (h + down < H) & (wide + right >= 0) & (wide + right < W)
        ok = ok[:, None] & inside
        place = (m + down * W + right)[:, None] * C + k[None, :]
        rows = tl.load(x + place, mask=ok, other=0.0)
        if NORM == 1:
            value = rows.to(tl.float32) * tl.load(v + 2 * C + k)[None, :]
            value = tl.maximum(value + tl.load(v + 3 * C + k)[None, :], 0.0)
            rows = tl.where(ok, value, 0.0).to(x.dtype.element_ty)
        if NORM == 2:
            value = rows * tl.load(v + 2 * C + k).to(rows.dtype)[None, :]
            value = tl.maximum(value + tl.load(v + 3 * C + k).to(rows.dtype)[None, :], 0.0)
            rows = tl.where(ok, value, 0.0).to(rows.dtype)
        if KEEP:
            own = inside & (tap == 4) & (column == 0)
            tl.store(kept + m[:, None] * C + k[None, :], rows, mask=own)
        columns = tl.load(w + n[:, None] * (9 * C) + (tap * C + k)[None, :])
        acc = tl.dot(rows, tl.trans(columns), acc)
    tl.store(out + m[:, None] * N + n[None, :], acc.to(out.dtype.element_ty), mask=inside)
    if SUMS:
        acc = tl.where(inside, acc, 0.0)
        tl.store(s + row * N + n, tl.sum(acc, 0))
        tl.store(s + tl.cdiv(M, BM) * N + row * N + n, tl.sum(acc * acc, 0))


class Case:
    """One shape's tensors and the ways to convolve them."""

    def __init__(self, batch: int, size: int, channels: int, device: str, dtype: torch.dtype):
        torch.manual_seed(size)
        self.x = random_image(batch, channels, size, device, dtype)
        weight = torch.randn(channels, channels, 3, 3, device=device) / (9 * channels) ** 0.5
        self.weight = weight.to(dtype).contiguous(memory_format=torch.channels_last)
        self.v = torch.rand(4, channels, device=device) + 0.5
        self.v[3] -= 1
        self.kept, self.out = torch.empty_like(self.x), torch.empty_like(self.x)
        self.rows = self.x.numel() // channels
        self.s = floats(2 * triton.cdiv(self.rows, 128) * channels, like=self.x)

    def joined(self, flags: dict[str, int]) -> int:
        """One kernel; returns how many rows of partial sums it wrote."""
        channels, (high, wide) = self.x.shape[1], self.x.shape[2:]
        args = (self.x, self.weight, self.out, self.v, self.kept, self.s, self.rows, high, wide)
        used = launcher.run(
            convolve,
            lambda t: (triton.cdiv(self.rows, t["BM"]) * (channels // t["BN"]),),
            args,
            narrow_tiles(TILES, BN=channels),
            **{"C": channels, "N": channels, **flags},
        )
        return triton.cdiv(self.rows, used["BM"])

    def normalise(self) -> Tensor:
        """The normalised input by the step's own kernel."""
        return apply_norm(self.x, self.v, 0)

    def library(self, x: Tensor) -> Tensor:
        """The library's convolution."""
        return F.conv2d(x, self.weight, padding=1)

    def sums(self, x: Tensor) -> None:
        """The step's own kernel for statistics, without the small one that finishes them."""
        channels, groups = x.shape[1], min(1056 * 64 // x.shape[1], triton.cdiv(self.rows, 128))
        s = floats(2, groups, channels, like=x)
        tiles = make_tiles("BM BC", (32, 64, 4, 3), (16, 64, 4, 3))
        grid: Any = lambda t: (channels // t["BC"], groups)  # noqa: E731
        launcher.run(norm_statistics, grid, (x, s, self.rows, channels, groups), tiles)

    def apart(self) -> None:
        """What a step does today."""
        self.sums(self.library(self.normalise()))

    def errors(self, flags: dict[str, int], wanted: Tensor, kept: Tensor) -> dict[str, float]:
        """Errors of one way's results; they are poisoned first, so that all must be written."""
        for tensor in (self.out, self.kept, self.s):
            tensor.fill_(float("nan"))
        count, channels = self.joined(flags), self.x.shape[1]
        found = {"result": error(self.out, wanted)}
        if flags["KEEP"]:
            found["kept"] = error(self.kept, kept)
        if flags["SUMS"]:
            sums = self.s[: 2 * count * channels].view(2, count, channels).double().sum(1)
            rows = flat(wanted).double()
            found["sums"] = max(error(sums[0], rows.sum(0)), error(sums[1], (rows**2).sum(0)))
        return rounded(found)


def check_small(words: argparse.Namespace, dtype: torch.dtype, report: Report) -> None:
    """Every way and tile against float64."""
    case = Case(3, 9, 128, words.device, dtype)
    value = case.x.double() * case.v[2].double()[:, None, None]
    kept = (value + case.v[3].double()[:, None, None]).relu()
    weight = case.weight.double()
    for name, flags in WAYS.items():
        wanted = F.conv2d(kept if flags["NORM"] else case.x.double(), weight, padding=1)
        worst: dict[str, float] = {}
        for tile in narrow_tiles(TILES, BN=128)[: 1 if words.device == "cpu" else None]:
            launcher.forced = {"convolve": tile}
            found = report.attempt(f"check {name} {tile}", case.errors, flags, wanted, kept)
            found = found or {"result": float("inf")}
            bad = [key for key, value in found.items() if not value < 5e-3]
            if bad and launcher.mode != "record":
                print(f"WRONG {name} {tile}: {found}", flush=True)
            worst = {key: max(worst.get(key, 0.0), value) for key, value in found.items()}
        if launcher.mode != "record":
            report.add("check", {"way": name, **worst})
    launcher.forced = {}


def measure_shape(size: int, channels: int, dtype: torch.dtype, report: Report) -> None:
    """One shape: times of today's kernels and of every way, with errors against cuDNN's."""
    case = Case(BATCH, size, channels, "cuda", dtype)
    flops = 2 * case.rows * 9 * channels**2
    a1 = case.normalise()
    b, plain = case.library(a1), case.library(case.x)
    today = {
        "normalise": device_ms(case.normalise),
        "cuDNN": device_ms(lambda: case.library(a1)),
        "statistics": device_ms(lambda: case.sums(b)),
        "apart": device_ms(case.apart),
    }
    row: dict[str, Any] = {"pixels": size, "channels": channels, "dtype": str(dtype)}
    row |= {key: round(ms, 4) for key, ms in today.items()}
    report.add("today", {**row, "cuDNN TFLOP/s": round(flops / today["cuDNN"] / 1e9)})
    for name, flags in WAYS.items():
        ms = report.attempt(f"{size} {name}", device_ms, lambda flags=flags: case.joined(flags))
        if ms is None:
            continue
        found = case.errors(flags, b if flags["NORM"] else plain, a1)
        against = today["apart"] if flags["SUMS"] else today["cuDNN"]
        against += today["normalise"] if flags["NORM"] and not flags["SUMS"] else 0
        row = {"pixels": size, "way": name, "ms": round(ms, 4), "against": round(against, 4)}
        row |= {"ratio": round(ms / against, 2), "TFLOP/s": round(flops / ms / 1e9)}
        used = launcher.timings[-1]["tile"] if launcher.timings else {}
        report.add("ways", {**row, **found, "tile": list(used.values())[1:]})


def summarise(report: Report) -> None:
    """The table that answers the question, last."""
    counts = {size: count for size, _, count in SHAPES}
    for name in WAYS:
        rows = [row for row in report.data.get("ways", ()) if row["way"] == name]
        own = sum(counts[row["pixels"]] * row["ms"] for row in rows)
        now = sum(counts[row["pixels"]] * row["against"] for row in rows)
        best = sum(counts[row["pixels"]] * min(row["ms"], row["against"]) for row in rows)
        times = ", ".join(f"{row['pixels']} px {row['ms']} for {row['against']}" for row in rows)
        print(f"{name:<18}{times}; network {own:.2f} for {now:.2f} ms, the better {best:.2f}")


def main() -> None:
    """Checks, then every shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    parser.add_argument("--seconds", type=float, default=100)
    words = parser.parse_args()
    words.out.mkdir(parents=True, exist_ok=True)
    report = Report(words.out, "conv")
    report.path = words.out / "conv_norm.json"
    dtype = getattr(torch, words.dtype)
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    if words.device == "cuda":
        launcher.mode = "record"
        check_small(words, dtype, report)
        for size, channels, _ in SHAPES:
            case = Case(16, size, channels, "cuda", dtype)
            for flags in WAYS.values():
                case.joined(flags)
        compile_now("convolutions")
    launcher.mode = "tune" if words.device == "cuda" else "first"
    check_small(words, dtype, report)
    if words.device != "cuda":
        return
    report.add("device", {"copy_tb_per_s": report.attempt("copy", copy_rate)})
    for size, channels, _ in SHAPES:
        if time.perf_counter() - report.begin > words.seconds:
            print(f"no time for {size} px", flush=True)
            continue
        report.attempt(f"{size} px", measure_shape, size, channels, dtype, report)
    summarise(report)


if __name__ == "__main__":
    main()
