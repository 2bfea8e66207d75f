import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from phalanx.data.loading.loader import Loader
from phalanx.data.loading.reader import InputSpec
from phalanx.data.transforms.transform import TransformSpec
from phalanx.errors import DataError
from phalanx.plan.order import Order

SPEC = InputSpec(
    data="embedded",
    image_size=28,
    transform=TransformSpec(augment="pad-crop"),
    seed=1,
    order=Order(images=8000, global_batch=64, seed=1),
)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

PARENT = """
import sys, time
from phalanx.data.loading.reader import InputSpec
from phalanx.data.loading.loader import Loader
from phalanx.data.transforms.transform import TransformSpec
from phalanx.plan.order import Order
order = Order(images=4000, global_batch=512, seed=1)
spec = InputSpec(data="generated", image_size=512, transform=TransformSpec(augment="resized-crop"),
                 seed=1, order=order)
loader = Loader(spec, workers=3)
steps = loader.steps_from(0, 1000, micro_batch=512)
{wait}
print(*(worker.process.pid for worker in loader._pool.workers), flush=True)
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
    with Loader(SPEC, workers=2) as loader:
        steps = loader.steps_from(0, 10_000, micro_batch=64)
        next(steps)
        yield loader, steps


def pids(loader):
    return [worker.process.pid for worker in loader._pool.workers]


@LINUX
@pytest.mark.parametrize(
    "wait", ["loader._open_pool()", "next(steps)"], ids=["starting", "working"]
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
        os.kill(pid, signal.SIGHUP)
    for _ in range(50):
        next(steps)
    assert all(is_alive(pid) for pid in pids(loader))


@LINUX
def test_workers_leave_nothing_behind_and_never_load_torch():
    before = set(os.listdir("/dev/shm"))
    with Loader(SPEC, workers=2) as loader:
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
    code = "import sys; import phalanx.data.loading.worker; print('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert answer.stdout == "False\n"


def same_as_without_workers(steps, count: int) -> bool:
    """Whether the next steps are those that no worker ever touched."""
    with Loader(SPEC, workers=0) as plain:
        twins = plain.steps_from(0, count, micro_batch=64)
        return all(np.array_equal(next(steps)[0].pixels, twin[0].pixels) for twin in list(twins))


def test_a_killed_worker_is_named_and_started_again():
    with Loader(SPEC, workers=2) as loader:
        steps = loader.steps_from(0, 60, micro_batch=64)
        next(steps)
        victim = pids(loader)[1]
        os.kill(victim, signal.SIGKILL)
        for _ in range(20):
            next(steps)
        (note,) = loader.problems["train"].notes.values()
        assert f"(pid {victim}) was killed by SIGKILL; it was restarted" in note
        os.kill(pids(loader)[1], signal.SIGKILL)
        said = r"was killed by SIGKILL; the one before it was killed by SIGKILL.*--workers 0"
        with pytest.raises(DataError, match=said):
            for _ in range(30):
                next(steps)


def test_batches_are_the_same_when_a_worker_had_to_be_started_again():
    for blow in (signal.SIGKILL, signal.SIGSTOP):  # gone, and hung
        with Loader(SPEC, workers=2) as loader:
            steps = loader.steps_from(0, 20, micro_batch=64)
            worker = loader._open_pool().workers[0]
            worker.answer_timeout_s = 0.5  # of this one alone: the next has all the time it needs
            os.kill(worker.process.pid, blow)
            assert same_as_without_workers(steps, 20), blow
            assert len(loader.problems["train"].notes) == 1


def test_an_unforeseen_error_in_a_worker_brings_its_traceback(started):
    loader, _ = started
    pool = loader._pool
    task = {
        "split": "train",
        "positions": [0],
        "size": 28,
        "slot": 10_000,
        "cores_only": [],
        "by_gpu": True,
    }
    pool._send(0, task)
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*IndexError.*10000"):
        while True:
            pool._receive(0)


def test_the_ring_is_bounded(started):
    loader, steps = started
    for _ in range(20):
        next(steps)
    pool = loader._pool
    under_way = sum(len(queue) for queue in pool.pending)
    assert under_way <= pool.depth == 2 * 4 + 2 * 4  # chunks for each worker, and two steps
    assert pool.submitted <= 21 * 4 + pool.depth
