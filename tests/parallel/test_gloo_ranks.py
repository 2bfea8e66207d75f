"""Supervisor and watchdog around real collectives; each rank imports torch, so these are slow."""

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from phalanx.parallel.supervisor import supervise

PROGRAM = Path(__file__).with_name("gloo_program.py")
RANKS, STEPS = 3, 1500  # more than they add between five kills
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quiet_torch(monkeypatch):
    # torch's own lines about peers that are gone are a page each
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")


def run_ranks(folder: Path, disturb, **options) -> tuple[int, list[str]]:
    said: list[str] = []
    threading.Thread(target=disturb, daemon=True).start()
    command = [sys.executable, str(PROGRAM), str(folder)]
    code = supervise(
        command, RANKS, progress=lambda: read_sum(folder), print_line=said.append, **options
    )
    return code, said


def read_sum(folder: Path) -> str:
    path = folder / "sum.txt"
    return path.read_text() if path.exists() else ""


def wait_for_ranks(folder: Path) -> list[int]:
    """Their processes, once all have begun."""
    files = [folder / f"{rank}.pid" for rank in range(RANKS)]
    while not all(file.exists() and file.read_text().endswith("\n") for file in files):
        time.sleep(0.01)
    return [int(file.read_text()) for file in files]


def test_ranks_killed_at_random_moments_continue_to_the_same_sum(tmp_path):
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")
    draws, kills = random.Random(seed), 5

    def kill_some() -> None:
        for _ in range(kills):
            pids = wait_for_ranks(tmp_path)
            time.sleep(draws.random() * 3)  # while they start, meet or add
            for rank in range(RANKS):
                (tmp_path / f"{rank}.pid").unlink()
            os.kill(draws.choice(pids), signal.SIGKILL)

    code, said = run_ranks(tmp_path, kill_some, max_restarts=kills)
    assert code == 0
    assert len(said) == kills and all("was killed by SIGKILL; all 3 ranks" in line for line in said)
    assert read_sum(tmp_path) == f"{STEPS} {6 * STEPS * (STEPS - 1) // 2}"


def test_a_stopped_rank_ends_all_and_every_stack_is_shown(tmp_path, capfd):
    def stop_one() -> None:
        while not read_sum(tmp_path):
            time.sleep(0.01)
        os.kill(wait_for_ranks(tmp_path)[1], signal.SIGSTOP)

    code, said = run_ranks(tmp_path, stop_one)
    shown = capfd.readouterr().err
    assert code == 8
    assert said == [
        "rank 1 is not responding and will be aborted; it hangs here:",
        "the ranks lost contact with each other; run the same command again to continue",
    ]
    for rank in (0, 2):
        assert f"rank {rank} of 3 on " in shown
    assert shown.count("no progress for 3 s, in step ") == 2
    assert shown.count("in all_reduce") >= 2 and "Fatal Python error: Aborted" in shown
