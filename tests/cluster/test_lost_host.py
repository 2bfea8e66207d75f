"""One of two hosts is cut off while a run trains: the run ends, and goes on."""

import re
import sys
import time

import pytest
from launched_runs import assert_same_result, count_steps, ranked_run, wait_for

from hosts import NAMES, open_hosts
from phalanx.cli.main import main
from tf_workers import start_workers

pytestmark = pytest.mark.slow
TIMEOUT = 20  # seconds without progress


@pytest.fixture(scope="module")
def straight(digits, tmp_path_factory):
    """The run that nothing disturbs."""
    run = tmp_path_factory.mktemp("straight") / "run"
    assert main(ranked_run(digits, run, ranks=4, devices=1, epochs=40)) == 0
    return run


@pytest.fixture
def cut_off(digits, tmp_path):
    """The same run on two hosts, which lost each other after the first checkpoints."""
    run = tmp_path / "run"
    words = ranked_run(digits, run, ranks=4, launched=True, epochs=40, rank_timeout=TIMEOUT)
    with open_hosts() as hosts:
        started = start_workers(hosts, words)
        wait_for(lambda: count_steps(run) >= 10 or None, timeout=120)
        assert all(process.poll() is None for process in started)
        hosts.cut()
        start = time.monotonic()
        ended = [(process.communicate(timeout=120)[1], process.returncode) for process in started]
        waited = time.monotonic() - start
        print(f"\nall ranks ended {waited:.0f} s after the cut, with --rank-timeout {TIMEOUT}")
        assert_told(ended, run)
        assert count_steps(run) < 240, "it was over before the cut"
        yield hosts, run


def assert_told(ended, run):
    """Every rank ends with code 75, and each host says in a line what became of it."""
    assert [code for _, code in ended] == [75, 75, 75, 75], ended
    way_out = f"continue with: phalanx train --resume {run}\n"
    for host, errors in zip(NAMES, (ended[:2], ended[2:]), strict=True):
        last = [line for error, _ in errors for line in error.splitlines(keepends=True)]
        told = [line for line in last if line.startswith("phalanx")]
        assert told and all(line.endswith(way_out) for line in told), ended
        assert all(re.search(rf"rank \d of 4 on {host}: ", line) for line in told), ended


def test_a_host_that_does_not_see_the_run_says_so(digits, tmp_path):
    (tmp_path / "runs").mkdir()
    words = ranked_run(digits, tmp_path / "runs" / "run", ranks=4, launched=True, epochs=1)
    hide = 'mount -t tmpfs none "$0" && exec "$@"'  # seen by this process alone
    with open_hosts() as hosts:
        started = start_workers(hosts, words, {"hostb": ["sh", "-c", hide, tmp_path / "runs"]})
        ended = [(process.communicate(timeout=120)[1], process.returncode) for process in started]
    codes = [code for _, code in ended]
    assert codes[:2] == [8, 8] and sorted(codes[2:]) == [4, 8], ended
    (line,) = [line for error, _ in ended for line in error.splitlines()]
    assert " of 4 on hostb (traceback in " in line
    told = "rank 0 has opened the run there, and this host does not see it; give --run-dir a folder"
    assert line.endswith(f"{tmp_path}/runs/run: {told} that all hosts share")
    assert not (tmp_path / "runs" / "run").exists()


def test_a_run_goes_on_when_the_host_is_back(cut_off, straight):
    hosts, run = cut_off
    hosts.mend()
    resume = ["train", "--resume", run, "--rank-timeout", 120]
    started = start_workers(hosts, resume)
    ended = [(*process.communicate(timeout=240), process.returncode) for process in started]
    assert [code for *_, code in ended] == [0, 0, 0, 0], ended
    assert "resumed at step " in ended[0][0]
    assert_same_result(run, straight)


def test_a_run_goes_on_folded_on_the_host_that_is_left(cut_off, straight):
    hosts, run = cut_off
    words = [sys.executable, "-m", "phalanx", "train", "--resume", run, "--devices", 2]
    done = hosts.run("hosta", words)
    assert done.returncode == 0, done.stderr
    assert "4 replicas folded onto 2 devices: 2 on each, one after the other" in done.stdout
    assert_same_result(run, straight)
