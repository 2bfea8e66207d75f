"""A whole EfficientNet-B0 training step in one CUDA graph, in several variants.

    python scripts/lab/efficientnet_b0_step.py --out DIR [--parts check,depthwise,peer,measure]
        [--dtypes float16,bfloat16] [--batches 256,512] [--variants plain,norms,depthwise,expand]
        [--tiles tiles.json] [--seconds 400]

check compares kernels and network with float64, depthwise sets cuDNN's depthwise convolutions
beside the own ones, peer measures timm's compiled module in a process of its own, measure times the
variants in turns and lists their kernels with the floors of their bytes. A step is noise, forward,
backward and RMSprop with momentum with the 16-bit copy of the weights; images are synthetic and on
the device.
Everything is printed and kept in DIR/efficientnet_b0_step.json; DIR/tiles.json has what
was tuned, for --tiles of a later run. LAB_SIGMOID=tanh takes the cheaper sigmoid. The first batch
size is tuned; further ones, for the last variant only, take over its tiles.

    TRITON_INTERPRET=1 python scripts/lab/efficientnet_b0_step.py --device cpu

checks all kernels and a small network on a CPU.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import depthwise_bench
import depthwise_kernels
import efficientnet_b0_checks
import mbconv_kernels
import mbconv_ops as ops
import mbconv_products
import torch
from efficientnet_b0_network import VARIANTS, Network, Variant
from efficientnet_b0_peers import list_kernels
from efficientnet_b0_plain import compare_network, flat, plain_loss, relative
from efficientnet_b0_weights import SMALL, STAGES
from resnet50_step import Report, copy_rate
from step_kernels import count_bytes, launcher, time_ms

ROUNDS, REPLAYS, THREADS = 7, 12, 16
OWN = frozenset(
    name
    for module in (mbconv_kernels, mbconv_products, depthwise_kernels)
    for name, value in vars(module).items()
    if hasattr(value, "arg_names")
)
PLAIN = Variant("plain")


class Step:
    """One variant's step over one batch, eager and as a graph."""

    def __init__(self, variant: Variant, dtype: torch.dtype, batch: int, size: int = 224):
        torch.manual_seed(0)
        self.image = torch.randn(batch, size, size, 3, device="cuda").to(dtype)
        self.labels = torch.randint(0, 1000, (batch,), device="cuda")
        self.net = Network(variant, dtype, batch)
        self.loss = torch.zeros((), device="cuda")
        self.leaf = {}
        for name, value in self.net.weights.half.items():
            source = self.net.weights.master[name] if value.ndim == 1 else value
            self.leaf[name] = source.detach().requires_grad_()

    def gradients(self) -> None:
        """Loss and gradients; by autograd for the plain variant."""
        net = self.net
        if net.variant is not PLAIN:
            self.loss.copy_(net.gradients(self.image, self.labels))
            return
        loss = plain_loss(net, self.leaf, self.image, self.labels)
        grads = torch.autograd.grad(loss * net.scale, list(self.leaf.values()))
        torch._foreach_copy_([net.weights.grad[name] for name in self.leaf], list(grads))
        self.loss.copy_(loss.detach())

    def __call__(self) -> None:
        """A step."""
        self.net.draw()
        self.gradients()
        self.net.update()

    def capture(self) -> Callable[[], None]:
        """The step as a graph; returns its replay."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self()
        return graph.replay


def chosen(words: argparse.Namespace) -> list[Variant]:
    """The variants asked for."""
    return [v for v in (PLAIN, *VARIANTS) if v.name in words.variants.split(",")]


def compile_all(words: argparse.Namespace, report: Report) -> None:
    """Compile every kernel the parts will ask for, in parallel."""
    begin = time.perf_counter()
    dtypes = [getattr(torch, name) for name in words.dtypes.split(",")]
    for dtype in dtypes:
        if "check" in words.parts:
            launcher.mode = "record first"
            report.attempt("record checks", lambda d=dtype: check(d, words, None))
        launcher.mode = "record"
        for variant in [v for v in chosen(words) if v is not PLAIN]:
            run = lambda v=variant, d=dtype: Step(v, d, words.batch)()  # noqa: E731
            report.attempt(f"record {variant.name}", run)
            gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    count, failed = launcher.compile_recorded(THREADS)
    print(f"compiled {count} in {time.perf_counter() - begin:.0f} s", flush=True)
    for line in failed:
        print("compile failed:", line, flush=True)


def check(dtype: torch.dtype, words: argparse.Namespace, report: Report | None) -> None:
    """Kernels and network against float64; without a report only run."""
    for row in efficientnet_b0_checks.run_checks(words.device, dtype):
        if report:
            report.add("checks", {"dtype": str(dtype), **row})
    if words.device == "cuda":
        for shape in depthwise_bench.SHAPES:
            row = depthwise_bench.check(*shape[:4], dtype)
            if report:
                short = {key: float(f"{value:.1e}") for key, value in row.items()}
                report.add("checks", {"depthwise": shape[:4], "dtype": str(dtype), **short})
    small = words.device == "cpu"
    if small:
        ops.BLOCKS_OF_EXPANSION.update({48: (32, 16), 72: (64, 16)})
    batch, side = (3, 24) if small else (32, 128)
    torch.manual_seed(1)
    image = torch.randn(batch, side, side, 3, device=words.device).to(dtype)
    labels = torch.randint(0, 10, (batch,), device=words.device)
    for variant in VARIANTS:
        sizes = (SMALL, 10, 64) if small else (STAGES, 1000, 1280)
        net = Network(variant, dtype, batch, words.device, *sizes)
        row = compare_network(net, image, labels)
        if report:
            report.add("network", {"variant": variant.name, "dtype": str(dtype), **row}, 600)


def measure_peer(words: argparse.Namespace, dtype: str) -> None:
    """timm's module, compiled, by another process."""
    script = Path(__file__).with_name("efficientnet_b0_peers.py")
    command = [sys.executable, str(script), "--out", str(words.out), "--dtype", dtype]
    subprocess.run([*command, "--batch", str(words.batch)], check=False)


def count_floors(step: Step) -> dict[str, float]:
    """Bytes that the own kernels of one step must move, by kernel."""
    found: dict[str, float] = {}
    original = launcher.run_fastest

    def run(key: str, launches: list[Any]) -> Any:
        launch = original(key, launches)
        found[launch.name] = found.get(launch.name, 0.0) + count_bytes(launch.args)
        return launch

    launcher.run_fastest = run  # type: ignore[method-assign]
    try:
        step()
    finally:
        launcher.run_fastest = original  # type: ignore[method-assign]
    return found


def prepare(variant: Variant, dtype: torch.dtype, batch: int, report: Report) -> dict[str, Any]:
    """A tuned and captured step with its peak memory, floors and first gradients."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    begin = time.perf_counter()
    step = Step(variant, dtype, batch)
    step.gradients()
    torch.cuda.reset_peak_memory_stats()
    step.gradients()
    peak = round((torch.cuda.max_memory_allocated() - before) / 2**30, 1)
    gradients = flat(step.net.weights.grad).double()
    floors = count_floors(step)
    replay = step.capture()
    row = {"variant": variant.name, "alone_ms": round(time_ms(replay, 10), 3), "peak_gib": peak}
    row["seconds"] = round(time.perf_counter() - begin)
    report.add("prepared", {**row, "dtype": str(dtype), "batch": batch})
    return {"step": step, "replay": replay, "gradients": gradients, "floors": floors, **row}


def adopt_tiles(variants: list[Variant], dtype: torch.dtype, batch: int, other: int) -> None:
    """Give the kernels of another batch size the tiles and choices found for `batch`."""
    for key, name in list(launcher.options.items()):
        launcher.options[key.replace(f"({batch}, ", f"({other}, ")] = name
    launcher.mode, original = "first", launcher.run_fastest
    for variant in variants:
        orders: list[list[str]] = []
        for size in (batch, other):
            keys: list[str] = []

            def run(key: str, launches: list[Any], keys: list[str] = keys) -> Any:
                keys.append(key)
                return launches[0]

            launcher.run_fastest = run  # type: ignore[method-assign]
            Step(variant, dtype, size)()
            orders.append(keys)
            gc.collect()
        launcher.run_fastest = original  # type: ignore[method-assign]
        for own, new in zip(*orders, strict=True):
            launcher.tiles[new] = launcher.tiles.get(own) or launcher.tiles.get(new) or []
    torch.cuda.empty_cache()


def measure(dtype: torch.dtype, batch: int, words: argparse.Namespace, report: Report) -> None:
    """Images/s of the variants in turns, then their kernels."""
    ready: dict[str, Any] = {}
    variants = chosen(words)
    if batch != words.batch:
        variants = variants[-1:]
        adopt_tiles(variants, dtype, words.batch, batch)
    launcher.mode = "tune"
    for variant in variants:
        made = report.attempt(f"prepare {variant.name}", prepare, variant, dtype, batch, report)
        if made:
            ready[variant.name] = made
    times: dict[str, list[float]] = {name: [] for name in ready}
    for turn in range(ROUNDS):
        names = list(ready)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(time_ms(ready[name]["replay"], REPLAYS))
    first = next(iter(ready.values()))["gradients"]
    for name, values in times.items():
        rates = [round(batch / ms * 1e3) for ms in (median(values), max(values), min(values))]
        row = {"variant": name, "dtype": str(dtype), "batch": batch}
        row |= {"ms": round(median(values), 3), "images_per_s": rates[0], "range": rates[1:]}
        row |= {
            "peak_gib": ready[name]["peak_gib"],
            "loss": round(float(ready[name]["step"].loss), 3),
        }
        row["gradients"] = round(relative(ready[name]["gradients"], first), 4)
        report.add("speed", row)
    for name, made in reversed(ready.items()):
        if time.perf_counter() - report.begin > words.seconds:
            print("no time for the kernels of", name, flush=True)
            continue
        kinds, every = list_kernels(made["replay"], OWN)
        floor = {k: round(b / words.rate / 1e9, 3) for k, b in made["floors"].items()}
        table = {key: [*row, floor.get(key)] for key, row in kinds.items()}
        total = round(sum(row[0] for row in kinds.values()), 2)
        head = {"variant": name, "dtype": str(dtype), "batch": batch, "total": total}
        report.add("kernels", {**head, "ms_launches_floor": table}, 2000)
        report.data.setdefault("every_kernel", {})[f"{name} {dtype} {batch}"] = every
    report.save()


def show_choices(report: Report) -> None:
    """What was chosen where, and the tiles."""
    choices = [row for row in launcher.timings if "choice" in row]
    for row in choices:
        print(row["choice"], *(f"{k}={v}" for k, v in row["ms"].items()), flush=True)
    report.data["tiles"] = launcher.timings
    report.save()
    state = json.dumps({"tiles": launcher.tiles, "options": launcher.options})
    report.path.with_name("tiles.json").write_text(state, encoding="utf-8")


def run(words: argparse.Namespace, report: Report) -> None:  # noqa: C901  a list of parts
    """All parts."""
    dtypes = [getattr(torch, name) for name in words.dtypes.split(",")]
    if words.device == "cpu":
        check(torch.float32, words, report)
        return
    torch.backends.cudnn.benchmark = True
    if words.tiles and words.tiles.exists():
        known = json.loads(words.tiles.read_text(encoding="utf-8"))
        launcher.tiles, launcher.options = known["tiles"], known["options"]
    words.rate = copy_rate()
    report.add("device", {"copy_tb_per_s": words.rate, "name": torch.cuda.get_device_name()})
    torch.cuda.empty_cache()
    if "peer" in words.parts:  # alone: compiling beside it slows its host down
        for name in words.dtypes.split(","):
            measure_peer(words, name)
    compile_all(words, report)
    if "check" in words.parts:
        launcher.mode = "first"
        for dtype in dtypes:
            report.attempt("check", check, dtype, words, report)
    if "depthwise" in words.parts:
        launcher.mode = "tune"
        for shape in depthwise_bench.SHAPES:
            args = (*shape[:4], dtypes[0], words.batch, words.rate)
            row = report.attempt(f"depthwise {shape}", depthwise_bench.measure, *args)
            report.add("depthwise", {**(row or {}), "times": shape[4]})
    if "measure" in words.parts:
        for dtype in dtypes:
            for batch in words.batches.split(","):
                if time.perf_counter() - report.begin < words.seconds:
                    report.attempt(f"measure {dtype}", measure, dtype, int(batch), words, report)
        show_choices(report)


def main() -> None:
    """Everything, in one process but for the peer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", default="check,depthwise,peer,measure")
    parser.add_argument("--dtypes", default="float16,bfloat16")
    parser.add_argument("--batches", default="256")
    parser.add_argument("--variants", default="plain,norms,depthwise,expand")
    parser.add_argument("--tiles", type=Path, help="an earlier run's tiles.json")
    parser.add_argument("--seconds", type=float, default=400)
    words = parser.parse_args()
    words.batch = int(words.batches.split(",")[0])
    words.out.mkdir(parents=True, exist_ok=True)
    report = Report(words.out, "efficientnet")
    report.path = words.out / "efficientnet_b0_step.json"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run(words, report)


if __name__ == "__main__":
    main()
