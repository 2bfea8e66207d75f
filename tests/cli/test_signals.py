"""SIGINT, SIGTERM and SIGHUP at any moment: a code of the table, and a word on how to go on."""

import os
import pty
import signal
import subprocess
import sys
import time
from functools import partial
from importlib import import_module

import pytest
from PIL import Image

from phalanx.cli.main import COMMANDS, main
from phalanx.parallel.supervisor import collect_signals
from phalanx.report.console import Console
from small_runs import small_run, start_phalanx

STOPPED, LEFT = 75, 130
RESUMABLE = {"train", "average", "data build", "data fetch", "sweep"}
BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["int", "term"])
ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def signal_instead_of(monkeypatch, place: str, number: int = signal.SIGTERM) -> None:
    """Let a function send this process a signal, and do nothing else."""
    module, name = place.split(":")  # phalanx.report is a function, too
    send = partial(os.kill, os.getpid(), number)
    monkeypatch.setattr(import_module(module), name, lambda *_, **__: send())


@pytest.fixture(scope="module")
def finished(digits, tmp_path_factory):
    """A finished run with two checkpoints."""
    run = tmp_path_factory.mktemp("signals") / "run"
    assert main(small_run(digits, run, steps=4, keep=2)) == 0
    return run


@pytest.mark.parametrize("number", ALL)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_signal_while_a_command_starts(name, number, monkeypatch, capsys):
    signal_instead_of(monkeypatch, "phalanx.cli.main:import_module", number)
    before = [signal.getsignal(each) for each in ALL]
    words = ["--spec"] if name == "bench" else ["x"]  # which takes no word
    assert main([*name.split(), *words]) == (STOPPED if name in RESUMABLE else LEFT)
    printed = capsys.readouterr().err
    assert printed.startswith(f"phalanx {name}: stopped by {signal.Signals(number).name}; ")
    end = "run the same command again to continue\n"
    assert printed.endswith(end if name in RESUMABLE else "nothing was changed\n")
    assert [signal.getsignal(each) for each in ALL] == before


def test_a_signal_while_python_makes_a_class_is_no_bug(monkeypatch, capsys):
    class Signalled:
        def __set_name__(self, owner, name):
            os.kill(os.getpid(), signal.SIGTERM)

    def make_class(*_):
        type("Named", (), {"field": Signalled()})

    monkeypatch.setattr("phalanx.cli.main.run_command", make_class)
    assert main(["train", "demo"]) == 75
    assert "stopped by SIGTERM; nothing is lost" in capsys.readouterr().err


def test_a_run_goes_on_after_a_hangup_that_nohup_ignores(digits, tmp_path, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signal_instead_of(monkeypatch, "phalanx.assemble.train:_print_start", signal.SIGHUP)
        send = partial(os.kill, os.getpid(), signal.SIGHUP)
        monkeypatch.setattr(Console, "progress", lambda *_: send())
        assert main(small_run(digits, tmp_path / "run", steps=1, workers=0)) == 0
        with collect_signals() as came:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not came and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_is_saved_when_its_terminal_is_closed(digits, tmp_path):
    run = tmp_path / "run"
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "phalanx", *small_run(digits, run, steps=5000, workers=0)],
        env={**os.environ, "TERM": "xterm"},
        preexec_fn=partial(os.login_tty, theirs),  # noqa: PLW1509 - nothing here has threads
    )
    os.close(theirs)
    deadline = time.monotonic() + 60
    while not (run / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    os.close(ours)  # what the kernel then sends is SIGHUP; every write to the terminal fails
    assert process.wait(timeout=60) == STOPPED
    assert list((run / "checkpoints").glob("step-*"))
    assert not list(run.glob("phalanx-traceback*"))


def test_a_signal_before_a_run_has_its_folder_leaves_nothing(digits, tmp_path, monkeypatch):
    words = small_run(digits, tmp_path / "run", steps=1)
    for place in ("phalanx.assemble.prepare:plan_new_run", "phalanx.report.folder:format_json"):
        with monkeypatch.context() as patch:
            signal_instead_of(patch, place)
            assert main(words) == STOPPED
        assert not (tmp_path / "run").exists()
    assert main(words) == 0


PLACES = (
    *("open_training", "_prepare_start", "_print_start", "_average_last_checkpoints"),
    *("_write_results", "write_report"),
)


@pytest.mark.parametrize("place", PLACES)
def test_a_signal_outside_of_the_loop_leaves_a_run_to_resume(
    place, digits, tmp_path, monkeypatch, capsys
):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        signal_instead_of(patch, f"phalanx.assemble.train:{place}")
        assert main(small_run(digits, run, steps=2)) == STOPPED
    kept = "stopped by SIGTERM; everything up to the last checkpoint is kept"  # after any steps
    assert f"{kept}; continue with: phalanx train --resume {run}\n" in capsys.readouterr().err
    assert main(["train", "--resume", str(run)]) == 0
    assert (run / "report.html").exists()


@BOTH
def test_a_process_that_is_signalled_before_its_first_step(number, digits, tmp_path):
    run = tmp_path / "run"
    process = start_phalanx(*small_run(digits, run, steps=500))
    deadline = time.monotonic() + 60
    while not (run / "run.json").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == STOPPED and "Traceback" not in err
    # either the run is there, or the same command can make it
    assert f"--resume {run}" in err if run.exists() else "run the same command again" in err


def test_an_average_that_was_stopped_is_made_by_the_same_command(finished, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        signal_instead_of(patch, "phalanx.assemble.average:score_target")
        assert main(["average", str(finished)]) == STOPPED
    assert "the run's checkpoints are intact" in capsys.readouterr().err
    assert main(["average", str(finished)]) == 0


@pytest.mark.parametrize("words", [["validate"], ["predict", "image.png"]])
def test_a_signal_while_scoring_changes_nothing(words, finished, monkeypatch, tmp_path):
    Image.new("RGB", (12, 12)).save(tmp_path / "image.png")
    signal_instead_of(monkeypatch, "phalanx.assemble.score:Session")
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    assert main([words[0], str(finished), *words[1:]]) == LEFT
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


@pytest.mark.parametrize("form", ["tar", "packed", "folder", "tfrecord"])
def test_a_build_that_was_stopped_goes_on(form, digits, tmp_path, monkeypatch, capsys):
    def words(out):
        shards = ["--shards=4"] if form in ("tar", "tfrecord") else []
        return ["data", "build", str(digits), f"--to={form}", f"--out={tmp_path / out}", *shards]

    def stop_late(_, split, done, count):
        if done == 70:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr("phalanx.cli.data_build.ImageProgress.__call__", stop_late)
        assert main([*words("stopped"), "--workers=1"]) == STOPPED
    assert "what has been built is kept: run the same command again" in capsys.readouterr().err
    assert not list((tmp_path / "stopped").rglob("*.part"))
    assert (
        main([*words("stopped"), "--workers=1"]) == main([*words("straight"), "--workers=1"]) == 0
    )
    if form == "tar":
        assert "already there" in capsys.readouterr().out
    files = [read_files(tmp_path / out) for out in ("stopped", "straight")]
    assert files[0] == files[1] and len(files[0]) > 1


def read_files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_verify_that_was_stopped_changes_nothing(digits, monkeypatch, capsys):
    signal_instead_of(monkeypatch, "phalanx.data.verify.verify:find_source_splits")
    assert main(["data", "verify", str(digits), "--workers=1"]) == LEFT
    assert capsys.readouterr().err == (
        "phalanx data verify: stopped by SIGTERM; nothing was changed\n"
    )


def test_a_build_with_processes_ends_quietly_with_its_group(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "data" / "train" / name).mkdir(parents=True)
        for number in range(400):
            image = Image.effect_noise((64, 64), 80).convert("RGB")
            image.save(tmp_path / "data" / "train" / name / f"{number}.png")
    words = ["data", "build", "data", "--to=tfrecord", "--out=out", "--workers=2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "phalanx", *words],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "out" / ".phalanx").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does, also to processes that just start
    _, err = process.communicate(timeout=60)
    assert process.returncode == STOPPED
    assert err.splitlines()[-1].startswith("phalanx data build: stopped by SIGINT; ")
    assert "Traceback" not in err
