"""The life of ranks on one machine: real processes, real signals."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.parallel import supervisor
from phalanx.parallel.supervisor import supervise

LOST = "the ranks lost contact with each other; run the same command again to continue"
PROGRAM = Path(__file__).with_name("rank_program.py")
SUPERVISOR = """
import sys
from phalanx.parallel import supervisor
supervisor._LEAVE_S = 0.1
sys.exit(supervisor.supervise(
    sys.argv[2:], int(sys.argv[1]), progress=int, print_line=lambda line: print(line, flush=True)
))
"""


@pytest.fixture(autouse=True)
def no_grace(monkeypatch):
    """Ranks that hang are not waited for."""
    monkeypatch.setattr(supervisor, "_POLL_S", 0.01)
    monkeypatch.setattr(supervisor, "_GRACE_S", 0.05)


@pytest.fixture
def patient(no_grace, monkeypatch):
    monkeypatch.setattr(supervisor, "_GRACE_S", 60.0)


def command(folder: Path, code: str) -> list[str]:
    return [sys.executable, str(PROGRAM), str(folder), code]


def run_ranks(folder: Path, code: str, ranks: int = 2, **options) -> tuple[int, list[str]]:
    """The exit code and what was said; nothing runs any more."""
    said: list[str] = []
    given = {"progress": int, "print_line": said.append, **options}
    exit_code = supervise(command(folder, code), ranks, **given)
    assert find_living(folder) == []
    return exit_code, said


def find_living(folder: Path) -> list[str]:
    files = list(folder.glob("*.pid"))
    assert files, "no rank has ever run"
    assert not (folder / "outlived").exists()
    return [path.stem for path in files if is_running(int(path.read_text()))]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"  # a child of a killed process waits for init to take notice of it


def start_supervisor(folder: Path, code: str, ranks: int = 2) -> "subprocess.Popen[str]":
    """A supervisor as a shell would start it, once all of its ranks have noted something."""
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(ranks), *command(folder, code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until(lambda: all(read_notes(folder, rank) for rank in range(ranks)))
    return process


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def read_notes(folder: Path, rank: int) -> list[str]:
    path = folder / f"{rank}.txt"
    return path.read_text().split() if path.exists() else []


# --- starting ---


def test_every_rank_gets_its_place_in_the_world(tmp_path, monkeypatch):
    monkeypatch.setenv("MINE", "a")
    monkeypatch.setenv("WORLD_SIZE", "7")
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT PHALANX_RESTART"
    code = (
        f"import json; note(json.dumps([os.environ[name] for name in {names.split()} + ['MINE']]))"
    )
    done = run_ranks(tmp_path, code, ranks=3)
    assert done == (0, [])
    worlds = [json.loads((tmp_path / f"{rank}.txt").read_text()) for rank in range(3)]
    port = worlds[0][5]
    assert 1024 < int(port) < 65536
    assert worlds == [
        [str(rank), str(rank), "3", "3", "127.0.0.1", port, "0", "a"] for rank in range(3)
    ]


def test_only_rank_0_reads_our_input(tmp_path):
    code = "note(os.readlink('/proc/self/fd/0'))\nnote(sys.stdin.readline())"
    process = start_supervisor(tmp_path, code)
    process.communicate("hello\n", timeout=20)
    assert read_notes(tmp_path, 0)[1:] == ["hello"]
    assert read_notes(tmp_path, 1) == ["/dev/null"]


# --- restarts ---


def test_a_killed_rank_starts_all_ranks_again(tmp_path):
    code = """
(folder / f"{restart}-{rank}.port").write_text(os.environ["MASTER_PORT"])
if restart == 2:
    sys.exit(0)
wait_for(*(f"{restart}-{other}.port" for other in range(4)))
if rank == restart + 1:
    os.kill(os.getpid(), (signal.SIGKILL, signal.SIGSEGV)[restart])
hang()
"""
    assert run_ranks(tmp_path, code, ranks=4) == (
        0,
        [
            "rank 1 was killed by SIGKILL; all 4 ranks start again from the last checkpoint",
            "rank 2 was killed by SIGSEGV; all 4 ranks start again from the last checkpoint",
        ],
    )
    ports = [{path.read_text() for path in tmp_path.glob(f"{n}-*.port")} for n in range(3)]
    assert [len(port) for port in ports] == [1, 1, 1] and len(set.union(*ports)) == 3


KILLED = "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else hang()"


def test_restarts_without_progress_are_used_up(tmp_path):
    code, said = run_ranks(tmp_path, KILLED, max_restarts=2, way_out="do as you like")
    assert code == 8
    assert said == [
        *["rank 1 was killed by SIGKILL; all 2 ranks start again from the last checkpoint"] * 2,
        "rank 1 was killed by SIGKILL after 2 restarts without a new checkpoint; do as you like",
    ]


def test_no_restart_may_be_wanted(tmp_path):
    assert run_ranks(tmp_path, KILLED, max_restarts=0) == (
        8,
        ["rank 1 was killed by SIGKILL; run the same command again to continue"],
    )


def test_progress_makes_restarts_count_anew(tmp_path):
    checkpoints = iter("aabccccccc")  # before the first start, then after each kill
    code, said = run_ranks(tmp_path, KILLED, max_restarts=2, progress=lambda: next(checkpoints))
    # a: 1, b: 1 again, c: 1 again, 2, and 3 is too many
    assert code == 8 and len(said) == 5
    assert next(checkpoints) == "c" and len(list(checkpoints)) == 3


def test_a_rank_that_loses_its_peers_is_not_to_blame_for_a_kill(tmp_path, patient):
    code = """
if restart == 1:
    sys.exit(0)
if rank == 0:
    sys.exit(8)
wait_for_end(0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_ranks(tmp_path, code) == (
        0,
        ["rank 1 was killed by SIGKILL; all 2 ranks start again from the last checkpoint"],
    )


def test_a_rank_that_fails_since_another_was_killed_is_not_to_blame(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_POLL_S", 0.15)  # both are seen at the same time
    code = """
if restart == 0 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if restart == 0:
    wait_for_end(1)
    sys.exit(70)
"""
    code, said = run_ranks(tmp_path, code)
    assert code == 0 and len(said) == 1


# --- exit codes ---


@pytest.mark.parametrize(
    ("codes", "expected"),  # in the order in which ranks end
    [
        ([0, 0], 0),
        ([0, 5], 5),
        ([70, 6], 70),
        ([8, 70], 70),
        ([8, 8], 8),
        ([75, 75], 75),
        ([75, 6], 6),
        ([8, 75], 75),
    ],
)
def test_the_exit_code_is_the_one_that_explains_most(codes, expected, tmp_path, patient):
    code = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
wait_for("0-0.pid", "0-1.pid")
if rank == 0:
    wait_for_end(1)
sys.exit({codes}[1 - rank])
"""
    assert run_ranks(tmp_path, code) == (expected, [LOST] * (expected == 8))


def test_a_failure_ends_ranks_that_do_not_notice(tmp_path):
    code = "wait_for('0-0.pid', '0-2.pid')\nsys.exit(3) if rank == 1 else hang()"
    assert run_ranks(tmp_path, code, ranks=3) == (3, [])


def test_a_rank_that_saves_is_waited_for(tmp_path):
    code = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
wait_for("0-0.pid", "0-1.pid")
if rank == 0:
    wait_for_end(1)
    time.sleep(0.1)  # longer than the grace
    note("saved")
sys.exit(75)
"""
    assert run_ranks(tmp_path, code) == (75, [])
    assert read_notes(tmp_path, 0) == ["saved"]


def test_a_rank_that_was_asked_to_stop_by_itself_stops_all(tmp_path):
    code = """
def leave(number, frame):
    note(number)
    sys.exit(75)

signal.signal(signal.SIGTERM, leave)
note("ready")
if rank == 1:
    wait_for("0.txt", "2.txt")
    os.kill(os.getpid(), signal.SIGTERM)
hang()
"""
    assert run_ranks(tmp_path, code, ranks=3) == (75, [])
    assert [read_notes(tmp_path, rank) for rank in range(3)] == [["ready", "15"]] * 3


# --- signals ---

LISTEN = """
came = []

def take(number, frame):
    came.append(number)
    note(signal.Signals(number).name)
    if len(came) > 1 and number == signal.SIGINT:
        os._exit(130)

signal.signal(signal.SIGINT, take)
signal.signal(signal.SIGTERM, take)
signal.signal(signal.SIGHUP, take)
note("ready")
"""


def test_ctrl_c_reaches_every_rank_once_and_the_second_ends_them(tmp_path):
    process = start_supervisor(tmp_path, LISTEN + "hang()")
    for count in (1, 2):
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
        wait_until(lambda n=count: all(len(read_notes(tmp_path, r)) > n for r in range(2)))
        time.sleep(0.05)
    assert process.communicate(timeout=20) == ("", None)
    assert [read_notes(tmp_path, rank) for rank in range(2)] == [["ready", "SIGINT", "SIGINT"]] * 2
    assert process.returncode == 130
    assert find_living(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_ranks_that_stop_have_the_time_they_need(tmp_path, number):
    code = LISTEN + "while not came: time.sleep(0.01)\ntime.sleep(rank * 0.1)\nsys.exit(75)"
    process = start_supervisor(tmp_path, code)
    process.send_signal(number)
    assert process.communicate(timeout=20) == ("", None)
    assert [read_notes(tmp_path, rank) for rank in range(2)] == [["ready", number.name]] * 2
    assert process.returncode == 75


def test_ranks_that_do_not_hear_are_killed_after_the_second_ctrl_c(tmp_path):
    code = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nnote('ready')\nhang()"
    process = start_supervisor(tmp_path, code)
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == ("", None)
    assert process.returncode == 130
    assert find_living(tmp_path) == []


def test_a_rank_killed_while_it_stops_is_not_started_again(tmp_path):
    code = "note('ready')\nhang()"  # as a rank that has not taken signals yet
    process = start_supervisor(tmp_path, code)
    process.terminate()
    said, _ = process.communicate(timeout=20)
    assert said == (
        "rank 0 was killed by SIGTERM while all were asked to stop; "
        "run the same command again to continue\n"
    )
    assert process.returncode == 75
    assert find_living(tmp_path) == []


def test_handlers_are_as_before(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run_ranks(tmp_path, "")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


# --- nothing is left ---

WATCHING = """
watch()
assert not [name for name in os.environ if "PIPE" in name]
note("ready")
"""


def test_ranks_do_not_outlive_a_killed_supervisor(tmp_path):
    process = start_supervisor(tmp_path, WATCHING + "hang()", ranks=3)
    assert len(find_living(tmp_path)) == 3
    process.kill()
    process.communicate(timeout=20)  # their output ends with the last one that holds it


@pytest.mark.slow
def test_a_rank_that_ends_is_no_supervisor_that_ends(tmp_path):
    code = WATCHING + "time.sleep(rank * 0.1)\nnote('end')"
    assert run_ranks(tmp_path, code) == (0, [])
    assert read_notes(tmp_path, 1) == ["ready", "end"]


def test_no_rank_is_left_when_the_supervisor_fails(tmp_path):
    def fail(line: str) -> None:
        raise RuntimeError(line)

    code = """
import subprocess
if rank == 1:
    wait_for("0-0.pid", "0-2.pid", "0-9.pid")
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:  # it has a process that does not watch us
    write_pid(9, subprocess.Popen(["sleep", "30"]).pid)
hang()
"""
    with pytest.raises(RuntimeError, match="killed by SIGKILL"):
        run_ranks(tmp_path, code, ranks=3, print_line=fail)
    assert len(list(tmp_path.glob("*.pid"))) == 4
    wait_until(lambda: not find_living(tmp_path))  # a process has yet to take its signal


def test_a_command_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        supervise([str(tmp_path / "none")], 2, progress=int, print_line=print)


# --- hangs ---


@pytest.mark.parametrize(
    "hang",
    [
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "import re; re.match('(a+)+$', 'a' * 60 + 'b')",  # keeps all other threads waiting
    ],
)
def test_a_rank_that_hangs_shows_its_stack(hang, tmp_path, capfd):
    code = f"""
show_stack_when_aborted()

def train():
    note("ready")
    {hang}

if rank == 0:
    wait_for("1.txt")
    sys.exit(8)
train()
"""
    hung = "rank 1 is not responding and will be aborted; it hangs here:"
    assert run_ranks(tmp_path, code) == (8, [hung, LOST])
    shown = capfd.readouterr().err
    assert "Fatal Python error: Aborted" in shown and "in train\n" in shown


@pytest.mark.slow
def test_a_rank_that_cannot_show_its_stack_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_STACK_S", 0.1)
    code = """
if rank == 0:
    wait_for("1.txt")
    sys.exit(8)
signal.signal(signal.SIGABRT, signal.SIG_IGN)
note("ready")
hang()
"""
    assert run_ranks(tmp_path, code)[0] == 8
