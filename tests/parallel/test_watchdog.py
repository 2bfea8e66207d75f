"""A rank that hangs ends, and says where."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("watched_program.py")
HANG = "with open_watchdog():\n    wait_for_peers()"


def start(folder: Path, code: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(folder / "hang.txt"), code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_hang_is_reported_with_every_stack(tmp_path):
    code = """
threading.Thread(target=wait_for_peers, name="reader", daemon=True).start()
with open_watchdog():
    wait_for_peers()
"""
    process = start(tmp_path, code)
    _, shown = process.communicate(timeout=20)
    assert process.returncode == 8
    lines = shown.splitlines()
    where = "step 12\\u001b[2J"
    assert lines[0] == f"rank 1 of 4 on {socket.gethostname()}: no progress for 0.1 s, in {where}"
    for thread in ("MainThread", "reader"):
        start_of = lines.index(f"  thread {thread}:")
        stack = lines[start_of + 1 :]
        end = next((i for i, line in enumerate(stack) if line.startswith("  thread")), len(stack))
        assert stack[:end][-1].endswith(", in wait_for_peers"), shown
    assert (tmp_path / "hang.txt").read_text() == shown


def test_a_hang_of_a_run_that_can_go_on_says_how(tmp_path):
    process = start(
        tmp_path, HANG.replace("()", '(find_resume_command=lambda: "phalanx go on")', 1)
    )
    _, shown = process.communicate(timeout=20)
    assert process.returncode == 75
    assert shown.splitlines()[-1] == (
        f"phalanx: rank 1 of 4 on {socket.gethostname()}: another rank, or the network, is gone or "
        "hangs; continue with: phalanx go on"
    )


def test_beats_keep_a_rank_alive_and_a_block_that_is_left_is_not_watched(tmp_path):
    code = """
with open_watchdog(seconds=0.2) as dog:
    for _ in range(25):
        time.sleep(0.01)
        dog.beat()
time.sleep(0.22)
print("done")
"""
    process = start(tmp_path, code)
    assert process.communicate(timeout=20) == ("done\n", "")
    assert process.returncode == 0
    assert not (tmp_path / "hang.txt").exists()


@pytest.mark.parametrize(
    "describe", ["lambda: 1 / 0", pytest.param("wait_for_peers", marks=pytest.mark.slow)]
)
def test_a_hang_ends_even_where_it_cannot_be_described(describe, tmp_path):
    process = start(tmp_path, f"with open_watchdog(describe={describe}):\n    wait_for_peers()")
    _, shown = process.communicate(timeout=20)
    assert process.returncode == 8
    if describe != "wait_for_peers":
        assert "no progress for 0.1 s, in an unknown place\n" in shown
        assert ", in wait_for_peers\n" in shown


def test_a_hang_that_nobody_reads_about_is_in_the_report(tmp_path):
    process = start(tmp_path, f"import os\nos.close(2)\n{HANG}")
    assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 8
    assert ", in wait_for_peers\n" in (tmp_path / "hang.txt").read_text()


@pytest.mark.slow
def test_a_hang_ends_where_its_report_cannot_be_written(tmp_path):
    (tmp_path / "hang.txt").mkdir()
    process = start(tmp_path, HANG)
    _, shown = process.communicate(timeout=20)
    assert process.returncode == 8
    assert ", in wait_for_peers\n" in shown and "Error" not in shown


@pytest.mark.slow
def test_a_process_that_was_stopped_for_a_while_does_not_hang(tmp_path):
    code = """
with open_watchdog(seconds=0.6):
    print("inside", flush=True)
    for _ in range(30):
        time.sleep(0.01)
print("done")
"""
    process = start(tmp_path, code)
    assert process.stdout is not None and process.stdout.readline() == "inside\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.8)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=20) == ("done\n", "")
