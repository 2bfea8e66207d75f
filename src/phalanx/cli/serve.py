"""`phalanx serve`: one model over HTTP."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from phalanx.cli.command import LIMIT_OPTIONS, Argument, ParsedArgs, command
from phalanx.cli.validate import CHECKPOINT_FLAG
from phalanx.errors import ConfigError, DiskError
from phalanx.plan.machine import count_cores, count_threads, resolve_device

if TYPE_CHECKING:
    from phalanx.config.schema import Config
    from phalanx.serve.app import WriteLogLine
    from phalanx.serve.service import ServeLimits

_PACKAGES = ("starlette", "uvicorn", "httptools", "orjson")
_KEY_VARIABLE = "PHALANX_API_KEY"
_MAX_BATCH = {"cpu": 8}  # elsewhere:
_MAX_GPU_BATCH = 64
_QUEUED_BATCHES = 4
_HEADER_S = 10.0
_LEAST_KEY = 8


@command(
    "serve",
    "Serve a model over HTTP: TensorFlow Serving's REST API, the Open Inference Protocol (KServe, "
    "Triton) and POST /predict, with a page to try it.",
    Argument(
        "model",
        "An exported ONNX file, or a run (its best checkpoint) or a checkpoint.",
        metavar="FILE|RUN",
        required=True,
    ),
    CHECKPOINT_FLAG,
    Argument(
        "--averaged", "Serve the moving average of a run's weights (--ema-decay).", switch=True
    ),
    Argument("--name", "What clients call the model.  [the run's name]"),
    Argument("--host", "Address to listen on; 0.0.0.0 for all.  [127.0.0.1]", default="127.0.0.1"),
    Argument("--port", "Port; 0 for any free port.  [8000]", default="8000"),
    Argument("--max-batch", "Largest batch to run.  [8; 64 on a GPU]"),
    Argument(
        "--max-wait-ms",
        "How long a batch that is not full waits for more images.  [0: runs what has queued]",
        default="0",
    ),
    Argument(
        "--workers", "Model instances, a thread each, that share the cores.  [1]", default="1"
    ),
    Argument(
        "--max-queue",
        "Number of waiting images at which requests are refused with 429.  [4 batches per worker]",
    ),
    Argument("--max-images", "Most images in one request.  [256]", default="256"),
    Argument("--max-request-mib", "Largest body of a request.  [64]", default="64"),
    Argument("--request-timeout", "Seconds a client has to send its body.  [30]", default="30"),
    Argument(
        "--drain-seconds", "After SIGTERM: seconds to finish pending requests.  [30]", default="30"
    ),
    Argument("--decode-threads", "Threads that decode images.  [the cores, at most 8]"),
    Argument("--access-log", "File for a JSON line per request; - for standard output."),
    Argument(
        "--api-key-file",
        f"File with the key that clients must send; or set {_KEY_VARIABLE}. Required "
        "to listen beyond this machine.",
    ),
    Argument("--no-auth", "Listen beyond this machine without a key.", switch=True),
    usage="FILE|RUN [--port N] [--max-batch N] [--max-wait-ms MS] [--workers N] "
    "[--option value]...",
    options=("device", "precision", "threads", "plugin", *LIMIT_OPTIONS),
    examples={
        "phalanx serve runs/demo": "the best checkpoint of a run, at http://127.0.0.1:8000/",
        "phalanx serve runs/demo --checkpoint last --averaged": "the newest one's average",
        "phalanx serve runs/demo/export/demo.onnx --port 0": "an exported file, on any free port",
        "phalanx serve model.onnx --max-batch 16 --max-wait-ms 5": "larger batches, more latency",
        "phalanx serve model.onnx --host 0.0.0.0 --api-key-file key.txt": "for other machines",
        "curl -F image=@shoe.png http://127.0.0.1:8000/predict": "classify an image",
    },
)
def _run(args: ParsedArgs) -> int:
    """Serve until a signal comes; the code is 0 when all that was accepted is answered."""
    args.load_plugins()
    config = args.read_config()
    _refuse_missing()
    device = _choose_device(args, config)
    limits = _read_limits(args, config, device)
    api_key = _read_key(args)
    from phalanx.export.metadata import check_model_name, make_model_name

    name = args["--name"]
    if name is not None:
        check_model_name(name)
    workers = args.read_int("--workers", 1, 64)
    threads = args.read_optional_int("--decode-threads", 1, 256) or min(8, count_cores())
    from phalanx.serve.backend import BackendOptions, open_backends

    options = BackendOptions(
        device=device,
        threads=config.machine.threads or max(1, count_threads() // workers),
        max_batch=limits.max_batch,
        flags=args.flags,
        checkpoint=args["--checkpoint"],
        averaged=args["--averaged"],
    )
    port = args.read_int("--port", 0, 65535)
    log = _open_log(args["--access-log"])

    from phalanx.serve.server import open_port, run_server
    from phalanx.serve.service import Service

    with open_port(args["--host"], port) as listening:
        backends = open_backends(Path(args["model"]), options, count=workers)
        metadata = backends[0].metadata
        plain = make_model_name(metadata.name)
        service = Service(backends, name or plain or metadata.model, limits, decode_threads=threads)
        facts = [
            metadata.model, *(["random weights"] * (metadata.weights == "random")),
            f"{len(metadata.classes):,} classes", backends[0].runtime,
            f"batches of up to {limits.max_batch}", *(["key required"] * bool(api_key)),
        ]  # fmt: skip
        line = f"serving {service.name} on {listening.url} ({', '.join(facts)})"
        run_server(
            listening,
            service,
            api_key=api_key,
            log=log,
            on_ready=lambda: print(line, flush=True),
        )
    return 0


def _refuse_missing() -> None:
    """Raise ConfigError where the packages of the server are not installed."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(f"phalanx serve needs {', '.join(missing)}: pip install 'phalanx[serve]'")


def _choose_device(args: ParsedArgs, config: "Config") -> str:
    """The one device that the model runs on; ConfigError for options that a file has no use for."""
    model, asked = Path(args["model"]), config.machine.device
    if "," in asked:
        raise ConfigError(
            f"--device {asked}: a server uses one device; start one for each, on ports of their own"
        )
    from phalanx.serve.backend import is_exported_model

    if not is_exported_model(model):
        return resolve_device(asked)
    given = {
        "--checkpoint": args["--checkpoint"],
        "--averaged": "" if args["--averaged"] else None,
        "--precision": args.flags.get("precision"),
    }
    for flag, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{flag} {value}".strip()
                + f": {model} is a file, which has it already; leave the option out, "
                "or name the run"
            )
    from phalanx.serve.onnx_backend import choose_device

    return choose_device(asked)


def _read_limits(args: ParsedArgs, config: "Config", device: str) -> "ServeLimits":
    from phalanx.assemble.dataset_summary import build_read_limits
    from phalanx.serve.service import ServeLimits

    max_batch = args.read_optional_int("--max-batch", 1, 4096)
    max_batch = max_batch or _MAX_BATCH.get(device, _MAX_GPU_BATCH)
    max_queue = _QUEUED_BATCHES * max_batch * args.read_int("--workers", 1, 64)
    max_queue = args.read_optional_int("--max-queue", 1, 1_000_000) or max_queue
    body_s = args.read_positive("--request-timeout", "seconds above 0", high=86400)
    wait_ms = _read_number(args, "--max-wait-ms", 10_000)
    return ServeLimits(
        max_batch=max_batch,
        max_wait_s=wait_ms / 1e3,
        max_queue=max_queue,
        max_images=args.read_int("--max-images", 1, 65536),
        max_request_bytes=args.read_int("--max-request-mib", 1, 4096) * 2**20,
        header_s=min(_HEADER_S, body_s),
        body_s=body_s,
        drain_s=args.read_int("--drain-seconds", 1, 3600),
        images=build_read_limits(config),
    )


def _read_number(args: ParsedArgs, flag: str, high: float) -> float:
    """A number from 0 on."""
    try:
        number = float(args[flag])
    except ValueError:
        number = -1.0
    if not 0 <= number <= high:
        raise ConfigError(f"{flag}: expected a number from 0 to {high:,}, got {args[flag]!r}")
    return number


def _read_key(args: ParsedArgs) -> str:
    """The key that clients must send, if any; ConfigError where one is needed and none is given."""
    from phalanx.serve.server import is_loopback

    file, host = args["--api-key-file"], args["--host"]
    if file is not None:
        try:
            key = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "no text"
            raise ConfigError(f"--api-key-file {file}: cannot be read ({reason})") from None
    else:
        key = os.environ.get(_KEY_VARIABLE, "").strip()
    where = f"--api-key-file {file}" if file is not None else _KEY_VARIABLE
    if key and (len(key) < _LEAST_KEY or not key.isascii() or not key.isprintable()):
        raise ConfigError(
            f"{where}: a key has at least {_LEAST_KEY} printable ASCII characters in one line; "
            "make one: openssl rand -hex 32"
        )
    if file is not None and not key:
        raise ConfigError(f"{where}: is empty; make a key: openssl rand -hex 32 > {file}")
    if args["--no-auth"] and key:
        raise ConfigError(f"--no-auth: contradicts {where}; leave one of them out")
    if not key and not args["--no-auth"] and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: other machines could use the model; give --api-key-file FILE or set "
            f"{_KEY_VARIABLE}, or say --no-auth if everybody may"
        )
    return key


def _open_log(place: str | None) -> "WriteLogLine | None":
    """What writes a line of the access log."""
    if place is None:
        return None
    if place == "-":
        out = sys.stdout

        def write_text(line: bytes) -> None:
            out.write(line.decode())
            out.flush()

        return write_text
    try:
        file: BinaryIO = open(place, "ab", buffering=0)  # noqa: SIM115 - open as long as the server
    except OSError as error:
        raise DiskError(f"--access-log {place}: cannot be written ({error.strerror})") from None

    is_told = False

    def write_line(line: bytes) -> None:
        nonlocal is_told
        try:
            file.write(line)
            is_told = False
        except OSError as error:  # a full disk must not stop the answers
            if not is_told:
                why = f"--access-log {place}: {error.strerror}; requests are answered, not logged"
                print(f"phalanx serve: {why}", file=sys.stderr)
            is_told = True

    return write_line
