"""Where ResNeXt-101's step goes, and which kernels would make its grouped convolutions faster.

    python3 scripts/lab/grouped_variants.py [--parts trace,variants] [--layers 14px,56px]
        [--tasks forward,both+] [--batch 256] [--seconds 440] [--out FOLDER]
    python3 scripts/lab/grouped_variants.py --device cpu    (small, in Triton's interpreter)
    python3 scripts/lab/grouped_variants.py --device none   (only compiles for sm_90: registers)

`trace` prints a captured pass by operation, beside what its bytes or flops need at least
(pass_trace.py). `variants` compares today's grouped convolutions, cuDNN's with groups joined to a
width, and the kernels of grouped_kernels.py; grouped_cases.py says what the tasks are. Each line is
the fastest right variant; a variant is right if no result's error against float64 exceeds 1.1 times
today's (8 images, poisoned memory) and its results at full size agree with today's within 2e-3.
--out FOLDER ($OUT by default) gets the whole tables, with registers and spilled bytes; lines of
variants that are wrong or fail to compile are printed, too.

What to expect of one H200 in float16 at batch 256, predicted from bytes and from the loops that
Triton 3.6 compiles (`--device none`, 55 % of the instructions that could be issued, 80 % of the
copy's rate); us at 14 px, where 22 of the 33 grouped convolutions are:
- The step's 55 ms are 10.4 of grouped convolutions, 6.2 of norm passes around them, about 28 of
  products (18 of them at 14 px), 3 of other norm passes, 2 of the stem, 5 of the rest. Bytes alone
  would need 3.9 for the grouped convolutions with their gradients.
- `walk` forward 33 to 40 (67 today; bytes 24), `tile` 45 to 55, `input` as forward (74 today).
- `weight`: `walk` 35 to 45 (93 today), `tile` 72 to 85. `pair`, both gradients, 50 to 65 (167).
- Sums in the epilogue (`*`): `forward*` 40 to 45 (94 today), `both*` 70 to 85 (208 today).
- Norms on the load (`+`) are bound by instructions, since each value is normalised three times:
  `forward+` 68 to 80, as much as `*` with a pass of its own; `both+` 140 to 160, where `*` with a
  pass takes 110 to 125. So they lose, as they did for ungrouped convolutions.
- cuDNN's width of 16 is slower than 32. Two stages of loads beat one by less than 10 %.
- In sum 6.5 ms less a step (4.5 to 8), by `*`: 55 to 48.5 ms, 5,280 images/s (5,070 to 5,440). The
  aim is 47.4 ms, so one more ms must come from the products at 14 px.
"""

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from math import isnan
from pathlib import Path
from statistics import median
from typing import Any

import torch

RATE = 4.25e12  # bytes a second of a copy on the device, unless measured
CHECKED, LAUNCHES, REPEATS = 8, 12, 5  # images of a check; launches in a graph, and its replays
MOST_ERROR, MOST_DIFFERENCE = 1.1, 2e-3
CACHE = 3 * 50e6  # bytes of tensors that a graph cycles through, so that the cache does not help
ORDER = (4, 0, 2, 3, 1, 5, 6)  # of the layers: by what they could save
SMALL = (8, 8, 7, 6, 6, 6, 7)  # edges with --device cpu

moved = {  # by a task: how often the operand's and the result's image
    "norm": (2, 0), "norm back": (0, 3), "weight": (1, 1), "weight+": (1, 2),
    **dict.fromkeys(("forward", "forward*", "forward+", "input"), (1, 1)),
    "input*": (2, 1), "input+": (2, 2), "both": (2, 1), "both*": (3, 1), "both+": (2, 2),
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What is known of a case."""

    task: str
    way: str
    tile: str
    ms: float = 0.0
    error: float = 0.0  # the largest of a result, as a multiple of today's
    difference: float = 0.0  # from today's results at full size
    note: str = ""  # registers and spilled bytes, or what went wrong

    @property
    def is_right(self) -> bool:
        """Whether it may be used."""
        return self.ms > 0 and self.error <= MOST_ERROR and self.difference <= MOST_DIFFERENCE

    def describe(self) -> str:
        """A line."""
        if not self.ms:
            return f"{self.task:9} {self.way:5} {self.tile:22} FAILED {self.note[:160]}"
        wrong = "" if self.is_right else " WRONG"
        return (
            f"{self.task:9} {self.way:5} {self.tile:22} {self.ms:.4f} error {self.error:.2f} "
            f"differs {self.difference:.0e} {self.note}{wrong}"
        )


# --- one layer ---


def find_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The relative error; infinite if anything is not a number."""
    rows = got[: len(wanted)].double()  # of a norm's vectors, those that are no others' products
    error = float((rows - wanted.double()).norm() / wanted.double().norm())
    return float("inf") if isnan(error) else error


class Bench:
    """Checks and times the cases of a layer."""

    def __init__(self, layer: Any, cases: Any, words: argparse.Namespace) -> None:
        self._cases, self._words, self.layer = cases, words, layer
        half = getattr(torch, words.half)
        torch.manual_seed(0)
        device = "cuda" if words.device == "cuda" else "cpu"
        make = cases.make_tensors
        self._small = make(layer, CHECKED if device == "cuda" else 3, half, device)
        self._big = [self._small]
        if device == "cuda":
            self._big = [make(layer, words.batch, half, device)]
            count = int(CACHE // self._big[0].a.nbytes)
            self._big += [make(layer, words.batch, half, device) for _ in range(min(count, 3))]
        self._wanted = {plus: cases.compute_reference(self._small, plus=plus) for plus in (0, 1)}
        self._torch: dict[tuple[bool, str], float] = {}  # errors of today's kernels
        self._today: dict[str, Any] = {}  # their results at full size

    def find_floor(self, task: str) -> float:
        """Milliseconds that a task's bytes need."""
        x, y = moved[task]
        tensors = self._big[0]
        return (x * tensors.a.nbytes + y * tensors.b.nbytes) / RATE * 1e3

    def measure(self, case: Any) -> Found:
        """A case's time and errors."""
        found = Found(case.task, case.way, case.tile)
        self._cases.LAUNCHED.clear()
        try:
            error = self._check(case)
            difference = self._compare(case)
            ms, launched = self._time(case), self._cases.LAUNCHED
            note = describe_resources(launched[-1], self._words.device) if launched else ""
        except Exception as failure:  # noqa: BLE001 - the others shall run
            return replace(found, note=repr(failure).replace("\n", " ")[-300:])
        return replace(found, ms=ms, error=error, difference=difference, note=note)

    def _check(self, case: Any) -> float:
        """The largest error of a result, as a multiple of today's."""
        plus, is_today = case.task.endswith("+"), case.way == "today"
        torch.use_deterministic_algorithms(not is_today and case.way != "cudnn", warn_only=True)
        try:  # deterministic: empty tensors are filled with NaN
            got = case.run(self._small)
        finally:
            torch.use_deterministic_algorithms(False)
        errors = {}
        for name, result in got.items():
            if name in self._wanted[plus]:
                errors[name] = find_error(result, self._wanted[plus][name])
        if is_today:
            self._torch |= {(plus, name): error for name, error in errors.items()}
        return max([errors[name] / self._torch[plus, name] for name in errors], default=0.0)

    def _compare(self, case: Any) -> float:
        """The largest difference from today's results at full size."""
        got = case.run(self._big[0])
        plus = case.task[-1] in "+"
        differences = [0.0]
        for name, result in got.items():
            if case.way == "today":
                self._today[f"{name}{plus}"] = result
            else:
                differences.append(find_error(result, self._today[f"{name}{plus}"]))
        return max(differences)

    def _time(self, case: Any) -> float:
        """Milliseconds of a run: in a graph of several, the median of its replays."""
        if self._words.device == "cpu":
            return 1.0  # interpreted: its time says nothing
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            for tensors in self._big:
                case.run(tensors)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=side):
                for number in range(LAUNCHES):
                    case.run(self._big[number % len(self._big)])
            graph.replay()
            times = []
            for _ in range(REPEATS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                times.append(begin.elapsed_time(end) / LAUNCHES)
        return median(times)


def describe_resources(launch: Any, device: str) -> str:
    """Registers, spilled bytes and shared memory of a launch's kernel."""
    if device == "cpu":
        return ""
    found = launch.kernel.warmup(*launch.args, grid=(1,), **launch.flags, **launch.tile)
    if device == "none":
        from sass import describe_binary

        return f"{found.metadata.shared // 1024} KiB, {describe_binary(found.asm['cubin'])}"
    found._init_handles()
    return f"{found.n_regs} regs {found.n_spills} spilled {found.metadata.shared // 1024} KiB"


# --- all layers ---


def measure_layers(words: argparse.Namespace, tell: Callable[[str], None], ends_at: float) -> None:
    """Measure the chosen cases of the chosen layers; `tell` gets every line."""
    cases = import_module("grouped_cases")
    layers = list(cases.LAYERS)
    if words.device == "cpu":
        layers = [replace(one, edge=edge) for one, edge in zip(layers, SMALL, strict=True)]
    layers = [layers[place] for place in ORDER]
    chosen = [one for one in layers if not words.layers or is_chosen(one.name, words.layers)]
    if words.device == "cuda":
        compile_cases(cases, chosen, words)
    totals: dict[str, dict[str, float]] = {}
    for layer in chosen:
        bench, found = Bench(layer, cases, words), []
        for case in list_chosen(cases, layer, words):
            if time.monotonic() > ends_at:
                tell(f"{layer.name}: out of time at {case.task} {case.way}")
                break
            found.append(bench.measure(case))
            tell(f"  {layer.name} {found[-1].describe()}")
        for line in summarise(bench, found):
            print(line, flush=True)
        totals[layer.name] = find_best_totals(found)
        del bench
        if words.device == "cuda":
            torch.cuda.empty_cache()
    for line in describe_totals(chosen, totals):
        print(line)


def is_chosen(name: str, names: str) -> bool:
    """Whether one of the names begins it."""
    return any(name.startswith(one) for one in names.split(","))


def list_chosen(cases: Any, layer: Any, words: argparse.Namespace) -> list[Any]:
    """A layer's cases of the chosen tasks, and today's, with which they are compared."""
    tasks = words.tasks.split(",") if words.tasks else list(moved)
    return [one for one in cases.list_cases(layer) if one.task in tasks or one.way == "today"]


def compile_cases(cases: Any, layers: list[Any], words: argparse.Namespace) -> None:
    """Compile all kernels at once, on all cores."""
    from phalanx.kernels.choices import CHOICES

    def run_all() -> None:
        for layer in layers:
            tensors = cases.make_tensors(layer, CHECKED, getattr(torch, words.half), "cuda")
            for case in list_chosen(cases, layer, words):
                if case.way != "cudnn":
                    with suppress(Exception):  # it is told when it is measured
                        case.run(tensors)

    began = time.monotonic()
    count = CHOICES.compile_all(run_all)
    print(f"{count} kernels compiled in {time.monotonic() - began:.0f} s", flush=True)


def summarise(bench: Bench, found: list[Found]) -> list[str]:
    """A line for each task: today's time, its floor, and the fastest right case of each way."""
    lines = [f"== {bench.layer.name} x{bench.layer.count}, ms"]
    for task in moved:
        own = [one for one in found if one.task == task]
        if not own:
            continue
        words = [f"{task:9} floor {bench.find_floor(task):.3f}"]
        for way in dict.fromkeys(one.way for one in own):
            right = [one for one in own if one.way == way and one.is_right]
            if right:
                best = min(right, key=lambda one: one.ms)
                words.append(f"{way} {best.ms:.3f} {best.tile.replace(' ', '-')}".strip())
        lines.append(" | ".join(words))
    lines += [one.describe() for one in found if not one.is_right]
    return lines


def find_best_totals(found: list[Found]) -> dict[str, float]:
    """Milliseconds of a layer with its norms: today, and with the fastest right kernels."""
    times: dict[str, float] = defaultdict(lambda: float("inf"))
    today = {one.task: one.ms for one in found if one.way == "today" and one.ms}
    for one in found:
        if one.is_right:
            times[one.task] = min(times[one.task], one.ms)
    if not {"forward+", "both+", "norm", "norm back"} <= set(today):
        return {}
    forward = {
        "+": times["forward+"],
        "*": times["norm"] + times["forward*"],
    }
    ready = min(times["both*"], times["input*"] + times["weight"])
    backward = {
        "+": min(times["both+"], times["input+"] + times["weight+"]),
        "*": times["norm back"] + ready,
    }
    first, second = (min(row, key=lambda sign: row[sign]) for row in (forward, backward))
    return {
        "today": today["forward+"] + today["both+"],
        "best": forward[first] + backward[second],
        f"forward{first}, backward{second}": 0.0,
    }


def describe_totals(layers: list[Any], totals: dict[str, dict[str, float]]) -> list[str]:
    """What a step spends on grouped convolutions and the norms around them."""
    sums, lines = [0.0, 0.0], ["== a step, ms: today, with the best, by which"]
    for layer in layers:
        found = totals.get(layer.name) or {}
        if found:
            today, best, _ = (layer.count * ms for ms in found.values())
            sums = [sums[0] + today, sums[1] + best]
            lines.append(
                f"{layer.name:12} x{layer.count:<3} {today:.2f} {best:.2f} {list(found)[2]}"
            )
    return [*lines, f"in all {sums[0]:.2f} {sums[1]:.2f}, saved {sums[0] - sums[1]:.2f}"]


# --- the command ---


def compile_only(words: argparse.Namespace) -> None:
    """Compile every kernel for sm_90 without a GPU, and print what it needs."""
    import sass

    sass.stand_in_for_gpu()
    cases = import_module("grouped_cases")
    seen = set()
    for layer in cases.LAYERS:
        if words.layers and not is_chosen(layer.name, words.layers):
            continue
        tensors = cases.make_empty_tensors(layer)
        for case in list_chosen(cases, layer, words):
            if case.way in ("today", "cudnn"):
                continue
            cases.LAUNCHED.clear()
            case.run(tensors)
            launch = cases.LAUNCHED[-1]
            if launch.compile_key in seen:
                continue
            seen.add(launch.compile_key)
            try:
                note = describe_resources(launch, "none")
            except Exception as failure:  # noqa: BLE001 - the others shall be compiled
                note = f"FAILED {failure!r}"[:300]
            print(f"{case.task:9} {case.way:5} {launch.kernel.__name__:12} {case.tile:22} {note}")


def main() -> int:
    """Trace, then compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="trace,variants", help="which of the two")
    parser.add_argument("--layers", help="their names, or how they begin: 14px,56px")
    parser.add_argument("--tasks", help="instead of all")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--half", default="float16")
    parser.add_argument("--seconds", type=float, default=440, help="no case begins after")
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT", "build/grouped"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu", "none"))
    words = parser.parse_args()
    ends_at = time.monotonic() + words.seconds
    if words.device == "none":
        compile_only(words)
        return 0
    out = Path(words.out)
    out.mkdir(parents=True, exist_ok=True)
    torch.backends.cudnn.benchmark = True
    parts = [part for part in ("trace", "variants") if part in words.parts]
    if words.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
        parts.reverse()  # the pass runs without it, by the kernels' references
    for part in parts:
        PARTS[part](words, out, ends_at)
    print(f"{words.seconds - (ends_at - time.monotonic()):.0f} s")
    return 0


def run_variants(words: argparse.Namespace, out: Path, ends_at: float) -> None:
    """Print what is fastest, and write every case."""
    with (out / "variants.txt").open("w", encoding="utf-8") as file:
        measure_layers(words, lambda line: print(line, file=file, flush=True), ends_at)


def run_trace(words: argparse.Namespace, out: Path, ends_at: float) -> None:
    """Print the short table of a pass, and write the whole."""
    os.environ.pop("TRITON_INTERPRET", None)
    from pass_trace import trace_pass

    batch = words.batch if words.device == "cuda" else 2
    try:
        whole, short = trace_pass(words.device, batch, RATE)
    except Exception as failure:  # noqa: BLE001 - the variants shall be measured
        print(f"trace: {failure!r}", flush=True)
        return
    (out / "trace.txt").write_text("\n".join(whole) + "\n", encoding="utf-8")
    print("\n".join(short), flush=True)
    if words.device == "cuda":
        torch.cuda.empty_cache()


PARTS = {"trace": run_trace, "variants": run_variants}

if __name__ == "__main__":
    sys.exit(main())
