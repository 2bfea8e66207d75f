"""`phalanx bench serve`: finds the batching settings of a server for a latency goal."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.command import JSON_FLAG, Argument, ParsedArgs, command
from phalanx.cli.progress import ProgressLine
from phalanx.errors import EXIT_UNTRUSTED, ConfigError, DataError, suggest
from phalanx.plan.machine import count_cores
from phalanx.units import align_columns, format_plural

if TYPE_CHECKING:
    from phalanx.bench.serving import ServingPoint, ServingSearch

_PERCENTILES = ("p50", "p95", "p99")
_IMAGES = 32  # which are sent repeatedly
_RANDOM_IMAGE_SIZE = 320  # height and width of made-up images
_SERVER_OPTIONS = ("device", "precision", "threads", "plugin")


@command(
    "bench serve",
    "Find the batching settings of `phalanx serve` with the most images/s within a latency goal: "
    "real servers with larger batches, longer waits and more workers, loaded by more and more "
    "connections. Exits with code 7 if the figures are unreliable.",
    Argument(
        "model", "What is served: an exported file, or a run.", metavar="FILE|RUN", required=True
    ),
    Argument("images", "Images to send.", metavar="IMAGE|DIR", many=True),
    Argument("--latency-ms", "The goal: milliseconds for a request, from end to end."),
    Argument(
        "--percentile", "Which latency must meet the goal: p50, p95 or p99.  [p99]", default="p99"
    ),
    Argument(
        "--protocol",
        "How images are sent: predict, tensorflow or v2.  [predict]",
        default="predict",
    ),
    Argument("--batch-size", "Images in a request.  [1]", default="1"),
    Argument("--seconds", "How long each point is measured.  [2]", default="2"),
    Argument("--max-connections", "Most connections at once.  [64]", default="64"),
    JSON_FLAG,
    usage="FILE|RUN [IMAGE|DIR...] --latency-ms GOAL [--percentile p99] [--seconds S] [--json]",
    options=_SERVER_OPTIONS,
    examples={
        "phalanx bench serve model.onnx --latency-ms 50": "the most images/s with p99 under 50 ms",
        "phalanx bench serve runs/demo --latency-ms 10 --percentile p95": "a run, by torch",
        "phalanx bench serve model.onnx photos --latency-ms 100": "with images of your own",
    },
)
def _bench_serve(args: ParsedArgs) -> int:
    """Search and print; the last line is the command that serves with the chosen settings."""
    args.refuse_problems()
    from phalanx.client.protocols import PROTOCOLS

    for flag, known in (("--protocol", PROTOCOLS), ("--percentile", _PERCENTILES)):
        if args[flag] not in known:
            raise ConfigError(f"{flag} {args[flag]}: {suggest(args[flag], known)}")
    if args["--latency-ms"] is None:
        raise ConfigError("--latency-ms: which latency is the goal? Give milliseconds, such as 50")
    goal_ms = args.read_positive("--latency-ms", "milliseconds up to 60000", high=60_000)
    seconds = args.read_positive("--seconds", "seconds up to 600", high=600)
    batch_size = args.read_int("--batch-size", 1, 128)
    connections = args.read_int("--max-connections", 1, 4096)
    if not Path(args["model"]).exists():
        raise DataError(f"{args['model']}: no such file or run")
    from phalanx.bench.serving import ServingJob, search_settings

    progress, cores = ProgressLine(), count_cores()
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
        search = search_settings(
            ServingJob(
                target=args["model"],
                server_words=tuple(
                    w for name, text in args.flags.items() for w in (f"--{name}", text)
                ),
                files=tuple(_write_images(args, Path(folder))),
                goal_ms=goal_ms,
                percentile=args["--percentile"],
                protocol=args["--protocol"],
                batch_size=batch_size,
                seconds=seconds,
                max_connections=connections,
                processes=max(1, cores // 4),
                max_workers=cores,
                command=args.line,
            ),
            show=progress.show,
        )
    progress.end()
    args.print_result(_list_facts(search), lambda: _print_search(search))
    return _choose_exit_code(search)


def _write_images(args: ParsedArgs, folder: Path) -> list[str]:
    """Files of the images to send: the named ones, else the run's own, else made-up ones."""
    from phalanx.client.images import collect_files, collect_validation

    limits = args.read_source_options().limits
    if args["images"]:
        found = collect_files(args["images"], labels=None, limits=limits)
    elif Path(args["model"]).is_dir():
        try:
            found = collect_validation(args["model"], {}, count=_IMAGES)
        except DataError:
            return _make_up_images(folder)
    else:
        return _make_up_images(folder)
    files = []
    for place in range(min(len(found), _IMAGES)):
        file = folder / f"{place}"
        file.write_bytes(found.read_file(place))
        files.append(str(file))
    return files


def _make_up_images(folder: Path) -> list[str]:
    """Smooth noise as JPEG files, which decode about as fast as photographs."""
    import cv2
    import numpy as np

    random, files = np.random.default_rng(0), []
    for place in range(_IMAGES):
        coarse = random.integers(0, 256, (24, 24, 3), np.uint8)
        pixels = cv2.resize(
            coarse, (_RANDOM_IMAGE_SIZE, _RANDOM_IMAGE_SIZE), interpolation=cv2.INTER_CUBIC
        )
        file = folder / f"{place}.jpg"
        cv2.imwrite(str(file), pixels)
        files.append(str(file))
    return files


def _list_facts(search: "ServingSearch") -> dict[str, object]:
    """Everything, for JSON."""
    chosen = search.confirmed
    return {
        "goal_ms": search.job.goal_ms,
        "percentile": search.job.percentile,
        "chosen": chosen.to_dict() if chosen else None,
        "command": _describe_command(search) if chosen else None,
        "trusted": not search.problems,
        "problems": search.problems,
        "points": [point.to_dict() for point in search.points],
    }


def _describe_command(search: "ServingSearch") -> str:
    assert search.confirmed is not None
    words = [search.job.target, *search.confirmed.setting.words, *search.job.server_words]
    return f"phalanx serve {' '.join(words)}"


def _format_latency(name: str) -> "Callable[[ServingPoint], str]":
    def text(point: "ServingPoint") -> str:
        found = point.find_latency(name)
        return "-" if found == float("inf") else f"{found:,.1f}"

    return text


_COLUMNS: "dict[str, Callable[[ServingPoint], str]]" = {
    "max-batch": lambda point: str(point.setting.max_batch),
    "max-wait-ms": lambda point: f"{point.setting.max_wait_ms:g}",
    "workers": lambda point: str(point.setting.workers),
    "connections": lambda point: str(point.connections),
    "images/s": lambda point: f"{point.rate:,.1f}",
    **{f"{name} ms": _format_latency(name) for name in _PERCENTILES},
}


def _print_search(search: "ServingSearch") -> None:
    """Print a row for each setting, with the most connections that keep the goal; the choice."""
    job, chosen = search.job, search.confirmed
    size = f" of {format_plural(job.batch_size, 'image')}" * (job.batch_size > 1)
    print(
        f"{job.target}, requests{size} by {job.protocol}; goal: {job.percentile} {job.goal_ms:g} ms"
    )
    rows = [[*_COLUMNS, ""]]
    for point in search.list_rows():
        note = "" if search.keeps_goal(point) else "over the goal"
        rows.append([*(text(point) for text in _COLUMNS.values()), note])
    print("\n".join(align_columns(rows, left=[len(_COLUMNS)])))
    if chosen is None:
        return
    latency = chosen.find_latency(job.percentile)
    n = (chosen.result.latency_ms or {}).get("n")
    print(
        f"chosen, and measured again: {chosen.rate:,.1f} images/s, {job.percentile} {latency:.1f} "
        f"ms with {format_plural(chosen.connections, 'connection')} (n={n:,} requests)"
    )
    print(_describe_command(search))


def _choose_exit_code(search: "ServingSearch") -> int:
    """0, or 7 if the choice is unreliable; raises if no setting meets the goal."""
    job = search.job
    if search.confirmed is None:
        nearest = min(search.points, key=lambda point: point.find_latency(job.percentile))
        failed = "".join(
            f" ({count} images failed: {why})" for why, count in nearest.failures.items()
        )
        raise ConfigError(
            f"--latency-ms {job.goal_ms:g}: no setting meets it; the lowest {job.percentile} is "
            f"{nearest.find_latency(job.percentile):.1f} ms{failed}; raise the goal, or serve a "
            "smaller model"
        )
    for problem in search.problems:
        print(f"unreliable: {problem}", file=sys.stderr)
    return EXIT_UNTRUSTED if search.problems else 0
