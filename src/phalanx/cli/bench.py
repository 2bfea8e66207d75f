"""`phalanx bench overhead`: compare training with a bare PyTorch loop."""

import json
import sys
from typing import TYPE_CHECKING

from phalanx.cli.command import Argument, Command, Request
from phalanx.errors import ConfigError

if TYPE_CHECKING:
    from phalanx.bench.paired import Ratio


def overhead(request: Request) -> int:
    """Measure and print the ratio with its interval."""
    request.refuse_problems()
    pairs = read_count("--pairs", request["pairs"], least=3)
    steps = read_count("--steps", request["steps"], least=11)

    from phalanx.bench.overhead import measure_overhead

    def done(pair: int) -> None:
        print(f"\rpair {pair} of {pairs}", end="", file=sys.stderr, flush=True)

    ratio = measure_overhead(pairs=pairs, steps=steps, done=done)
    print(file=sys.stderr)
    if request["json"]:
        print(json.dumps(as_json(ratio)))
    else:
        show(ratio, steps)
    return 0


def read_count(name: str, text: str, *, least: int) -> int:
    """A whole number from a flag."""
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{name}: wants a whole number of at least {least}, got {text!r}")
    return int(text)


def as_json(ratio: "Ratio") -> dict[str, object]:
    """The measurement for a program."""
    return {
        "ratio": ratio.median,
        "interval95": ratio.interval95,
        "phalanx_images_per_second": ratio.ours,
        "bare_images_per_second": ratio.theirs,
    }


def show(ratio: "Ratio", steps: int) -> None:
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


COMMANDS = {
    "bench overhead": Command(
        name="bench overhead",
        summary="Images/s of the real training loop over a bare PyTorch loop that gets the same "
        "batches ready-made in memory.",
        usage="phalanx bench overhead [--pairs N] [--steps N] [--json]",
        run=overhead,
        arguments=(
            Argument(name="--pairs", help="Interleaved pairs of blocks [40].", default="40"),
            Argument(name="--steps", help="Steps in a block [25].", default="25"),
            Argument(name="--json", help="Print a JSON object.", switch=True),
        ),
        examples=(("phalanx bench overhead", "the median of 40 paired ratios; about two minutes"),),
    ),
}
