"""Ranks that no supervisor of ours watches: one is gone, and the others say whether to go on."""

import socket

import pytest
from launched_runs import Launched, assert_same_result, kill, ranked_run, world_variables
from test_ranked_runs import FAILING, run_folded

pytestmark = pytest.mark.slow
HOST = socket.gethostname()


def start_pair(words, run, **options):
    """Two ranks, started by hand."""
    world = {**world_variables(0, 2), "LOCAL_WORLD_SIZE": 2}
    return [
        Launched(*words, run=run, **options, **(world | {"RANK": rank, "LOCAL_RANK": rank}))
        for rank in (0, 1)
    ]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_run_that_has_lost_a_rank_goes_on(lost, digits, tmp_path):
    straight, run = run_folded(digits, tmp_path / "straight", epochs=20), tmp_path / "run"
    ranks = start_pair(ranked_run(digits, run, launched=True, epochs=20), run)
    ranks[0].wait_for_steps(8)
    kill(ranks[lost].process.pid)
    ended = [rank.end() for rank in ranks]
    left = ended[1 - lost]
    assert left.returncode == 75, left.stderr
    (line,) = left.stderr.splitlines()
    assert line.startswith(f"phalanx train: rank {1 - lost} of 2 on {HOST}: lost the other ranks (")
    assert line.endswith(f"); continue with: phalanx train --resume {run}")
    done = Launched("train", "--resume", run, "--devices=1").end()
    assert done.returncode == 0, done.stderr
    assert_same_result(run, straight)


def test_a_run_that_has_saved_nothing_does_not_go_on(digits, tmp_path):
    run = tmp_path / "run"
    ranks = start_pair(ranked_run(digits, run, launched=True, epochs=99, ckpts_per_epoch=0), run)
    ranks[0].wait_for_steps(8)
    kill(ranks[1].process.pid)
    left, _ = (rank.end() for rank in ranks)
    assert left.returncode == 8 and "continue with" not in left.stderr


@pytest.mark.parametrize("failing", ["0", "1"])
def test_a_rank_that_fails_by_itself_is_not_started_again(failing, digits, tmp_path):
    source = FAILING.replace('"1"', f'"{failing}"').replace("== 5", "== 20")
    (tmp_path / "failing.py").write_text(source)
    run = tmp_path / "run"
    words = ranked_run(digits, run, launched=True, plugin="failing", epochs=20)
    ended = [rank.end() for rank in start_pair(words, run, cwd=tmp_path)]
    assert list((run / "checkpoints").glob("step-*")), "there is something to go on from"
    codes = [done.returncode for done in ended]
    assert codes == ([70, 8] if failing == "0" else [8, 70]), ended
    told = "".join(done.stderr for done in ended)
    assert told.count("\n") == 1 and "ValueError: no more" in told


def test_a_rank_that_cannot_open_the_run_does_not_keep_the_others_waiting(digits, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "mine.py").write_text("")
    run = tmp_path / "run"
    words = ranked_run(digits, run, launched=True, plugin="mine", epochs=1)
    world = {**world_variables(0, 2), "LOCAL_WORLD_SIZE": 2}
    folders = (tmp_path, tmp_path / "other")  # a plugin that only the first host has
    ranks = [Launched(*words, cwd=cwd, **(world | {"RANK": n})) for n, cwd in enumerate(folders)]
    ended = [rank.end() for rank in ranks]  # the timeout is 600 s
    assert [done.returncode for done in ended] == [8, 2], ended
    told = "".join(done.stderr for done in ended)
    assert told.count("\n") == 1 and told.startswith(f"phalanx train: rank 1 of 2 on {HOST} (")
    assert not run.exists()
