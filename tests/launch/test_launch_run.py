"""Lines that run: real processes with real signals; ranks are children that know their number."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from shell_lines import SAVES, line, ranked

from phalanx.errors import ConfigError
from phalanx.launch.command_lines import LaunchLine
from phalanx.launch.run import refuse_missing_programs, run_lines

TESTS = Path(__file__).parent


class Shown:
    """What lines have printed."""

    def __init__(self) -> None:
        self.out: list[tuple[str, str]] = []
        self.err: list[tuple[str, str]] = []
        self.said: list[str] = []

    def run(self, *lines: LaunchLine) -> int:
        def show(host: str, text: str, is_error: bool) -> None:
            (self.err if is_error else self.out).append((host, text))

        return run_lines(lines, show=show, print_line=self.said.append)


def start_launch(lines: str) -> "subprocess.Popen[str]":
    """A process that runs lines: signals come to its main thread."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from shell_lines import *\n"
        "from phalanx.launch.run import run_lines\n"
        "def show(*line):\n"  # in one piece, as lines of two hosts may come together
        "    print('%s %s %s\\n' % line, end='', flush=True)\n"
        f"sys.exit(run_lines({lines}, show=show, print_line=print))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, str(TESTS)], stdout=subprocess.PIPE, text=True
    )


def test_output_comes_line_by_line_with_its_host():
    shown = Shown()
    both = "echo out; echo err >&2"
    assert shown.run(ranked(both, "a"), ranked(both, "b")) == 0
    assert sorted(shown.out) == [("a", "out"), ("b", "out")]
    assert sorted(shown.err) == [("a", "err"), ("b", "err")] and shown.said == []


@pytest.mark.parametrize("code", [2, 8, 75])
def test_the_code_of_a_rank_survives_a_launcher_that_ends_with_1(code):
    shown = Shown()
    assert shown.run(ranked("true"), ranked(f"exit {code}", "b")) == code
    assert shown.err == [], "torchrun's own traceback is not shown"


@pytest.mark.parametrize(
    ("codes", "expected"), [((8, 3), 3), ((8, 75), 75), ((75, 3), 3), ((0, 8), 8), ((5, 3), 5)]
)
def test_the_code_that_explains_most_decides(codes, expected):
    ends = [f"sleep {number / 5}; exit {code}" for number, code in enumerate(codes)]
    assert Shown().run(*(ranked(program, str(n)) for n, program in enumerate(ends))) == expected


def test_a_rank_that_is_killed_is_told():
    shown = Shown()
    assert shown.run(ranked("kill -9 $$")) == 8
    assert shown.said == ["host here: rank 0 was killed by SIGKILL"]


def test_a_rank_that_is_killed_is_told_where_others_kept_a_checkpoint():
    own = "Traceback (most recent call last):\\n  File /torch/distributed/run.py\\n"
    ends = {0: 75, 1: -9, 2: -15, 3: 75}  # the first to end is last; torchrun itself stopped rank 2
    rows = [f"  rank      : {rank} (l\\n  exitcode  : {code} (p\\n" for rank, code in ends.items()]
    rule = "=====\\n"
    shown = Shown()
    text = "".join([own, "ChildFailedError:\\n", rule, *rows, rule])
    assert shown.run(line("sh", "-c", f"printf '{text}' >&2; exit 1"), ranked("exit 75", "b")) == 75
    assert shown.said == ["host here: rank 1 was killed by SIGKILL"]


def test_a_launcher_that_fails_is_told():
    shown = Shown()
    own = "Traceback (most recent call last):\\n  File /torch/distributed/run.py\\nOSError: no port"
    assert shown.run(line("sh", "-c", f"printf '{own}' >&2; exit 1")) == 8
    assert shown.said == ["host here: torchrun failed: OSError: no port"]


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_other_launchers_end_with_the_codes_of_their_ranks(launcher):
    for code in (0, 3, 75):
        assert Shown().run(line("sh", "-c", f"exit {code}", launcher=launcher)) == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_the_ranks_and_not_their_launcher(number):
    launch = start_launch(f"[ranked({SAVES!r}, 'a'), ranked({SAVES!r}, 'b')]")
    assert launch.stdout
    ready = [launch.stdout.readline() for _ in range(2)]
    assert sorted(ready) == ["a ready False\n", "b ready False\n"]
    launch.send_signal(number)
    said, _ = launch.communicate(timeout=20)
    assert sorted(said.splitlines()) == sorted(
        f"{host} {word} False" for host in "ab" for word in ("saving", "saved")
    )
    assert launch.returncode == 75


def test_ranks_get_sigterm_when_the_launch_is_killed(tmp_path):
    saves = SAVES.replace("echo saved", f"touch '{tmp_path}/saved'").replace("echo saving;", "")
    launch = start_launch(f"[ranked({saves!r})]")
    assert launch.stdout and launch.stdout.readline() == "here ready False\n"
    launch.kill()
    launch.communicate()
    deadline = time.monotonic() + 10
    while not (tmp_path / "saved").exists():
        assert time.monotonic() < deadline, "the rank was not asked to stop"
        time.sleep(0.02)


def test_others_are_stopped_when_one_fails(monkeypatch):
    monkeypatch.setattr("phalanx.launch.run._GRACE_S", 0.2)
    shown = Shown()
    assert shown.run(ranked("exit 3"), ranked(SAVES, "b")) == 3
    assert ("b", "saved") in shown.out


def test_whoever_does_not_stop_is_killed(monkeypatch):
    for name in ("_GRACE_S", "_LEAVE_S"):
        monkeypatch.setattr(f"phalanx.launch.run.{name}", 0.3)
    deaf = "RANK=0 sh -c \"trap '' TERM; exec sleep 60\"; echo its launcher lives"
    shown = Shown()
    assert shown.run(ranked("exit 3"), line("sh", "-c", deaf, host="b")) == 3
    assert shown.out == [("b", "its launcher lives")]


def test_a_launcher_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="mpirun: there is no such program on this machine"):
        refuse_missing_programs([line("mpirun", launcher="mpirun")])
    refuse_missing_programs([line("torchrun")])
