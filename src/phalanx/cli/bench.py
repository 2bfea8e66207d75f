"""`phalanx bench`: training beside a bare PyTorch loop, and the cost of determinism."""

import json
from typing import TYPE_CHECKING

from phalanx.cli.command import ALL_OPTIONS, Argument, Command, Request, preset_named
from phalanx.cli.progress import ProgressLine
from phalanx.errors import ConfigError

if TYPE_CHECKING:
    from phalanx.bench.determinism import Cost
    from phalanx.bench.paired import Ratio


def _overhead(request: Request) -> int:
    """Measure and print the ratio with its interval."""
    request.refuse_problems()
    pairs = read_count("--pairs", request["pairs"], least=3)
    steps = read_count("--steps", request["steps"], least=11)

    from phalanx.bench.overhead import measure_overhead

    progress = ProgressLine()

    def done(pair: int) -> None:
        progress.show(f"pair {pair} of {pairs}")

    ratio = measure_overhead(pairs=pairs, steps=steps, done=done)
    progress.end()
    if request["json"]:
        print(json.dumps(_as_json(ratio)))
    else:
        _show(ratio, steps)
    return 0


def read_count(name: str, text: str, *, least: int) -> int:
    """A whole number from a flag."""
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{name}: wants a whole number of at least {least}, got {text!r}")
    return int(text)


def _as_json(ratio: "Ratio") -> dict[str, object]:
    """The measurement for a program."""
    return {
        "ratio": ratio.median,
        "interval95": ratio.interval95,
        "phalanx_images_per_second": ratio.ours,
        "bare_images_per_second": ratio.theirs,
    }


def _show(ratio: "Ratio", steps: int) -> None:
    """The measurement for a person."""
    low, high = ratio.interval95
    for name, rates in (("phalanx train", ratio.ours), ("bare loop", ratio.theirs)):
        ordered = sorted(rates)
        middle = ordered[len(ordered) // 2]
        print(
            f"{name:<14} {middle:>9,.0f} images/s   {ordered[0]:,.0f} to {ordered[-1]:,.0f} "
            f"(n={len(ordered)} blocks of {steps} steps)"
        )
    print(f"ratio {ratio.median:.4f}, 95 % interval {low:.4f} to {high:.4f}")


def _determinism(request: Request) -> int:
    """Measure and print what each value of --determinism costs."""
    from phalanx.assemble.find_data import read_with_data

    settings = read_with_data(preset_named(request), request.flags, problems=request.problems)
    pairs = read_count("--pairs", request["pairs"], least=3)
    steps = read_count("--steps", request["steps"], least=1)
    from phalanx.bench.determinism import measure_determinism

    progress = ProgressLine()

    def done(name: str, pair: int) -> None:
        progress.show(f"{name}: pair {pair} of {pairs}")

    cost = measure_determinism(settings, pairs=pairs, steps=steps, done=done)
    progress.end()
    if request["json"]:
        print(json.dumps(cost.facts()))
    else:
        show_cost(cost)
    return 0


def show_cost(cost: "Cost") -> None:
    """The ratios for a person."""
    for name, ratio in cost.ratios.items():
        ours, theirs = (sorted(rates)[len(rates) // 2] for rates in (ratio.ours, ratio.theirs))
        low, high = ratio.interval95
        print(
            f"{name:<8}{ours:>9,.2f} steps/s, off {theirs:,.2f}: ratio {ratio.median:.4f}, "
            f"95 % interval {low:.4f} to {high:.4f} "
            f"(n={len(ratio.pairs)} pairs of blocks of {cost.steps} steps)"
        )
    print(f"on {cost.device}: {cost.note}")


COMMANDS = {
    "bench overhead": Command(
        name="bench overhead",
        summary="Images/s of the real training loop over a bare PyTorch loop that gets the same "
        "batches ready-made in memory.",
        usage="phalanx bench overhead [--pairs N] [--steps N] [--json]",
        run=_overhead,
        arguments=(
            Argument(name="--pairs", help="Interleaved pairs of blocks [40].", default="40"),
            Argument(name="--steps", help="Steps in a block [25].", default="25"),
            Argument(name="--json", help="Print a JSON object.", switch=True),
        ),
        examples=(("phalanx bench overhead", "the median of 40 paired ratios; about two minutes"),),
    ),
    "bench determinism": Command(
        name="bench determinism",
        summary="Steps/s with --determinism seeded and strict over those with off, in turns, on "
        "made-up images.",
        usage="phalanx bench determinism [PRESET|FILE] [--option value]... [--pairs N] "
        "[--steps N] [--json]",
        run=_determinism,
        arguments=(
            Argument(name="preset", metavar="PRESET|FILE", help="A preset, or a YAML file."),
            Argument(name="--config", help="The same, as a flag."),
            Argument(name="--pairs", help="Interleaved pairs of blocks [20].", default="20"),
            Argument(name="--steps", help="Steps in a block [10].", default="10"),
            Argument(name="--json", help="Print a JSON object.", switch=True),
        ),
        # a block has its own length, and every value of determinism is measured
        options=tuple(name for name in ALL_OPTIONS if name not in ("steps", "determinism")),
        examples=(
            ("phalanx bench determinism", "the demo's model"),
            ("phalanx bench determinism imagenet-resnet50 --device cuda", "needs no data"),
        ),
    ),
}
