"""Promise 2 the hard way: SIGKILL at random moments, some inside a checkpoint write."""

import random
import signal
import time
from pathlib import Path

from test_resume import assert_same_run, summary_of

from small_runs import make_digits, run_phalanx, small_run, start_phalanx

KILLS = 20
LEAST_INSIDE_A_WRITE = 4
OPTIONS = {
    "batch-size": 8,
    "epochs": 60,
    "ckpts-per-epoch": 6,
    "logs-per-epoch": "1/2",  # sums since the last log point cross several checkpoints
    "keep": 2,
}


def test_twenty_kills_end_like_none(tmp_path):
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
    assert summary_of(killed)["steps"] == 60 * 24
    assert not list((killed / "checkpoints").glob(".*")), "a leftover of a killed write"
    assert_same_run(straight, killed)


def kill_once(words: list[str], run: Path, chance: random.Random, *, aim_at_write: bool) -> None:
    """Start a process and SIGKILL it, a random while after its first step or amid a save."""
    process = start_phalanx(*words)
    steps_before = newest_step(run)
    wait_for(lambda: newest_step(run) > steps_before, process)
    if aim_at_write:
        wait_for(lambda: bool(list((run / "checkpoints").glob(".part-step-*"))), process)
    else:
        time.sleep(chance.uniform(0, 0.4))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def newest_step(run: Path) -> int:
    """The newest whole checkpoint's step; 0 without one."""
    found = [int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")]
    return max(found, default=0)


def wait_for(condition, process) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
