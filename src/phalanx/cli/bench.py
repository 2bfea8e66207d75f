"""`phalanx bench`: training beside a bare PyTorch loop, and the cost of determinism."""

import json
from typing import TYPE_CHECKING

from phalanx.cli.command import ALL_OPTIONS, JSON_FLAG, PRESET_ARGS, Argument, ParsedArgs, command
from phalanx.cli.progress import ProgressLine

if TYPE_CHECKING:
    from phalanx.bench.determinism import Cost
    from phalanx.bench.paired import Ratio


@command(
    "bench overhead",
    "Images/s of the real training loop over a bare PyTorch loop that gets the same "
    "batches ready-made in memory.",
    Argument("--pairs", "Interleaved pairs of blocks [40].", default="40"),
    Argument("--steps", "Steps in a block [25].", default="25"),
    JSON_FLAG,
    usage="[--pairs N] [--steps N] [--json]",
    examples={"phalanx bench overhead": "the median of 40 paired ratios; about two minutes"},
)
def _measure_overhead(args: ParsedArgs) -> None:
    """Measure and print the ratio with its interval."""
    args.refuse_problems()
    pairs = args.read_int("--pairs", 3)
    steps = args.read_int("--steps", 11)

    from phalanx.bench.overhead import measure_overhead

    progress = ProgressLine()
    ratio = measure_overhead(
        pairs=pairs, steps=steps, done=lambda pair: progress.show(f"pair {pair} of {pairs}")
    )
    progress.end()
    if args["--json"]:
        numbers = {
            "ratio": ratio.median,
            "interval95": ratio.interval95,
            "phalanx_images_per_second": ratio.ours,
            "bare_images_per_second": ratio.theirs,
        }
        print(json.dumps(numbers))
    else:
        _print_overhead(ratio, steps)


def _print_overhead(ratio: "Ratio", steps: int) -> None:
    """The speeds of both loops and their ratio."""
    for name, rates in (("phalanx train", ratio.ours), ("bare loop", ratio.theirs)):
        ordered = sorted(rates)
        print(
            f"{name:<14} {ordered[len(ordered) // 2]:>9,.0f} images/s   {ordered[0]:,.0f} to "
            f"{ordered[-1]:,.0f} (n={len(ordered)} blocks of {steps} steps)"
        )
    low, high = ratio.interval95
    print(f"ratio {ratio.median:.4f}, 95 % interval {low:.4f} to {high:.4f}")


@command(
    "bench determinism",
    "Steps/s with --determinism seeded and strict over those with off, in turns, on "
    "made-up images.",
    *PRESET_ARGS,
    Argument("--pairs", "Interleaved pairs of blocks [20].", default="20"),
    Argument("--steps", "Steps in a block [10].", default="10"),
    JSON_FLAG,
    usage="[PRESET|FILE] [--option value]... [--pairs N] [--steps N] [--json]",
    # a block has its own length, and every value of determinism is measured
    options=tuple(name for name in ALL_OPTIONS if name not in ("steps", "determinism")),
    examples={
        "phalanx bench determinism": "the demo's model",
        "phalanx bench determinism imagenet-resnet50 --device cuda": "needs no data",
    },
)
def _measure_determinism(args: ParsedArgs) -> None:
    """Measure and print what each value of --determinism costs."""
    settings = args.read_settings()
    pairs = args.read_int("--pairs", 3)
    steps = args.read_int("--steps", 1)
    from phalanx.bench.determinism import measure_determinism

    progress = ProgressLine()
    cost = measure_determinism(
        settings,
        pairs=pairs,
        steps=steps,
        done=lambda name, pair: progress.show(f"{name}: pair {pair} of {pairs}"),
    )
    progress.end()
    if args["--json"]:
        print(json.dumps(cost.facts()))
    else:
        print_cost(cost)


def print_cost(cost: "Cost") -> None:
    """The ratio of each value of --determinism, a line each."""
    for name, ratio in cost.ratios.items():
        ours, theirs = (sorted(rates)[len(rates) // 2] for rates in (ratio.ours, ratio.theirs))
        low, high = ratio.interval95
        print(
            f"{name:<8}{ours:>9,.2f} steps/s, off {theirs:,.2f}: ratio {ratio.median:.4f}, "
            f"95 % interval {low:.4f} to {high:.4f} "
            f"(n={len(ratio.pairs)} pairs of blocks of {cost.steps} steps)"
        )
    print(f"on {cost.device}: {cost.note}")
