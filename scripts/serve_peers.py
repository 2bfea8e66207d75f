"""`phalanx serve` compared with onnxruntime called directly, LitServe and a plain FastAPI handler.

    python scripts/serve_peers.py [--file MODEL.onnx] [--rounds 5] [--seconds 20] [--pairs 20]
                                  [--out results.json]

One ONNX file (ResNet-50 at 224 px unless another is given), tensors in, logits out. The server has
one core, the client another. First onnxruntime alone at batches of 1 to 32: the fastest is the
servers' maximum batch (or --batch). Then, alternating: clients without a pause, two batches' worth;
and one client. Sides that wait for their turn are stopped (SIGSTOP), so that none disturbs another.
Every side must give the same logits before anything is timed. Besides wall-clock figures there are
those of CPU time, which other work on the machine disturbs far less: the best that an otherwise
idle core could give. Finally `wrk`, as an independent client, if it is installed.

Needs litserve, fastapi, uvicorn and two cores. Use an idle machine.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "serve"))

from serve_sides import (  # noqa: E402
    Side,
    check_logits,
    open_direct,
    open_peer,
    open_phalanx,
    read_cpu_s,
    turn,
)

from http_load import (  # noqa: E402
    Answer,
    count_statuses,
    find_latencies,
    measure_rate,
    run_closed_loop,
)

BATCHES = (1, 2, 4, 8, 16, 32)
CLIENT_CORE = 1
IMAGES = 8  # different ones, sent in rotation
DIRECT = "onnxruntime"
PEERS = {"litserve": "LitServe", "fastapi": "FastAPI"}
VERSIONS = ("torch", "onnxruntime", "litserve", "fastapi", "uvicorn", "starlette")


class Turn(NamedTuple):
    """The result of one turn of a side."""

    rate: float  # images/s, by the wall clock
    p50_ms: float
    cpu_ms: float  # CPU time per image


Turns = dict[str, list[Turn]]


# --- what is measured ---


def call_directly(process: subprocess.Popen[str], batch: int, order: str) -> Turn:
    """A turn of onnxruntime alone."""
    assert process.stdin and process.stdout
    with turn(process):
        before = read_cpu_s(process)
        process.stdin.write(f"{batch} {order}\n")
        process.stdin.flush()
        calls = json.loads(process.stdout.readline())
        cpu_s = read_cpu_s(process) - before
    images = batch * len(calls)
    return Turn(images / sum(calls), 1e3 * median(calls), 1e3 * cpu_s / images)


def load_side(side: Side, *, clients: int, seconds: float, count: int | None = None) -> Turn:
    """A turn of a server; any failed request ends the measurement."""
    with turn(side.process):
        before = read_cpu_s(side.process)
        load = run_closed_loop(
            side.port, side.requests, clients=clients, seconds=seconds, count=count
        )
        answers: list[Answer] = asyncio.run(load)
        cpu_s = read_cpu_s(side.process) - before
    if set(count_statuses(answers)) != {200}:
        sys.exit(f"{side.name}: {count_statuses(answers)}")
    p50_ms = 1e3 * median(find_latencies(answers))
    rate = 0.0 if count else measure_rate(answers, clients=clients)
    return Turn(rate, p50_ms, 1e3 * cpu_s / len(answers))


def measure_batches(direct: subprocess.Popen[str], rounds: int, seconds: float) -> Turns:
    """onnxruntime alone at every batch size, alternating."""
    found: Turns = {str(batch): [] for batch in BATCHES}
    for _ in range(rounds):
        for batch in BATCHES:
            found[str(batch)].append(call_directly(direct, batch, str(seconds)))
    return found


def measure_sides(
    direct: subprocess.Popen[str], sides: list[Side], rounds: int, *, batch: int,
    seconds: float, calls: int | None = None,
) -> Turns:  # fmt: skip
    """All sides alternating, with a rotating start; with `calls`, one client and batch 1."""
    found: Turns = {DIRECT: [], **{side.name: [] for side in sides}}
    for number in range(rounds):
        order = [None, *sides]
        for side in order[number % len(order) :] + order[: number % len(order)]:
            if side is None:
                amount = f"{calls} calls" if calls else str(seconds)
                found[DIRECT].append(call_directly(direct, 1 if calls else batch, amount))
            else:
                clients = 1 if calls else count_clients(batch)
                loaded = load_side(side, clients=clients, seconds=seconds, count=calls)
                found[side.name].append(loaded)
        print({name: f"{turns[-1].p50_ms:.1f} ms" for name, turns in found.items()}, flush=True)
    return found


def count_clients(batch: int) -> int:
    """Enough clients to fill the next batch in time: two batches' worth, at least eight."""
    return max(8, 2 * batch)


def run_wrk(side: Side, clients: int, seconds: float, folder: Path) -> float | None:
    """Requests/s that wrk counts; it sends the same body again and again."""
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


def make_figure(what: str, values: list[float], unit: str) -> dict[str, Any]:
    """A row of a result file: the median, and the range of all values."""
    low, middle, high = (
        float(f"{value:.3g}") for value in (min(values), median(values), max(values))
    )
    row = {"what": what, "value": middle, "unit": unit, "low": low, "high": high}
    return row | {"range": "all rounds", "n": len(values)}


def compare(turns: Turns, name: str, other: str, field: str) -> list[float]:
    """Ratios of two sides, round by round; above 1, the first is better."""
    pairs = zip(turns[name], turns[other], strict=True)
    ratios = [getattr(a, field) / getattr(b, field) for a, b in pairs]
    return ratios if field == "rate" else [1 / ratio for ratio in ratios]


def build_figures(alone: Turns, batch: int, loaded: Turns, single: Turns) -> list[dict[str, Any]]:
    """All rows, ratios first."""
    rows = []
    others = {DIRECT: f"onnxruntime called directly, batch {batch}"} | PEERS
    for field, words in (("rate", ""), ("cpu_ms", ", by computing time")):
        for name, title in others.items():
            ratios = compare(loaded, "phalanx", name, field)
            rows.append(make_figure(f"Phalanx at saturation over {title}{words}", ratios, "ratio"))
    names = {"phalanx": "Phalanx"} | PEERS
    for field, words in (("p50_ms", "p50"), ("cpu_ms", "computing time")):
        for name, title in names.items():
            pairs = zip(single[name], single[DIRECT], strict=True)
            added = [getattr(a, field) - getattr(b, field) for a, b in pairs]
            what = f"{title}, one client: added to onnxruntime's {words}"
            rows.append(make_figure(what, added, "ms"))
    rows.append(make_figure("onnxruntime, batch 1: p50", [t.p50_ms for t in single[DIRECT]], "ms"))
    for name, title in names.items():
        rates = [one.rate for one in loaded[name]]
        rows.append(make_figure(f"{title} at saturation", rates, "images/s"))
    for size, turns in alone.items():
        what = f"onnxruntime called directly, batch {size}"
        rows.append(make_figure(what, [one.rate for one in turns], "images/s"))
    return rows


def describe_run(figures: list[dict[str, Any]], words: argparse.Namespace) -> dict[str, Any]:
    """The result file."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "title": "The server beside onnxruntime alone, LitServe and FastAPI",
        "page": "2026-11-serving.md",
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python scripts/serve_peers.py --rounds {words.rounds} "
        f"--seconds {words.seconds:g} --pairs {words.pairs} --calls {words.calls}",
        "commit": commit.stdout.strip() or None,
        "hardware": words.hardware,
        "versions": {"python": ".".join(map(str, sys.version_info[:3]))}
        | {name: version(name) for name in VERSIONS},
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
    """ResNet-50 with 1,000 classes, trained for one step and exported with the defaults."""
    train = ["train", "synthetic-resnet50", "--steps", "1", "--batch-size", "2", "--device", "cpu"]
    train += ["--run-dir", str(folder / "run"), "--validation-mode", "none", "--lr", "0.001"]
    export = ["export", str(folder / "run"), "--format", "onnx", "--out", str(folder / "m.onnx")]
    for words in (train, export):
        subprocess.run([sys.executable, "-m", "phalanx", *words], check=True)
    return folder / "m.onnx"


def find_input_shape(file: Path) -> tuple[int, ...]:
    """The input shape of one image."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return tuple(session.get_inputs()[0].shape[1:])


def read_words() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, help="an exported model that takes a tensor")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each turn")
    parser.add_argument("--pairs", type=int, default=20, help="turns of one client")
    parser.add_argument("--calls", type=int, default=10, help="requests of such a turn")
    parser.add_argument("--batch", type=int, help="of the servers  [the fastest of onnxruntime]")
    parser.add_argument("--out", type=Path, help="write the result file")
    parser.add_argument(
        "--hardware", default="one core for the server, one for the client", help="for that file"
    )
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    words = read_words()
    os.sched_setaffinity(0, {CLIENT_CORE})
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = words.file or make_model(folder)
        direct = open_direct(stack, file)
        alone = measure_batches(direct, words.rounds, words.seconds / 4)
        fastest = min(BATCHES, key=lambda size: median(t.cpu_ms for t in alone[str(size)]))
        batch = words.batch or fastest
        print({size: round(median(t.rate for t in turns), 2) for size, turns in alone.items()})
        images = np.random.default_rng(0).standard_normal(
            (IMAGES, *find_input_shape(file)), np.float32
        )
        sides = [open_phalanx(stack, file, batch, images)]
        sides += [open_peer(stack, name, file, batch, images) for name in PEERS]
        check_logits(sides)
        for side in sides:
            os.killpg(side.process.pid, signal.SIGSTOP)
        loaded = measure_sides(direct, sides, words.rounds, batch=batch, seconds=words.seconds)
        single = measure_sides(direct, sides, words.pairs, batch=1, seconds=0, calls=words.calls)
        figures = build_figures(alone, batch, loaded, single)
        if (rate := run_wrk(sides[0], count_clients(batch), words.seconds, folder)) is not None:
            figures.append(make_figure("Phalanx at saturation, as wrk counts", [rate], "images/s"))
    print_table(figures)
    if words.out:
        words.out.write_text(json.dumps(describe_run(figures, words), indent=2) + "\n")


if __name__ == "__main__":
    main()
