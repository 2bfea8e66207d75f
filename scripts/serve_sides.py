"""The processes that serve_peers.py measures: each on one core, stopped until its turn comes."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "serve"))

from http_load import Connections, build_request  # noqa: E402

SERVER_CORE = 0
MOST_ERROR = 1e-4  # of logits, relative to the largest
READY_S = 120.0


class Side(NamedTuple):
    """A server process, and what to send to it."""

    name: str
    process: subprocess.Popen[str]
    port: int
    requests: list[bytes]
    read_logits: Callable[[dict[str, str], bytes], np.ndarray]


# --- processes ---


@contextmanager
def start(words: list[str], **pipes: Any) -> Iterator[subprocess.Popen[str]]:
    """A process group on the servers' core, ended with everything it started."""
    process = subprocess.Popen(
        ["taskset", "--cpu-list", str(SERVER_CORE), *words],
        start_new_session=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ORT_DISABLE_TELEMETRY": "1"},
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
    """Within the block the process runs; otherwise it is stopped."""
    os.killpg(process.pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGSTOP)


def read_cpu_s(process: subprocess.Popen[str]) -> float:
    """The CPU seconds of the processes of its group."""
    seconds = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[2]) == process.pid:
                # the CPU clock of another process, derived from its id like clock_getcpuclockid(3)
                seconds += time.clock_gettime((~int(stat.parent.name) << 3) | 2)
        except OSError:  # ended meanwhile
            continue
    return seconds


def find_free_port() -> int:
    """A free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(port: int, path: str, process: subprocess.Popen[str]) -> None:
    """Wait until the server answers anything but 503."""
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


def open_direct(stack: ExitStack, file: Path) -> subprocess.Popen[str]:
    """onnxruntime alone, controlled through its standard input."""
    words = [sys.executable, str(HERE / "peer_servers.py"), "direct", str(file)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = stack.enter_context(start(words, **pipes))
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


def open_phalanx(stack: ExitStack, file: Path, batch: int, images: np.ndarray) -> Side:
    """Our server, through the Open Inference Protocol with binary tensors."""
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
    """Raise unless all sides give the same logits for the same image."""

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
