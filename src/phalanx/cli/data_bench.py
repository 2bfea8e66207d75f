"""`phalanx data bench`: how fast images come, and whether that is enough."""

from typing import TYPE_CHECKING

from phalanx.cli.command import ALL_OPTIONS, Argument, ParsedArgs, command

if TYPE_CHECKING:
    from phalanx.bench.feeding import Feeding


@command(
    "data bench",
    "Time reading, decoding, augmenting and copying, alone and together, and say what "
    "limits training.",
    Argument("dir", "The data; without it, the demo's."),
    Argument("--config", "A preset or file to take the options from."),
    Argument("--seconds", "How long each rate is measured  [3]", default="3"),
    Argument("--json", "Print JSON.", switch=True),
    usage="[DIR] [--option value]... [--json]",
    options=ALL_OPTIONS,
    examples={
        "phalanx data bench ~/imagenet": "is this disk, are these cores enough?",
        "phalanx data bench ~/imagenet --model resnet50 --workers 16": "for that model",
    },
)
def _bench_data(args: ParsedArgs) -> None:
    """Measure and print."""
    from phalanx.assemble.find_data import read_with_data

    flags = dict(args.flags)
    if args["dir"]:
        flags["data-dir"] = args["dir"]
    settings = read_with_data(args["--config"], flags, problems=args.problems)
    seconds = args.read_positive("--seconds", "a number up to 600", high=600)
    from phalanx.bench.feeding import measure_feeding

    found = measure_feeding(settings, seconds=seconds)
    args.print_result(found.facts(), lambda: _print_rates(found))


def _print_rates(found: "Feeding") -> None:
    """The rates as a table, and the verdict."""
    print("one core, each stage alone          images/s")
    for rate in found.stages:
        print(f"  {rate.stage:<12}{rate.images_per_second:>32,.0f}  {rate.what}")
    print("all together")
    if found.scaling is None:
        print(f"  {'device':<12}{found.all_workers:>32,.0f}  makes the images itself")
    else:
        print(f"  {'1 worker':<12}{found.one_worker:>32,.0f}")
        words = f"{found.workers} workers"
        print(f"  {words:<12}{found.all_workers:>32,.0f}  {found.scaling:.2f} of as many times one")
    print(f"  {'the model':<12}{found.needed:>32,.0f}  {found.model} on {found.device}")
    print(found.verdict())
