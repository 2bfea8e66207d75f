"""The processes that share work: they end with their parent, and import no stranger's code."""

import os
import signal
import subprocess
import sys

from phalanx.data.process_pool import SpawnExecutor
from small_photos import write_photos
from small_runs import run_phalanx

POOL = """
import time
from phalanx.data.process_pool import SpawnExecutor
executor = SpawnExecutor(1)
executor.submit(print, "begun", flush=True).result()
executor.submit(time.sleep, 600).result()
"""


def test_a_pools_processes_end_when_their_parent_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", POOL], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "begun\n"
    parent.kill()
    parent.communicate(timeout=60)  # its output ends when the last process that holds it has left


def test_a_pool_leaves_the_environment_as_it_was(monkeypatch):
    for value in ("", None):
        monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
        if value is not None:
            monkeypatch.setenv("PYTHONSAFEPATH", value)
        with SpawnExecutor(1) as executor:
            assert executor.submit(os.getenv, "PYTHONSAFEPATH").result() == "1"
        assert os.environ.get("PYTHONSAFEPATH") == value


def test_a_terminals_signals_are_for_the_parent_of_a_pool():
    with SpawnExecutor(1) as executor:
        for number in (signal.SIGINT, signal.SIGHUP):
            assert executor.submit(signal.getsignal, number).result() is signal.SIG_IGN
            assert number in executor.submit(signal.pthread_sigmask, signal.SIG_BLOCK, ()).result()


def test_code_in_the_current_folder_is_never_imported(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    write_photos(tmp_path / "photos")
    for module in ("struct", "yaml", "numpy"):  # of the processes of a pool, and of our own
        (tmp_path / f"{module}.py").write_text("open('ran', 'w').close()\n1 / 0\n")
    done = run_phalanx("data", "verify", "photos", "--workers", "2", cwd=tmp_path)
    assert not (tmp_path / "ran").exists()
    assert done.returncode == 0, done.stderr


def _warn_of(name: str) -> None:
    print(f"{name}: odd", file=sys.stderr, flush=True)


def test_a_name_that_a_process_prints_cannot_steer_the_terminal(capfd):
    with SpawnExecutor(1) as executor:
        executor.submit(_warn_of, "a\x1b[2J\rb").result()
    assert capfd.readouterr().err == "a\\u001b[2J\\u000db: odd\n"


WORKER = """
import sys
from phalanx.data.loading import worker
worker._LoaderWorker = lambda start: print("a" + chr(27) + "[2J", file=sys.stderr) or sys.exit(3)
worker.main()
"""


def test_nor_can_one_that_a_worker_of_the_loader_prints():
    pipe = subprocess.PIPE
    worker = subprocess.Popen([sys.executable, "-c", WORKER], stdin=pipe, stderr=pipe)
    assert worker.stdin is not None and worker.stderr is not None
    with worker:
        worker.stdin.write(b"{}\n")
        worker.stdin.flush()  # it leaves at once when its stdin ends
        assert worker.stderr.read() == b"a\\u001b[2J\n"
