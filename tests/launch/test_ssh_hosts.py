"""Ranks on two hosts by a real ssh: their result, their signals, and hosts that go away."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from loopback_ssh import HOSTS, SSHD, ssh_server

import phalanx
from phalanx.engine.checkpoint_store import find_newest_checkpoint
from phalanx.errors import NetworkError
from phalanx.launch.command_lines import LaunchLine
from phalanx.launch.run import refuse_unreachable
from phalanx.report.folder import open_run
from phalanx.report.summary import read_summary
from small_runs import run_phalanx, small_run, start_phalanx

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SSHD is None or sys.platform != "linux", reason="needs sshd"),
]
SOURCE = Path(phalanx.__file__).parents[1]
STRICT = {"batch_size": 8, "replicas": 2, "threads": 1, "determinism": "strict"}


@pytest.fixture
def ssh_args(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "ssh").mkdir()
    with ssh_server(tmp_path / "ssh") as args:
        yield args


def launch_words(ssh_args: str, *command: object, hosts: tuple[str, ...] = HOSTS) -> list[str]:
    """The words that launch a command with a rank on each host."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    own = ["--num-replicas", len(hosts), "--host", ",".join(hosts), "--ssh-args", ssh_args]
    own += ["-x", f"PYTHONPATH={SOURCE}", "-x", "OMP_NUM_THREADS=1", "--master-port", port]
    return ["launch", *map(str, own), "--", *map(str, command)]


def wait_for_steps(run: Path, process: "subprocess.Popen[str]", steps: int = 4) -> None:
    path, deadline = run / "metrics.jsonl", time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < steps:
        assert process.poll() is None, process.communicate()
        if time.monotonic() > deadline:
            process.kill()  # its ranks leave with it
            raise AssertionError(process.communicate())
        time.sleep(0.05)


def find_processes(text: str) -> list[int]:
    """The processes whose words have a text in them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        if text in read_words(int(folder.name)) and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def read_words(pid: int) -> str:
    """The words of a process, with a zero after each."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""  # it has ended just now


def is_torchrun(pid: int, run: Path) -> bool:
    words = read_words(pid)
    return words.startswith(sys.executable) and str(run) in words


def find_parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_two_hosts_train_what_one_does(digits, tmp_path, ssh_args):
    alone = run_phalanx(*small_run(digits, tmp_path / "alone", epochs=1, devices=1, **STRICT))
    assert alone.returncode == 0, alone.stderr
    words = small_run(digits, tmp_path / "two", epochs=1, **STRICT)
    done = run_phalanx(*launch_words(ssh_args, *words))
    assert done.returncode == 0, done.stderr
    assert "2 replicas, one on each of 2 devices" in done.stdout and done.stderr == ""
    hashes = {read_summary(tmp_path / name).weights_sha256 for name in ("alone", "two")}
    assert len(hashes) == 1


def test_sigterm_reaches_the_ranks_of_other_hosts_and_the_run_goes_on(digits, tmp_path, ssh_args):
    run = tmp_path / "run"
    words = small_run(digits, run, epochs=500, logs_per_epoch=0, validation="false", **STRICT)
    process = start_phalanx(*launch_words(ssh_args, *words))
    wait_for_steps(run, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 75, err
    assert "SIGTERM: finishing this step and saving" in err and "everything is saved" in err
    assert "Traceback" not in err
    assert find_newest_checkpoint(open_run(run).checkpoints) is not None
    assert find_processes(str(run)) == []


def test_ranks_save_and_end_when_the_launch_is_killed(digits, tmp_path, ssh_args):
    run = tmp_path / "run"
    words = small_run(digits, run, epochs=500, ckpts_per_epoch=0, validation="false", **STRICT)
    process = start_phalanx(*launch_words(ssh_args, *words))
    wait_for_steps(run, process)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while find_processes(str(run)):
        assert time.monotonic() < deadline, "ranks are left"
        time.sleep(0.1)
    assert find_newest_checkpoint(open_run(run).checkpoints) is not None


def test_a_lost_connection_ends_the_run_so_that_it_can_go_on(digits, tmp_path, ssh_args):
    run = tmp_path / "run"
    words = small_run(digits, run, epochs=500, ckpts_per_epoch=0, validation="false", **STRICT)
    process = start_phalanx(*launch_words(ssh_args, *words))
    wait_for_steps(run, process)
    torchruns = [pid for pid in find_processes("--node-rank\0001\0") if is_torchrun(pid, run)]
    assert len(torchruns) == 1
    os.kill(find_parent(torchruns[0]), signal.SIGKILL)  # the sshd of this connection
    _, err = process.communicate(timeout=120)
    assert process.returncode == 75, err  # the ranks still reach each other, and save
    assert f"phalanx launch: host {HOSTS[1]}: the connection was lost after " in err
    assert find_processes(str(run)) == []


def test_a_host_that_does_not_answer_is_named_before_anything_starts(digits, tmp_path, ssh_args):
    port = ssh_args.split()[1]
    words = small_run(digits, tmp_path / "run", epochs=1, **STRICT)
    args = f"{ssh_args} -o ConnectTimeout=2"
    with socket.create_server(("127.0.0.9", int(port))):  # takes connections and says nothing
        done = run_phalanx(*launch_words(args, *words, hosts=(HOSTS[0], "127.0.0.9")))
    assert done.returncode == 8 and done.stdout == ""
    assert done.stderr.startswith("phalanx launch: host 127.0.0.9: cannot be reached, tried for 2.")
    assert not (tmp_path / "run").exists() and HOSTS[0] not in done.stderr


def test_a_host_without_our_folder_is_named(ssh_args):
    ssh = ("ssh", *ssh_args.split())
    line = LaunchLine(
        launcher="torchrun", host=HOSTS[0], args=("true",), ssh=ssh, folder=Path("/nowhere")
    )
    with pytest.raises(NetworkError) as refused:
        refuse_unreachable([line])
    expected = f"host {HOSTS[0]}: has no folder /nowhere; every host needs the same files"
    assert str(refused.value) == expected
    refuse_unreachable([replace(line, folder=Path("/"))])
