"""The server under load: ten minutes at 80 % of what it can do, and three times as much as that.

ResNet-50 at 224 px by onnxruntime, the server on one core, the clients on another. For a shorter
try: PHALANX_LOAD_SECONDS (600 by default), and PHALANX_LOAD_MODEL, an exported file that takes a
tensor (by default one is trained for a step and exported).
"""

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

pytest.importorskip("onnxruntime", reason="needs the packages of phalanx[serve]")

from hostile_bodies import infer_body
from http_load import (
    build_request,
    count_statuses,
    describe_load,
    find_latencies,
    find_percentile,
    measure_rate,
    run_closed_loop,
    run_open_loop,
)
from served_model import Server, open_server

SECONDS = float(os.environ.get("PHALANX_LOAD_SECONDS", "600"))
MODEL = os.environ.get("PHALANX_LOAD_MODEL")
MAX_BATCH, MAX_QUEUE = 8, 32
SERVER_CORE, CLIENT_CORE = 0, 1
SATURATION_S = max(15.0, SECONDS / 20)
OVERLOAD_S = max(20.0, SECONDS / 10)
MOST_REFUSAL_S = 0.25  # p99 of a 429; it waits for its turn on a core that is always busy
pytestmark = pytest.mark.slow


def make_model(folder: Path) -> Path:
    run, file = folder / "run", folder / "resnet50.onnx"
    train = ["train", "synthetic-resnet50", "--steps=1", "--batch-size=2", "--device=cpu"]
    train += [f"--run-dir={run}", "--validation-mode=none", "--lr=0.001"]
    for words in (train, ["export", run, "--format", "onnx", "--out", file]):
        subprocess.run([sys.executable, "-m", "phalanx", *map(str, words)], check=True)
    return file


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs a core for the server and one for the clients")
    folder = tmp_path_factory.mktemp("load")
    file = Path(MODEL) if MODEL else make_model(folder)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {CLIENT_CORE})
    words = [file, "--max-batch", MAX_BATCH, "--max-queue", MAX_QUEUE]
    try:
        with open_server(words, folder, core=SERVER_CORE) as started:
            yield started
    finally:
        os.sched_setaffinity(0, cores)


@pytest.fixture(scope="module")
def requests(server: Server) -> list[bytes]:
    path, headers, body = infer_body(server.find_target())
    return [build_request(path, body, headers=headers)]


@pytest.fixture(scope="module")
def saturation(server: Server, requests: list[bytes]) -> float:
    """Answers a second with as many clients as may wait without one being refused."""
    load = run_closed_loop(server.port, requests, clients=MAX_QUEUE, seconds=SATURATION_S)
    answers = asyncio.run(load)
    rate = measure_rate(answers, clients=MAX_QUEUE)
    print(f"\nsaturation: {rate:.2f}/s;", describe_load(answers))
    assert set(count_statuses(answers)) == {200}
    return rate


def test_ten_minutes_at_80_percent(
    server: Server, requests: list[bytes], saturation: float
) -> None:
    memory: list[float] = []
    load = run_open_loop(
        server.port,
        requests,
        rate=0.8 * saturation,
        seconds=SECONDS,
        each=lambda answer: memory.append(server.measure().memory_mib),
    )
    answers = asyncio.run(load)
    print(f"80 % of {saturation:.2f}/s:", describe_load(answers))
    assert set(count_statuses(answers)) == {200}
    p50, p99 = (find_percentile(find_latencies(answers), percent) for percent in (50, 99))
    assert p99 < 3 * p50
    quarter = len(memory) // 4
    early, late = median(memory[quarter : 2 * quarter]), median(memory[-quarter:])
    print(f"memory: {early:.1f} MiB in the second quarter, {late:.1f} in the last")
    assert late - early < 0.02 * early


def test_arrivals_by_chance_wait_no_longer_than_a_queue_must(
    server: Server, requests: list[bytes], saturation: float
) -> None:
    """Requests of many strangers come in bursts; what that costs at least is known (M/D/1)."""
    rate, seconds = 0.8 * saturation, SECONDS / 3
    answers = asyncio.run(
        run_open_loop(server.port, requests, rate=rate, seconds=seconds, poisson=True)
    )
    print("the same by chance:", describe_load(answers))
    assert set(count_statuses(answers)) <= {200, 429}
    ideal = simulate_queue(sorted(a.due_s for a in answers), 1 / saturation)
    p99 = find_percentile(find_latencies(answers), 99)
    print(f"p99 {1e3 * p99:.0f} ms, of an ideal queue {1e3 * find_percentile(ideal, 99):.0f} ms")
    assert p99 < 2 * find_percentile(ideal, 99)


def simulate_queue(arrivals: list[float], service_s: float) -> list[float]:
    """Seconds from arrival to answer where one after the other takes the same time."""
    free, found = 0.0, []
    for due in arrivals:
        free = max(free, due) + service_s
        found.append(free - due)
    return found


def test_three_times_too_much(server: Server, requests: list[bytes], saturation: float) -> None:
    """What is accepted waits for a full queue and no longer; the rest is refused at once.

    The bound: an accepted request has at most MAX_QUEUE images before it in the queue, itself
    among them, and the batch at work, and these take their time at the rate of saturation, whatever
    else comes. A quarter more is for the refusals, which cost the same core.
    """
    before = server.measure()
    answers = asyncio.run(
        run_open_loop(server.port, requests, rate=3 * saturation, seconds=OVERLOAD_S)
    )
    print("three times too much:", describe_load(answers))
    counts = count_statuses(answers)
    assert set(counts) == {200, 429}
    assert server.process.poll() is None
    ends = [a.due_s + a.latency_s for a in answers if a.status == 200]
    accepted = sum(OVERLOAD_S / 4 < end < OVERLOAD_S for end in ends) / (0.75 * OVERLOAD_S)
    print(f"accepted {accepted:.2f}/s of {saturation:.2f}/s")
    assert accepted > 0.85 * saturation
    refused = find_latencies(answers, status=429)
    print(f"429: ms: p50 {1e3 * median(refused):.1f}, p99 {1e3 * find_percentile(refused, 99):.1f}")
    assert find_percentile(refused, 99) < MOST_REFUSAL_S
    assert all(int(a.headers["retry-after"]) >= 1 for a in answers if a.status == 429)
    full = (MAX_QUEUE + MAX_BATCH) / saturation
    p99 = find_percentile(find_latencies(answers), 99)
    print(f"accepted: p99 {p99:.2f} s; a full queue takes {full:.2f} s")
    assert p99 < 1.25 * full
    later = asyncio.run(run_closed_loop(server.port, requests, clients=1, seconds=0, count=10))
    assert set(count_statuses(later)) == {200}
    assert server.measure().memory_mib < before.memory_mib + 64


def test_the_simulated_queue() -> None:
    draw, arrivals, now = random.Random(0), [], 0.0
    for _ in range(50_000):
        now += draw.expovariate(0.8)
        arrivals.append(now)
    mean = sum(simulate_queue(arrivals, 1.0)) / len(arrivals)
    assert abs(mean - (1 + 0.8 / (2 * 0.2))) < 0.2  # Pollaczek and Khinchine
