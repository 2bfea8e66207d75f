"""`phalanx request`: sends images to a server, and prints its predictions."""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli.command import JSON_FLAG, Argument, ParsedArgs, command
from phalanx.cli.progress import REWRITE_S, ProgressLine
from phalanx.errors import ConfigError, DataError, NetworkError, suggest
from phalanx.report.terminal import escape_name
from phalanx.units import format_plural

if TYPE_CHECKING:
    from phalanx.client.connection import ServerAddress
    from phalanx.client.images import RequestImages
    from phalanx.client.load_generator import LoadOptions, LoadResult

_IN_FLIGHT = 16  # requests of a thread with --use-async
_VALIDATION_IMAGES = 200  # of a run, where none are named
_MOST_THREADS = 512
_MOST_CONNECTIONS = 1000  # as many as our server takes
_RUN_OPTIONS = ("data", "data-dir", "model", "init-weights", "plugin")  # with --serve RUN
_CONFIG_SUFFIXES = (".yaml", ".yml")
_READY_S = 120.0
_LONGEST_S = 3600.0


@command(
    "request",
    "Send images to a server; print its predictions, its speed and, where the classes are known, "
    "its accuracy. With --serve, export a run or preset and start the server, too.",
    Argument("images", "Image files, or folders of them.", metavar="IMAGE|DIR", many=True),
    Argument("--url", "Address of the server.  [http://127.0.0.1:8000]"),
    Argument(
        "--serve",
        "Export this run to a temporary folder, serve it, send it the images, and stop it; an "
        "exported file is served as it is; a preset or model by name has random weights or those "
        "of --init-weights. Without images: some of its validation data.",
    ),
    Argument(
        "--protocol",
        "predict (image files), tensorflow (TensorFlow Serving's REST) or v2 (Open Inference "
        "Protocol with binary tensors).  [predict]",
        default="predict",
    ),
    Argument("--batch-size", "Images in a request.  [1]", default="1"),
    Argument("--num-threads", "Sending threads, each with its own connection.  [2]", default="2"),
    Argument(
        "--num-images",
        "Images that each thread sends, cycling through those given: a measurement, after a "
        "warm-up, without predictions.  [every image once]",
    ),
    Argument(
        "--use-async",
        "Do not wait for an answer before the next request: each thread has up to "
        f"{_IN_FLIGHT} in flight.",
        switch=True,
    ),
    Argument("--verbose", "Print the latency of each request of the first thread.", switch=True),
    Argument("--labels", "CSV or JSON Lines with the class of each image: path,label."),
    Argument("--name", "Name of the model, for servers that do not report it."),
    Argument(
        "--api-key-file",
        "File with the server's API key.  [the environment variable PHALANX_API_KEY]",
    ),
    Argument("--timeout", "Seconds to wait for an answer.  [30]", default="30"),
    Argument(
        "--retries", "How often a request is sent again to a server that is busy.  [5]", default="5"
    ),
    JSON_FLAG,
    usage="[IMAGE|DIR...] [--url URL | --serve RUN|FILE|PRESET] [--batch-size N] [--num-threads N] "
    "[--num-images N] [--use-async] [--protocol NAME] [--verbose] [--json]",
    options=(*_RUN_OPTIONS, "max-file-mib"),
    examples={
        "phalanx request shoe.png": "classify an image with the server on this machine",
        "phalanx request photos --url http://gpu1:8000 --batch-size 8": "a folder, eight at a time",
        "phalanx request val --num-threads 8 --num-images 1000": "throughput and latency",
        "phalanx request --serve runs/demo": "export, serve, send images, stop: all in one",
        "phalanx request --serve resnet50_infer_bs16 --batch-size 8 --num-images 100": (
            "the same, to measure an untrained network"
        ),
    },
)
def _run(args: ParsedArgs) -> int:
    """Send the images and print the answers; the exit code says whether all were answered."""
    args.refuse_problems()
    options = _read_options(args)
    for flag in ("--url", "--api-key-file"):
        if args["--serve"] and args[flag]:
            raise ConfigError(f"{flag}: --serve starts a server of its own; give only one of them")
    for name in _RUN_OPTIONS:
        if name in args.flags and not args["--serve"]:
            raise ConfigError(f"--{name}: goes with --serve RUN; leave it out")
    args.load_plugins()
    if not args["images"] and not args["--serve"]:
        raise ConfigError("no image is named; give files or folders, or --serve RUN")
    images = _collect(args)
    with _open_address(args) as address:
        return _request(args, address, images, options.fit(len(images)))


def _read_options(args: ParsedArgs) -> "LoadOptions":
    """How to send the images; all errors in the flags are reported together."""
    from phalanx.client.load_generator import LoadOptions
    from phalanx.client.protocols import PROTOCOLS

    if args["--protocol"] not in PROTOCOLS:
        way_out = suggest(args["--protocol"], PROTOCOLS)
        raise ConfigError(f"--protocol {args['--protocol']}: {way_out}")
    most_threads = _MOST_CONNECTIONS // _IN_FLIGHT if args["--use-async"] else _MOST_THREADS
    return LoadOptions(
        protocol=args["--protocol"],
        batch_size=args.read_int("--batch-size", 1, 4096),
        threads=args.read_int("--num-threads", 1, most_threads),
        in_flight=_IN_FLIGHT if args["--use-async"] else 1,
        per_thread=args.read_optional_int("--num-images", 1, 10**9),
        timeout_s=args.read_positive("--timeout", "seconds up to 3600", high=_LONGEST_S),
        retries=args.read_int("--retries", 0, 1000),
    )


def _collect(args: ParsedArgs) -> "RequestImages":
    """The named images, else some of the run's own."""
    from phalanx.client.images import collect_files, collect_validation

    if args["images"]:
        labels = Path(args["--labels"]) if args["--labels"] else None
        return collect_files(
            args["images"], labels=labels, limits=args.read_source_options().limits
        )
    if args["--labels"]:
        raise ConfigError("--labels: no image is named; validation data has labels of its own")
    if _is_exported(args["--serve"]):
        raise ConfigError(
            f"--serve {args['--serve']}: a file does not say where its run's data is; name images, "
            "or name the run"
        )
    found = collect_validation(args["--serve"], args.flags, count=_VALIDATION_IMAGES)
    if found.note:
        print(found.note, file=sys.stderr)
    return found


def _is_exported(target: str) -> bool:
    """Whether it is an exported file to serve; a YAML file is a preset."""
    return Path(target).is_file() and not target.endswith(_CONFIG_SUFFIXES)


@contextmanager
def _open_address(args: ParsedArgs) -> "Iterator[ServerAddress]":
    """Context with the address of a server: the named one, or one started for the block."""
    from phalanx.client.connection import parse_address
    from phalanx.client.served_model import read_api_key
    from phalanx.client.server_process import open_server, run_child

    target = args["--serve"]
    if not target:
        url = args["--url"] or "http://127.0.0.1:8000"
        yield parse_address(url, api_key=read_api_key(args["--api-key-file"]))
        return
    with tempfile.TemporaryDirectory(prefix="phalanx-request-") as folder:
        if not _is_exported(target):
            file = str(Path(folder) / "model.onnx")
            print(f"exporting {escape_name(target)}", file=sys.stderr)
            given = [f"--{name}={args.flags[name]}" for name in _RUN_OPTIONS if name in args.flags]
            run_child(["export", target, "--format", "onnx", "--out", file, *given])
            target = file
        with open_server(target, ready_s=_READY_S) as server:
            print(f"serving {server.name} on {server.url}", file=sys.stderr)
            yield parse_address(server.url, api_key=read_api_key(None))
        print("the server has stopped", file=sys.stderr)


def _request(
    args: ParsedArgs, address: "ServerAddress", images: "RequestImages", options: "LoadOptions"
) -> int:
    """Send the images to a running server, and print the results."""
    from phalanx.client.load_generator import send_images
    from phalanx.client.results import summarize_accuracy, summarize_result
    from phalanx.client.served_model import find_model

    model = find_model(address, name=args["--name"], timeout_s=options.timeout_s)
    if model.weights == "random":
        print(f"{model.name} has random weights: its answers mean nothing", file=sys.stderr)
    labels = images.find_labels(model.classes)
    progress = ProgressLine(REWRITE_S)
    result = send_images(
        address,
        model,
        len(images),
        images.read,
        options=options,
        done=lambda so_far: progress.show(f"{so_far.sent_images:,} images"),
    )
    progress.end()
    facts = {
        "url": address.url,
        "model": model.name,
        "weights": model.weights or None,
        "protocol": options.protocol,
        "batch_size": options.batch_size,
        "connections": options.connections,
        **summarize_result(result),
        "accuracy": summarize_accuracy(result, labels),
    }
    if args["--json"]:
        print(json.dumps({**facts, "predictions": _list_predictions(images, labels, result)}))
    else:
        _print_all(args, images, result, facts)
    return _choose_exit_code(images, result)


def _choose_exit_code(images: "RequestImages", result: "LoadResult") -> int:
    """The exit code: 8 if images got no answer, 3 if some cannot be read; both are printed."""
    for place, answer in sorted(result.answers.items()):
        if answer.problem:
            print(f"{escape_name(images.names[place])}: {answer.problem}", file=sys.stderr)
    if result.failed_images:
        return NetworkError.exit_code
    return DataError.exit_code if result.unreadable_images else 0


def _list_predictions(
    images: "RequestImages", labels: Sequence[str | None], result: "LoadResult"
) -> list[dict[str, Any]]:
    """The answer for each image, in their order."""
    found = []
    for place, answer in sorted(result.answers.items()):
        guesses = [{"class": name, "probability": share} for name, share in answer.guesses]
        facts = {"problem": answer.problem or None, "label": labels[place]}
        more = {name: text for name, text in facts.items() if text is not None}
        found.append({"image": images.names[place], "guesses": guesses, **more})
    return found


def _print_all(
    args: ParsedArgs, images: "RequestImages", result: "LoadResult", facts: dict[str, Any]
) -> None:
    """Print the predictions if every image was sent once, then the numbers."""
    if args["--verbose"]:
        for number, request in enumerate((r for r in result.requests if r.thread == 0), start=1):
            batch = format_plural(request.images, "image")
            print(f"request {number}: {batch}, {1e3 * request.took_s:.2f} ms")
    if args["--num-images"] is None:
        for place, answer in sorted(result.answers.items()):
            text = "  ".join(f"{name} {share:.1%}" for name, share in answer.guesses)
            if not answer.problem:
                print(escape_name(f"{images.names[place]}: {text}"))
    for title, text in _describe(facts):
        print(f"{title:<12}{text}")


def _describe(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Print the numbers, a line each."""
    requests = format_plural(facts["requests"], "request")
    lines = [
        (
            "answered",
            f"{format_plural(facts['answered'], 'image')} in {requests} over "
            f"{format_plural(facts['connections'], 'connection')} in {facts['seconds']:.2f} s",
        )
    ]
    latency = facts["latency_ms"]
    if latency["n"]:
        known = [f"{name} {latency[name]:.1f}" for name in ("p50", "p95", "p99") if latency[name]]
        outer = f"min {latency['min']:.1f}, max {latency['max']:.1f}, n={latency['n']:,}"
        lines.append(("throughput", f"{facts['images_per_second']:,.1f} images/s"))
        lines.append(("latency", f"{', '.join(known)} ms of a request ({outer})"))
    accuracy = facts["accuracy"]
    if accuracy:
        low, high = accuracy["interval95"]
        lines.append(
            (
                "accuracy",
                f"{accuracy['top1']:.1%} top-1 (95% interval {low:.1%} to {high:.1%}, "
                f"n={accuracy['n']:,})",
            )
        )
    for why, count in facts["retries"].items():
        waited = f"waited {facts['waited_s']:.1f} s in all"
        lines.append(("repeated", f"{format_plural(count, 'request')} after {why}; {waited}"))
    for why, count in facts["failures"].items():
        lines.append(("failed", f"{format_plural(count, 'image')}: {why}"))
    if facts["unreadable"]:
        lines.append(("unreadable", format_plural(facts["unreadable"], "image")))
    return lines
