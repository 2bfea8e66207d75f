"""Promise 2 the hard way: killed before any write, or at random moments, a run ends the same."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_resume import assert_same_run

from small_runs import make_digits, read_result, run_phalanx, small_run, start_phalanx

HERE = Path(__file__).parent
KILLED = 137
KILLS = 20
LEAST_INSIDE_A_WRITE = 4
OPTIONS = {
    "batch-size": 8,
    "epochs": 60,
    "ckpts-per-epoch": 6,
    "logs-per-epoch": "1/2",  # sums since the last log point cross several checkpoints
    "keep": 2,
}


def test_a_kill_before_any_write_ends_like_none(digits, tmp_path):
    paths = os.pathsep.join([str(HERE.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, HERE / "crash_points.py", digits, tmp_path],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    points = json.loads(done.stdout)
    wanted = ("metrics.jsonl", "manifest.json", "os.rename checkpoints", "best", "summary.json")
    for word in wanted:
        assert any(word in point["write"] for point in points), f"no kill before {word}"
    assert len(points) > 40, "the hook went blind"
    for point in points:
        # the saver's thread may have made its writes earlier or later than in the straight run
        assert point["killed"] in (KILLED, 0) and point["resumed"] == 0, (point, done.stderr)
        run = tmp_path / point["run"]
        assert_same_run(tmp_path / "straight", run)
        assert (run / "averaged.csv").read_bytes() == (
            tmp_path / "straight" / "averaged.csv"
        ).read_bytes()
        assert not [*(run / "checkpoints").glob(".*"), *run.glob(".*")], point
    assert sum(point["killed"] == KILLED for point in points) > 0.9 * len(points)


@pytest.mark.slow
def test_twenty_random_kills_end_like_none(tmp_path):
    data = make_digits(tmp_path / "data", train=192, valid=40)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert run_phalanx(*small_run(data, straight, **OPTIONS)).returncode == 0
    chance = random.Random(0)
    words = small_run(data, killed, **OPTIONS)
    inside = 0
    for number in range(KILLS):
        kill_once(words, killed, chance, aim_at_write=number % 2 == 0)
        inside += bool(list((killed / "checkpoints").glob(".part-*")))
        assert not (killed / "summary.json").exists(), f"finished before kill {number}: too fast"
        words = ["train", "--resume", str(killed)]
    assert inside >= LEAST_INSIDE_A_WRITE, f"only {inside} kills hit a checkpoint being written"
    assert run_phalanx(*words).returncode == 0
    assert read_result(killed)["steps"] == 60 * 24
    assert not list((killed / "checkpoints").glob(".*")), "a leftover of a killed write"
    assert_same_run(straight, killed)


def kill_once(words: list[str], run: Path, chance: random.Random, *, aim_at_write: bool) -> None:
    """Start a process and SIGKILL it, a random while after its first step or amid a save."""
    process = start_phalanx(*words)
    steps_before = newest_step(run)
    wait_for(lambda: newest_step(run) > steps_before, process, sleep_s=0.01)
    if aim_at_write:  # which takes a millisecond or two
        part = run / "checkpoints"
        wait_for(lambda: bool(list(part.glob(".part-step-*"))), process, sleep_s=0.0002)
    else:
        time.sleep(chance.uniform(0, 0.4))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def newest_step(run: Path) -> int:
    """The newest whole checkpoint's step; 0 without one."""
    found = [int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")]
    return max(found, default=0)


def wait_for(condition, process, *, sleep_s: float) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(sleep_s)
