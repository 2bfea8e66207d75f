"""`phalanx serve` beside onnxruntime called directly, LitServe and a plain FastAPI handler.

    python scripts/serve_peers.py [--file MODEL.onnx] [--rounds 5] [--seconds 20] [--pairs 20]
                                  [--out results.json]

One ONNX file (ResNet-50 at 224 px unless another is given), tensors in, logits out. Whatever
answers has one core, the client another. First onnxruntime alone at batches of 1 to 32: the fastest
is what the servers may batch to. Then, in turns: clients without a pause, twice as many as the
batch; and one client. Sides that wait for their turn are stopped (SIGSTOP), so that none disturbs
another. Every side must give the same logits before anything is timed. Last, `wrk` as a client
that others wrote, where it is installed.

Needs litserve, fastapi, uvicorn and two cores. Use an idle machine.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "serve"))

from http_load import (  # noqa: E402
    Connections,
    build_request,
    count_statuses,
    find_latencies,
    measure_rate,
    run_closed_loop,
)

BATCHES = (1, 2, 4, 8, 16, 32)
SERVER_CORE, CLIENT_CORE = 0, 1
IMAGES = 8  # different ones, sent in turn
MOST_ERROR = 1e-4  # of logits, over the largest
READY_S = 120.0


class Side(NamedTuple):
    """A process that answers, and what to send it."""

    name: str
    process: subprocess.Popen[str]
    port: int
    requests: list[bytes]
    read_logits: Callable[[dict[str, str], bytes], np.ndarray]


# --- processes ---


@contextmanager
def start(words: list[str], **pipes: Any) -> Iterator[subprocess.Popen[str]]:
    """A process group on the core of the servers, ended with everything it started."""
    process = subprocess.Popen(
        ["taskset", "--cpu-list", str(SERVER_CORE), *words],
        start_new_session=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **pipes,
    )
    try:
        yield process
    finally:
        for sign in (signal.SIGCONT, signal.SIGTERM):
            os.killpg(process.pid, sign)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def turn(process: subprocess.Popen[str]) -> Iterator[None]:
    """The process runs; before and after, it is stopped."""
    os.killpg(process.pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGSTOP)


def find_free_port() -> int:
    """A port of loopback that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(port: int, path: str, process: subprocess.Popen[str]) -> None:
    """Until the server answers anything but 503."""
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5)
            return
        except urllib.error.HTTPError as error:
            if error.code != 503:
                return
        except OSError:
            pass
        if process.poll() is not None:
            sys.exit(f"{process.args} ended with {process.returncode}")
        time.sleep(0.2)
    sys.exit(f"{process.args} was not ready after {READY_S:.0f} s")


# --- sides ---


def open_phalanx(stack: ExitStack, file: Path, batch: int, images: np.ndarray) -> Side:
    """Our server, asked by the Open Inference Protocol with binary tensors."""
    port = find_free_port()
    words = ["serve", str(file), "--port", str(port), "--max-batch", str(batch)]
    process = stack.enter_context(start([sys.executable, "-m", "phalanx", *words, "--name", "m"]))
    wait_for(port, "/v2/health/ready", process)
    output = {"name": "logits", "parameters": {"binary_data": True}}
    requests = []
    for image in images:
        tensor = {"name": "input", "shape": [1, *image.shape], "datatype": "FP32"}
        tensor["parameters"] = {"binary_data_size": image.nbytes}
        head = json.dumps({"inputs": [tensor], "outputs": [output]}).encode()
        length = {"Inference-Header-Content-Length": str(len(head))}
        body = head + image.tobytes()
        requests.append(build_request("/v2/models/m/infer", body, headers=length))

    def read_logits(headers: dict[str, str], body: bytes) -> np.ndarray:
        return np.frombuffer(body[int(headers["inference-header-content-length"]) :], np.float32)

    return Side("phalanx", process, port, requests, read_logits)


def open_peer(stack: ExitStack, name: str, file: Path, batch: int, images: np.ndarray) -> Side:
    """LitServe or FastAPI."""
    port = find_free_port()
    words = [sys.executable, str(HERE / "peer_servers.py"), name, str(file), str(port), str(batch)]
    process = stack.enter_context(start(words))
    wait_for(port, "/health" if name == "litserve" else "/docs", process)
    bodies, headers = [image.tobytes() for image in images], {}
    if name == "litserve":
        head = b'--x\r\nContent-Disposition: form-data; name="input"; filename="input"\r\n\r\n'
        bodies = [head + body + b"\r\n--x--\r\n" for body in bodies]
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
    requests = [build_request("/infer", body, headers=headers) for body in bodies]
    return Side(name, process, port, requests, lambda _, body: np.frombuffer(body, np.float32))


def check_logits(sides: list[Side]) -> None:
    """All sides give the same logits for the same image, or there is nothing to compare."""

    async def ask(side: Side) -> np.ndarray:
        status, headers, body = await Connections(side.port).exchange(side.requests[0])
        if status != 200:
            sys.exit(f"{side.name} answers {status}: {body[:300]!r}")
        return side.read_logits(headers, body)

    logits = [asyncio.run(ask(side)) for side in sides]
    for side, values in zip(sides, logits, strict=True):
        error = np.abs(values - logits[0]).max() / np.abs(logits[0]).max()
        if error > MOST_ERROR:
            sys.exit(f"{side.name}: logits differ by {error:.2g} of the largest")


# --- what is measured ---


def call_directly(process: subprocess.Popen[str], order: str) -> list[float]:
    """The seconds of each call that the direct process makes."""
    assert process.stdin and process.stdout
    with turn(process):
        process.stdin.write(order + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())


def find_best_batch(direct: subprocess.Popen[str], rounds: int, seconds: float) -> Any:
    """The batch with the highest median rate, and the rates of all."""
    rates: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    for _ in range(rounds):
        for batch in BATCHES:
            calls = call_directly(direct, f"{batch} {seconds}")
            rates[batch].append(batch * len(calls) / sum(calls))
    return max(BATCHES, key=lambda batch: median(rates[batch])), rates


def measure_side(side: Side, *, clients: int, seconds: float, count: int | None = None) -> Any:
    """All answers of a closed loop; any that is not good ends the measurement."""
    with turn(side.process):
        load = run_closed_loop(
            side.port, side.requests, clients=clients, seconds=seconds, count=count
        )
        answers = asyncio.run(load)
    if set(count_statuses(answers)) != {200}:
        sys.exit(f"{side.name}: {count_statuses(answers)}")
    return answers


def measure_saturation(
    direct: subprocess.Popen[str], sides: list[Side], batch: int, words: argparse.Namespace
) -> dict[str, list[float]]:
    """Images/s of each side in turns; who is first moves on."""
    rates: dict[str, list[float]] = {"direct": [], **{side.name: [] for side in sides}}
    for number in range(words.rounds):
        order = [None, *sides]
        for side in order[number % len(order) :] + order[: number % len(order)]:
            if side is None:
                calls = call_directly(direct, f"{batch} {words.seconds}")
                rates["direct"].append(batch * len(calls) / sum(calls))
            else:
                answers = measure_side(side, clients=2 * batch, seconds=words.seconds)
                rates[side.name].append(measure_rate(answers, clients=2 * batch))
        print({name: round(found[-1], 2) for name, found in rates.items() if found}, flush=True)
    return rates


def measure_single(
    direct: subprocess.Popen[str], sides: list[Side], pairs: int, calls: int
) -> dict[str, list[float]]:
    """p50 in ms of one client at each side, and of onnxruntime at batch 1, in turns."""
    found: dict[str, list[float]] = {"direct": [], **{side.name: [] for side in sides}}
    for _ in range(pairs):
        found["direct"].append(1e3 * median(call_directly(direct, f"1 {calls} calls")))
        for side in sides:
            answers = measure_side(side, clients=1, seconds=0, count=calls)
            found[side.name].append(1e3 * median(find_latencies(answers)))
    return found


def run_wrk(side: Side, clients: int, seconds: float, folder: Path) -> float | None:
    """Requests a second that wrk counts; it sends one body again and again."""
    if shutil.which("wrk") is None:
        return None
    head, _, body = side.requests[0].partition(b"\r\n\r\n")
    (folder / "body").write_bytes(body)
    lines = head.decode().split("\r\n")
    path = lines[0].split(" ")[1]
    headers = dict(line.split(": ", 1) for line in lines[2:] if not line.startswith("Content-Len"))
    lua = ['wrk.method = "POST"', f'wrk.body = io.open("{folder}/body", "rb"):read("*a")']
    lua += [f'wrk.headers["{name}"] = "{value}"' for name, value in headers.items()]
    (folder / "post.lua").write_text("\n".join(lua))
    words = ["wrk", "-t1", f"-c{clients}", f"-d{seconds:.0f}s", "--timeout", "60s", "--latency"]
    words += ["-s", str(folder / "post.lua"), f"http://127.0.0.1:{side.port}{path}"]
    with turn(side.process):
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    print(done.stdout)
    if "Non-2xx" in done.stdout:
        sys.exit("wrk got answers other than 200")
    rate = re.search(r"Requests/sec:\s+([\d.]+)", done.stdout)
    assert rate
    return float(rate[1])


# --- the result ---


def make_figure(what: str, values: list[float], unit: str, digits: int = 3) -> dict[str, Any]:
    """A row of a result file: the median, and all values' range."""
    low, middle, high = (
        float(f"{value:.{digits}g}") for value in (min(values), median(values), max(values))
    )
    middle = min(max(middle, low), high)
    row = {"what": what, "value": middle, "unit": unit, "low": low, "high": high}
    return row | {"range": "all rounds", "n": len(values)}


def divide(a: list[float], b: list[float]) -> list[float]:
    """Ratios round by round."""
    return [x / y for x, y in zip(a, b, strict=True)]


def build_figures(
    alone: dict[int, list[float]],
    batch: int,
    rates: dict[str, list[float]],
    single: dict[str, list[float]],
) -> list[dict[str, Any]]:
    """All rows, ratios first."""
    peers = [name for name in rates if name not in ("direct", "phalanx")]
    rows = [
        make_figure(
            f"Phalanx at saturation over onnxruntime called directly, batch {batch}",
            divide(rates["phalanx"], rates["direct"]),
            "ratio",
        )
    ]
    for name in peers:
        words = f"Phalanx over {name}, at saturation"
        rows.append(make_figure(words, divide(rates["phalanx"], rates[name]), "ratio"))
    for name in ("phalanx", *peers):
        added = [a - b for a, b in zip(single[name], single["direct"], strict=True)]
        rows.append(make_figure(f"{name}, one client: added to onnxruntime's p50", added, "ms"))
    rows.append(make_figure("onnxruntime, batch 1: p50", single["direct"], "ms"))
    for name, values in rates.items():
        rows.append(make_figure(f"{name}, at saturation", values, "images/s"))
    for size, values in alone.items():
        rows.append(make_figure(f"onnxruntime called directly, batch {size}", values, "images/s"))
    return rows


def describe_run(figures: list[dict[str, Any]], words: argparse.Namespace) -> dict[str, Any]:
    """The result file."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    names = ("torch", "onnxruntime", "litserve", "fastapi", "uvicorn", "starlette")
    python = ".".join(map(str, sys.version_info[:3]))
    return {
        "title": "The server beside onnxruntime alone, LitServe and FastAPI",
        "page": "2026-11-serving.md",
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python scripts/serve_peers.py --rounds {words.rounds} "
        f"--seconds {words.seconds:g} --pairs {words.pairs}",
        "commit": commit.stdout.strip() or None,
        "hardware": "one core for the server, one for the client",
        "versions": {"torch": version("torch"), "python": python}
        | {name: version(name) for name in names[1:]},
        "figures": figures,
    }


def print_table(figures: list[dict[str, Any]]) -> None:
    """The rows as Markdown."""
    print("| measured | median | range | n |\n|---|---:|---|---:|")
    for row in figures:
        unit = "" if row["unit"] == "ratio" else f" {row['unit']}"
        print(
            f"| {row['what']} | {row['value']}{unit} | {row['low']} to {row['high']} | {row['n']} |"
        )


def make_model(folder: Path) -> Path:
    """ResNet-50 of 1,000 classes, trained for one step and exported as anybody would."""
    train = ["train", "synthetic-resnet50", "--steps", "1", "--batch-size", "2", "--device", "cpu"]
    train += ["--run-dir", str(folder / "run"), "--validation-mode", "none"]
    export = ["export", str(folder / "run"), "--format", "onnx", "--out", str(folder / "m.onnx")]
    for words in (train, export):
        subprocess.run([sys.executable, "-m", "phalanx", *words], check=True)
    return folder / "m.onnx"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, help="an exported model that takes a tensor")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each turn")
    parser.add_argument("--pairs", type=int, default=20, help="turns of one client")
    parser.add_argument("--calls", type=int, default=10, help="requests of such a turn")
    parser.add_argument("--out", type=Path, help="write the result file")
    words = parser.parse_args()
    os.sched_setaffinity(0, {CLIENT_CORE})
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = words.file or make_model(folder)
        direct = stack.enter_context(
            start(
                [sys.executable, str(HERE / "peer_servers.py"), "direct", str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        assert direct.stdout and direct.stdout.readline() == "ready\n"
        batch, alone = find_best_batch(direct, words.rounds, words.seconds / 4)
        print({size: round(median(values), 2) for size, values in alone.items()}, flush=True)
        shape = find_input_shape(file)
        images = np.random.default_rng(0).standard_normal((IMAGES, *shape), np.float32)
        sides = [open_phalanx(stack, file, batch, images)]
        sides += [open_peer(stack, name, file, batch, images) for name in ("litserve", "fastapi")]
        check_logits(sides)
        for process in chain([direct], (side.process for side in sides)):
            os.killpg(process.pid, signal.SIGSTOP)
        rates = measure_saturation(direct, sides, batch, words)
        single = measure_single(direct, sides, words.pairs, words.calls)
        figures = build_figures(alone, batch, rates, single)
        if (rate := run_wrk(sides[0], 2 * batch, words.seconds, folder)) is not None:
            figures.append(make_figure("phalanx, at saturation, as wrk counts", [rate], "images/s"))
    print_table(figures)
    if words.out:
        words.out.write_text(json.dumps(describe_run(figures, words), indent=2) + "\n")


def find_input_shape(file: Path) -> tuple[int, ...]:
    """Of one image."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return tuple(session.get_inputs()[0].shape[1:])


if __name__ == "__main__":
    main()
