"""Runs on several ranks from the outside: kills, failures, hangs, launchers and bad input."""

import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
from launched_runs import (
    Launched,
    assert_same_result,
    count_steps,
    find_ranks,
    kill,
    ranked_run,
    wait_for,
    world_variables,
)

import phalanx
from phalanx.cli.main import main
from small_photos import encode, photo
from small_runs import make_digits, run_phalanx, small_run

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
KILLS = 20
FAILING = """
import os

if os.environ.get("RANK") == "1":
    from torch import nn

    forward, calls = nn.Linear.forward, []

    def fail(self, x):
        calls.append(1)
        if len(calls) == 5:
            raise ValueError("no more")
        return forward(self, x)

    nn.Linear.forward = fail
"""


def run_folded(data: Path, run: Path, *, ranks: int = 2, **options: object) -> Path:
    """The same run in this process: under strict determinism, the same bits."""
    assert main(ranked_run(data, run, ranks=ranks, **{"devices": 1, **options})) == 0
    return run


# --- kills ---


def test_two_kills_end_like_none(digits, tmp_path, capsys):
    straight, run = run_folded(digits, tmp_path / "straight", epochs=4), tmp_path / "run"
    told = capsys.readouterr().out.splitlines()
    assert "on cpu in 32.32" in told[0]
    assert told[2] == "2 replicas folded onto 1 device: they run one after the other"
    # the note is of what was typed, which the ranks, that open the run, cannot know
    launched = Launched(*ranked_run(digits, run, epochs=4, ckpts_per_epoch=4), run=run)
    kill(launched.rank(1))  # before it could do anything
    launched.wait_for_steps(8)
    kill(launched.rank(0))
    done = launched.end()
    assert done.returncode == 0, done.stderr
    assert_same_result(run, straight)
    again = "was killed by SIGKILL; all 2 ranks start again from the last checkpoint"
    assert done.stderr == f"phalanx train: rank 1 {again}\nphalanx train: rank 0 {again}\n"
    first, _, layout, note, *_ = done.stdout.splitlines()
    assert first.endswith("4 epochs, on 2 processes on cpu in 32.32")
    assert layout == "2 replicas, one on each of 2 devices"
    assert note.startswith("note: --ckpts-per-epoch 4: an epoch has 6 steps")
    assert done.stdout.count("note: ") == 1 and done.stdout.count("resumed at step ") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "determinism", "kills"), [(2, "strict", 8), (4, "strict", 6), (2, "seeded", 6)]
)
def test_random_kills_end_like_none(ranks, determinism, kills, tmp_path):
    data = make_digits(tmp_path / "data", train=96, valid=400)
    given = {"ranks": ranks, "determinism": determinism, "epochs": 50, "keep": 2}
    straight, run = tmp_path / "straight", tmp_path / "run"
    done = Launched(*ranked_run(data, straight, **given)).end()
    assert done.returncode == 0, done.stderr
    launched, where = Launched(*ranked_run(data, run, **given), run=run), []
    chance, killed = random.Random(ranks * kills), {}
    while len(where) < kills:
        group = wait_for(lambda old=killed: find_new(launched, ranks, old), timeout=60)
        before = count_steps(run)
        if len(where) % 3:  # while it trains, scores or saves
            wait_for(lambda n=before: count_steps(run) > n or None, timeout=60)
            time.sleep(chance.uniform(0, 1))
        else:  # most of the time it starts
            time.sleep(chance.uniform(0, 3))
        assert launched.process.poll() is None, "the run is over before the kills are"
        saving = any(path.name.startswith(".") for path in (run / "checkpoints").glob("*"))
        where.append((count_steps(run) > before, saving))
        kill(chance.choice(sorted(group.values())))
        killed = group
    done = launched.end()
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("was killed by SIGKILL; all") == kills
    assert_same_result(run, straight)
    assert {trained for trained, _ in where} == {True, False}, "all kills at the same time"
    assert not [*run.glob(".*"), *(run / "checkpoints").glob(".*")]


def find_new(launched: Launched, ranks: int, before: dict[int, int]) -> dict[int, int] | None:
    """The processes of all ranks, once none of those before is among them."""
    found = find_ranks(launched.process.pid)
    return found if len(found) == ranks and not {*found.values()} & {*before.values()} else None


def test_the_kills_of_the_proof_are_twenty():
    (mark,) = (m for m in test_random_kills_end_like_none.pytestmark if m.name == "parametrize")
    assert sum(kills for *_, kills in mark.args[1]) == KILLS


@pytest.mark.slow
def test_a_killed_supervisor_leaves_no_ranks_and_a_run_to_resume(digits, tmp_path):
    straight, run = run_folded(digits, tmp_path / "straight", epochs=10), tmp_path / "run"
    launched = Launched(*ranked_run(digits, run, epochs=10), run=run)
    launched.wait_for_steps(8)
    kill(launched.process.pid)
    assert launched.end().returncode == -signal.SIGKILL
    done = Launched("train", "--resume", run).end()
    assert done.returncode == 0 and "resumed at step " in done.stdout, done.stderr
    assert_same_result(run, straight)


@pytest.mark.slow
def test_a_stop_goes_on_with_more_ranks_and_with_none(digits, tmp_path):
    straight = run_folded(digits, tmp_path / "straight", ranks=4, epochs=20)
    run = tmp_path / "run"
    launched = Launched(*ranked_run(digits, run, ranks=4, devices=2, epochs=20), run=run)
    launched.wait_for_steps(8)
    launched.process.terminate()
    done = launched.end()
    assert done.returncode == 75, done.stderr
    _, heard, line = done.stderr.splitlines()
    assert heard == "SIGTERM: finishing this step and saving"
    assert line.startswith("phalanx train: stopped after step ") and f"--resume {run}" in line
    launched = Launched("train", "--resume", run, "--devices=4", run=run)
    launched.wait_for_steps(40)
    os.killpg(launched.process.pid, signal.SIGINT)  # as a terminal does it
    assert launched.end().returncode == 75
    done = Launched("train", "--resume", run, "--devices=1").end()
    assert done.returncode == 0, done.stderr
    assert "4 replicas folded onto 1 device" in done.stdout
    assert_same_result(run, straight)


# --- launchers ---


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_torchrun_starts_killed_ranks_again(named, digits, tmp_path):
    straight = run_folded(digits, tmp_path / "straight", epochs=10)
    run = tmp_path / "run"
    words = ranked_run(digits, run, launched=True, epochs=10)
    words = words if named else [word for word in words if "run-dir" not in word]
    torchrun = [*TORCHRUN, "2", "--max-restarts", "1"]
    launched = Launched(*words, launcher=torchrun, cwd=tmp_path)
    if not named:
        run = wait_for(lambda: next(iter(tmp_path.glob("runs/*")), None), timeout=60)
    launched.run = run
    launched.wait_for_steps(8)
    kill(launched.rank(1))
    done = launched.end()
    assert done.returncode == 0, done.stderr
    assert_same_result(run, straight)
    assert done.stdout.count("resumed at step ") == 1 and done.stdout.count("report: ") == 1
    told = [line for line in done.stderr.splitlines() if line.startswith("phalanx")]
    # torchrun may end the rank that is left before that rank notices
    ends = "lost the other ranks", "stopped by SIGTERM; everything up to the last checkpoint is"
    assert all(any(end in line for end in ends) for line in told), done.stderr


@pytest.mark.slow
def test_a_given_world_wins(digits, tmp_path):
    more = ranked_run(digits, tmp_path / "more", launched=True, batch_size=8, replicas=1, epochs=1)
    done = Launched(*more, launcher=[*TORCHRUN, "2"]).end()
    assert done.returncode == 0, done.stderr
    note = "note: --replicas 1: the launcher started 2 ranks, which makes 2 replicas and a global"
    assert note in done.stdout
    fewer = ranked_run(digits, tmp_path / "fewer", ranks=4, launched=True, epochs=1)
    done = Launched(*fewer, launcher=[*TORCHRUN, "2"]).end()
    assert done.returncode == 0, done.stderr
    assert "4 replicas folded onto 2 devices: 2 on each, one after the other" in done.stdout
    assert_same_result(tmp_path / "more", run_folded(digits, tmp_path / "a", epochs=1))
    assert_same_result(tmp_path / "fewer", run_folded(digits, tmp_path / "b", ranks=4, epochs=1))


# --- failures ---


def test_a_rank_that_fails_alone_says_where(digits, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    run = tmp_path / "run"
    words = ranked_run(digits, run, plugin="failing", determinism="seeded", ckpts_per_epoch=0)
    done = Launched(*words, cwd=tmp_path).end()
    assert done.returncode == 70
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"phalanx train: rank 1 of 2 on {socket.gethostname()}: this is a bug")
    assert "ValueError: no more" in line and f"is in {run}/phalanx-traceback.txt" in line
    assert "raise ValueError" in (run / "phalanx-traceback.txt").read_text()


@pytest.mark.slow
def test_an_image_that_one_rank_cannot_read_ends_all(tmp_path):
    for number in range(56):
        split = "train" if number < 48 else "val"
        path = tmp_path / "data" / split / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(photo(number, size=(16, 16))))
    (tmp_path / "data/train/b/17.jpg").write_bytes(b"\xff\xd8 broken")
    run = tmp_path / "run"
    words = ranked_run(tmp_path / "data", run, model="resnet8", max_bad=0, workers=0)
    words.append("--data=folder")
    done = Launched(*words).end()
    assert done.returncode == 3, done.stderr
    first, *rest = done.stderr.splitlines()
    traceback = next(run.glob("phalanx-traceback-rank-*.txt"))
    rank = traceback.stem[-1]
    where = f"rank {rank} of 2 on {socket.gethostname()} (traceback in {traceback})"
    assert first.startswith(f"phalanx train: {where}: more than 0 training images cannot be read")
    assert rest[0].startswith("train/b/17.jpg: ") and len(rest) == 2


@pytest.mark.slow
def test_a_full_disk_under_rank_0_is_told_once(digits, tmp_path):
    (tmp_path / "full.py").write_text(
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\n"  # a checkpoint is larger
    )
    words = ranked_run(digits, tmp_path / "run", plugin="full")
    done = Launched(*words, cwd=tmp_path).end()
    assert done.returncode == 6, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("phalanx train: rank 0 of 2 on ") and "traceback in " in line


@pytest.mark.slow
def test_a_divergence_is_told_once_and_can_be_replayed(digits, tmp_path):
    run = tmp_path / "run"
    done = Launched(*ranked_run(digits, run, lr=1e9)).end()
    assert done.returncode == 5, done.stderr
    (line,) = done.stderr.splitlines()
    assert f"phalanx replay {run} names the module and the image" in line
    assert (run / "blackbox.json").exists()
    done = run_phalanx("replay", run)
    assert done.returncode == 5, done.stderr
    assert "bit for bit as it was recorded" in done.stdout


@pytest.mark.slow
def test_fp_exceptions_name_the_image_of_any_rank(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "assemble")
    replays = import_module("test_replay")
    (tmp_path / "snow.py").write_text(replays.PLUGIN)
    given = {"plugin": "snow", "data": "snow", "model": "trapped", "batch-size": 8, "replicas": 2}
    given |= {"devices": 2, "device": "cpu", "steps": 6, "fp-exceptions": "true", "lr": 0.05}
    words = [f"--{name}={value}" for name, value in given.items()]
    done = Launched("train", *words, "--run-dir=run", cwd=tmp_path).end()
    assert done.returncode == 5, done.stderr
    position = 45  # of the image in the first epoch: among the later eight of step 3, rank 1's
    found = f"is look/1, for train[17] (label blue, position {position} of the stream)"
    assert found in done.stderr and done.stderr.startswith("phalanx train: step 3: ")


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_a_hang_that_every_rank_shows(stopped, digits, tmp_path):
    run = tmp_path / "run"
    launched = Launched(*ranked_run(digits, run, epochs=99, rank_timeout=3), run=run)
    launched.wait_for_steps(8)
    os.kill(launched.rank(stopped), signal.SIGSTOP)
    done = launched.end()
    assert done.returncode == 8
    other = 1 - stopped
    host = socket.gethostname()
    assert f"rank {other} of 2 on {host}: no progress for 3 s, in step " in done.stderr
    step = int(done.stderr.partition("in step ")[2].partition(",")[0].replace(",", ""))
    first = 16 * (step - 1)
    own = first + 8 * other
    positions = f"positions {own:,} to {own + 7:,} of the stream, out of the step's {first:,} to "
    assert positions in done.stderr
    assert f"rank {stopped} is not responding and will be aborted; it hangs here:" in done.stderr
    assert done.stderr.count("in fit\n") >= 2, "both stacks"
    way_out = f"the ranks lost contact with each other; continue with: phalanx train --resume {run}"
    assert done.stderr.splitlines()[-1] == f"phalanx train: {way_out}"
    assert (run / f"hang-rank-{other}.txt").exists()


# --- bad input ---


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"replicas": 2, "global_batch_size": 40},
            "--global-batch-size 40: is not a multiple of 32 = micro-batch 16 x replicas 2; use "
            "--batch-size 10 or --global-batch-size 32 or 64",
        ),
        ({"replicas": 4, "bn_span": 3}, "--bn-span 3: does not divide 4 replicas; use 1, 2 or 4"),
        ({"replicas": 4, "no_fold": "true"}, "--no-fold: 4 replicas need 4 devices, and there is"),
        (
            {"replicas": 2, "device": "cuda", "devices": 2},
            "--devices 2: there is only 1 GPU here; with --devices 1, several replicas run on each",
        ),
    ],
)
def test_layouts_that_cannot_be(options, told, digits, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert main(small_run(digits, tmp_path / "run", **options)) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_missing_gpus_are_refused_at_a_resume_and_a_fork(digits, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    run = run_folded(digits, tmp_path / "run", epochs=1)
    (run / "summary.json").unlink()
    wanted, fork = ["--device=cuda", "--devices=2"], ["--fork", str(run), "--epochs=2"]
    for words in (["--resume", str(run)], [*fork, f"--run-dir={tmp_path / 'fork'}"]):
        assert main(["train", *words, *wanted]) == 2
        assert "--devices 2: there is only 1 GPU here" in capsys.readouterr().err
    assert not (tmp_path / "fork").exists()
    assert main(["plan", "demo", "--replicas=2", "--no-memory", *wanted]) == 0


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"MASTER_PORT": None}, "MASTER_PORT: is not set in the environment"),
        ({"MASTER_PORT": "nonsense"}, "MASTER_PORT: expected a whole number in the environment"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT 70000: expected a number from 1 to 65535"),
        ({"RANK": "2"}, "RANK 2: ranks of WORLD_SIZE 2 are numbered from 0 to 1"),
        ({"RANK": "x"}, "RANK: expected a whole number in the environment, got 'x'"),
    ],
)
def test_worlds_that_make_no_sense(variables, told, digits, tmp_path, capsys, monkeypatch):
    for name, value in {**world_variables(0, 2, 29500), **variables}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(value))
    assert main(small_run(digits, tmp_path / "run", replicas=2)) == 8
    assert told in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_ranks_that_cannot_meet(digits, tmp_path):
    words = ranked_run(digits, tmp_path / "run", ranks=3, launched=True, batch_size=4)
    words.append("--rank-timeout=1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = Launched(*words, **world_variables(0, 3, port)).end()
    taken = f"MASTER_PORT {port}: is in use by another program; choose another port"
    assert (done.returncode, done.stderr) == (8, f"phalanx train: {taken}\n")
    done = Launched(*words, **world_variables(0, 3)).end()
    assert done.returncode == 8 and done.stderr.count("\n") == 1
    assert "ranks 1, 2 of 3 did not start within 1 s; check their output" in done.stderr
    done = Launched(*words, **world_variables(1, 3, port)).end()
    assert done.returncode == 8 and done.stderr.count("\n") == 1
    assert f"rank 0 cannot be reached at 127.0.0.1:{port} within 1 s" in done.stderr
    done = Launched(*words, **{**world_variables(0, 3), "MASTER_ADDR": "no.such.host"}).end()
    assert done.returncode == 8 and done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists(), "nothing is in the way of the next start"


@pytest.mark.slow
def test_ranks_that_differ_are_refused(digits, tmp_path):
    code = tmp_path / "other" / "phalanx"
    shutil.copytree(Path(phalanx.__file__).parent, code)
    with (code / "units.py").open("a") as file:
        file.write("# changed\n")
    paths = [str(code.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    other_code = {"PYTHONPATH": os.pathsep.join(paths)}
    run, host = tmp_path / "run", socket.gethostname()
    words = [*ranked_run(digits, run, launched=True, epochs=1), "--rank-timeout=30"]
    told = start_two(words, words, **other_code)
    assert f"rank 1 on {host} has different code from rank 0 on {host}; all ranks" in told
    assert not run.exists()
    launched = Launched(*ranked_run(digits, run, epochs=99), run=run)
    launched.wait_for_steps(8)
    launched.process.terminate()
    assert launched.end().returncode == 75
    resume = ["train", "--resume", str(run), "--rank-timeout=30"]
    told = start_two([*resume, "--bucket-mib=1"], [*resume, "--bucket-mib=2"])
    assert "has different options from rank 0" in told
    data = make_digits(tmp_path / "data", train=96, valid=40, seed=2)
    resume.append("--accept-changed-data")
    told = start_two(resume, [*resume, f"--data-dir={data}"])
    assert "has different data from rank 0" in told


def test_ranks_of_a_new_run_that_were_given_different_options_are_refused(digits, tmp_path):
    run, host = tmp_path / "run", socket.gethostname()
    words = [*ranked_run(digits, run, launched=True, epochs=1), "--rank-timeout=30"]
    other = [*words, "--lr=0.5", "--workers=0", f"--run-dir={tmp_path / 'other'}"]
    told = start_two([*words, "--lr=0.1"], other)
    assert f"rank 1 on {host} has different options from rank 0 on {host}: --lr; all" in told
    assert not run.exists()


def test_a_run_that_torchrun_ends_because_of_different_options_leaves_no_folder(digits, tmp_path):
    run, script = tmp_path / "run", tmp_path / "train.sh"
    words = [*ranked_run(digits, run, launched=True, epochs=1), "--rank-timeout=30"]
    command = shlex.join([sys.executable, "-m", "phalanx", *words])
    script.write_text(f"#!/bin/sh\nexec {command} --lr 0.$((RANK + 1))\n")
    script.chmod(0o755)
    torchrun = [*TORCHRUN, "2", "--no-python", str(script)]
    done = subprocess.run(torchrun, check=False, capture_output=True, text=True, timeout=100)
    told = [line for line in done.stderr.splitlines() if line.startswith("phalanx")]
    assert len(told) == 1 and "has different options from rank 0" in told[0], done.stderr
    assert not run.exists()


def start_two(first: list[str], second: list[str], **variables: str) -> str:
    """The line that two ranks that were started by hand leave with."""
    world = world_variables(0, 2)
    ranks = [Launched(*first, **world), Launched(*second, **{**world, "RANK": 1, **variables})]
    ended = [rank.end() for rank in ranks]
    told = "".join(done.stderr for done in ended)
    assert [done.returncode for done in ended] == [8, 8], told
    assert told.count("\n") == 1, told
    return told
