"""`phalanx data bench`, `bench overhead` and `bench determinism`."""

import json
from typing import TYPE_CHECKING

from phalanx.cli.command import ALL_OPTIONS, JSON_FLAG, PRESET_ARGS, Argument, ParsedArgs, command
from phalanx.cli.progress import ProgressLine
from phalanx.units import format_plural

if TYPE_CHECKING:
    from phalanx.bench.data_loading import LoadingRates
    from phalanx.bench.determinism import DeterminismCost
    from phalanx.bench.paired_ratio import PairedRatio


@command(
    "data bench",
    "Time reading, decoding, augmenting and copying, alone and together, and find what "
    "limits training.",
    Argument("dir", "The data; without it, the demo's."),
    Argument("--config", "A preset or file to take the options from."),
    Argument("--seconds", "How long each rate is measured.  [3]", default="3"),
    Argument("--json", "Print JSON.", switch=True),
    usage="[DIR] [--option value]... [--json]",
    options=ALL_OPTIONS,
    examples={
        "phalanx data bench ~/imagenet": "are this disk and these cores fast enough?",
        "phalanx data bench ~/imagenet --model resnet50 --workers 16": "for that model",
    },
)
def _bench_data(args: ParsedArgs) -> None:
    """Measure and print."""
    from phalanx.assemble.find_data import read_settings_with_data

    flags = dict(args.flags)
    if args["dir"]:
        flags["data-dir"] = args["dir"]
    settings = read_settings_with_data(args["--config"], flags, problems=args.problems)
    seconds = args.read_positive("--seconds", "a number up to 600", high=600)
    from phalanx.bench.data_loading import measure_loading_rates

    found = measure_loading_rates(settings, seconds=seconds)
    args.print_result(found.to_dict(), lambda: _print_rates(found))


def _print_rates(found: "LoadingRates") -> None:
    """Print the rates as a table, and the verdict."""
    print("one core, each stage alone          images/s")
    for rate in found.stages:
        print(f"  {rate.stage:<12}{rate.images_per_second:>32,.0f}  {rate.what}")
    print("all together")
    if found.scaling is None:
        print(f"  {'device':<12}{found.all_workers:>32,.0f}  makes the images itself")
    else:
        print(f"  {'1 worker':<12}{found.one_worker:>32,.0f}")
        words = format_plural(found.workers, "worker")
        share = f"{found.scaling:.2f} of that times the workers"
        print(f"  {words:<12}{found.all_workers:>32,.0f}  {share}")
    print(f"  {'the model':<12}{found.needed:>32,.0f}  {found.model} on {found.device}")
    print(found.verdict())


@command(
    "bench overhead",
    "Compare images/s of the real training loop with a bare PyTorch loop that gets the same "
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
        print_ratio(ratio, ("phalanx train  ", "bare loop      "), steps=steps)


def print_ratio(ratio: "PairedRatio", names: tuple[str, str], *, steps: int) -> None:
    """Print the speeds of both sides, in blocks of so many steps, and their ratio."""
    for name, rates in zip(names, (ratio.ours, ratio.theirs), strict=True):
        ordered = sorted(rates)
        print(
            f"{name}{ordered[len(ordered) // 2]:>9,.0f} images/s   {ordered[0]:,.0f} to "
            f"{ordered[-1]:,.0f} (n={len(ordered)} blocks of {steps} steps)"
        )
    low, high = ratio.interval95
    print(f"ratio {ratio.median:.4f}, 95% interval {low:.4f} to {high:.4f}")


@command(
    "bench determinism",
    "Compare steps/s with --determinism seeded and strict to those with off, in "
    "alternation, on synthetic images.",
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
        print(json.dumps(cost.to_dict()))
    else:
        print_cost(cost)


def print_cost(cost: "DeterminismCost") -> None:
    """Print the ratio of each value of --determinism, a line each."""
    for name, ratio in cost.ratios.items():
        ours, theirs = (sorted(rates)[len(rates) // 2] for rates in (ratio.ours, ratio.theirs))
        low, high = ratio.interval95
        print(
            f"{name:<8}{ours:>9,.2f} steps/s, off {theirs:,.2f}: ratio {ratio.median:.4f}, "
            f"95% interval {low:.4f} to {high:.4f} "
            f"(n={len(ratio.pairs)} pairs of blocks of {cost.steps} steps)"
        )
    print(f"on {cost.device}: {cost.note}")
