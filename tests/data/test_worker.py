import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.data.batches import Recipe
from phalanx.data.loader import Loader
from phalanx.errors import DataError
from phalanx.plan.order import Order

RECIPE = Recipe(
    data="embedded",
    image_size=28,
    augment="pad-crop",
    seed=1,
    order=Order(images=8000, global_batch=64, seed=1),
)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

PARENT = """
import sys, time
from phalanx.data.batches import Recipe
from phalanx.data.loader import Loader
from phalanx.plan.order import Order
order = Order(images=4000, global_batch=512, seed=1)
recipe = Recipe(data="generated", image_size=512, augment="resized-crop", seed=1, order=order,
                generated_images=4000)
loader = Loader(recipe, workers=3)
steps = loader.steps_from(0, 1000, micro_batch=512)
{wait}
print(*(process.pid for process in loader._pool.processes), flush=True)
time.sleep(60)
"""


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def started():
    with Loader(RECIPE, workers=2) as loader:
        steps = loader.steps_from(0, 10_000, micro_batch=64)
        next(steps)
        yield loader, steps


def pids(loader):
    return [process.pid for process in loader._pool.processes]


@LINUX
@pytest.mark.parametrize(
    "wait", ["loader._started_pool()", "next(steps)"], ids=["starting", "working"]
)
def test_workers_die_with_a_killed_parent(wait):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(wait=wait)],
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    workers = [int(word) for word in parent.stdout.readline().split()]
    assert len(workers) == 3 and all(is_alive(pid) for pid in workers)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_until(lambda: not any(is_alive(pid) for pid in workers), 3.0)


@LINUX
def test_signals_for_the_parent_do_not_end_workers(started):
    loader, steps = started
    for pid in pids(loader):
        assert os.getpgid(pid) != os.getpgid(0)  # Ctrl-C in a terminal does not reach it
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    for _ in range(50):
        next(steps)
    assert all(is_alive(pid) for pid in pids(loader))


@LINUX
def test_workers_leave_nothing_behind_and_never_load_torch():
    before = set(os.listdir("/dev/shm"))
    with Loader(RECIPE, workers=2) as loader:
        next(loader.steps_from(0, 10, micro_batch=64))
        during = set(os.listdir("/dev/shm"))
        workers = pids(loader)
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in workers]
    assert during == before
    assert all("numpy" in text and "memfd:phalanx" in text for text in maps)
    assert not any("torch" in text for text in maps)
    assert not any(is_alive(pid) for pid in workers)
    loader.close()  # a second time does nothing


def test_modules_of_a_worker_do_not_import_torch():
    code = "import sys, phalanx.data.worker, phalanx.data.loader; print('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert answer.stdout == "False\n"


def test_a_killed_worker_is_named(started):
    loader, steps = started
    victim = pids(loader)[1]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(DataError, match=rf"\(pid {victim}\) was killed by SIGKILL.*--workers 0"):
        for _ in range(100):
            next(steps)


def test_an_unforeseen_error_in_a_worker_brings_its_traceback(started):
    loader, _ = started
    pool = loader._pool
    pool._send(0, {"split": "train", "keys": [0], "slot": 10_000})
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*IndexError.*10000"):
        while True:
            pool._receive(0)


def test_the_ring_is_bounded(started):
    loader, steps = started
    for _ in range(20):
        next(steps)
    pool = loader._pool
    under_way = sum(len(queue) for queue in pool.waiting)
    assert under_way <= pool.depth == 2 * 4 + 2 * 4  # chunks for each worker, and two steps
    assert pool.submitted <= 21 * 4 + pool.depth
