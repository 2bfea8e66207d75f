"""`phalanx bench engines`: Lightning's Trainer compared with our own loop."""

from typing import TYPE_CHECKING

from phalanx.cli.bench import print_ratio
from phalanx.cli.command import ALL_OPTIONS, JSON_FLAG, PRESET_ARGS, Argument, ParsedArgs, command
from phalanx.cli.progress import ProgressLine

if TYPE_CHECKING:
    from phalanx.bench.engines import EngineComparison

_OWN = ("steps", "epochs", "engine", "run-dir")  # options that the measurement sets itself


@command(
    "bench engines",
    "Train with --engine lightning and with the native loop on the same batches, in alternation; "
    "print the ratio of their images/s, and whether their weights are equal.",
    *PRESET_ARGS,
    Argument("--pairs", "Interleaved pairs of blocks [20].", default="20"),
    Argument("--steps", "Steps in a block, of which the first is not timed [11].", default="11"),
    JSON_FLAG,
    usage="[PRESET|FILE] [--option value]... [--pairs N] [--steps N] [--json]",
    options=tuple(name for name in ALL_OPTIONS if name not in _OWN),
    examples={
        "phalanx bench engines": "the demo, about half a minute",
        "phalanx bench engines demo --replicas 4": "with four replicas folded onto one device",
        "phalanx bench engines synthetic-resnet50 --batch-size 256 --device cuda": "on a GPU",
    },
)
def _measure_engines(args: ParsedArgs) -> None:
    """Measure and print the ratio with its interval, and compare the weights."""
    pairs = args.read_int("--pairs", 1)
    steps = args.read_int("--steps", 2)
    args.flags["steps"] = str((pairs + 1) * steps + 1)  # the last is never reached
    settings = args.read_settings()
    from phalanx.bench.engines import measure_engines

    progress = ProgressLine()
    found = measure_engines(
        settings,
        pairs=pairs,
        steps=steps,
        done=lambda pair: progress.show(f"pair {pair} of {pairs}"),
    )
    progress.end()
    args.print_result(found.to_dict(), lambda: _print_comparison(found))


def _print_comparison(found: "EngineComparison") -> None:
    """Print the speeds of both engines, their ratio, and whether their weights are equal."""
    layout = f", {found.layout}" if found.layout else ""
    print(f"{found.model} on {found.device}{layout}")
    print_ratio(found.ratio, ("lightning ", "native    "), steps=found.steps)
    print(found.verdict)
