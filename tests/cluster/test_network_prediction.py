"""What `phalanx plan --network` predicts is what a slow network does to a run."""

import json
import socket
import sys

import pytest

from hosts import ADDRESSES, INTERFACE, NAMES, open_hosts
from phalanx.report.summary import read_summary
from small_runs import run_phalanx

pytestmark = pytest.mark.slow
MBIT = 200
OPTIONS = {"data": "synthetic", "model": "resnet18", "image-size": 32, "batch-size": 4,
           "steps": 15, "iterations": 15, "device": "cpu", "threads": 1,
           "validation": "false"}  # fmt: skip


def list_words(command, **options):
    given = {**OPTIONS, **{name.replace("_", "-"): value for name, value in options.items()}}
    return [command, *(f"--{name}={value}" for name, value in given.items())]


def train_on_both(hosts, runs, **options):
    """Images a second of a run on each host at the same time, or of one that they share."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = {"WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    ranks |= {"MASTER_ADDR": ADDRESSES["hosta"], "GLOO_SOCKET_IFNAME": INTERFACE}
    started = []
    for rank, host in enumerate(NAMES):
        words = list_words("train", run_dir=runs[rank % len(runs)], **options)
        variables = {"RANK": rank, **ranks} if len(runs) == 1 else {}
        started.append(hosts.popen(host, [sys.executable, "-m", "phalanx", *words], variables))
    ended = [(*process.communicate(timeout=240), process.returncode) for process in started]
    assert [code for *_, code in ended] == [0, 0], ended
    return [read_summary(run).images_per_second for run in runs]


def test_a_step_takes_as_long_as_predicted(tmp_path):
    with open_hosts() as hosts:
        alone = train_on_both(hosts, [tmp_path / host for host in NAMES])
        hosts.limit(MBIT)
        (speed,) = train_on_both(hosts, [tmp_path / "both"], replicas=2)
    words = list_words("plan", replicas=2, devices=2, network=MBIT / 1000,
                       images_per_second=min(alone))  # fmt: skip
    planned = run_phalanx(*words, "--json")
    assert planned.returncode == 0, planned.stderr
    predicted = json.loads(planned.stdout)["network"]["step"]
    measured = 2 * OPTIONS["batch-size"] / speed
    print(f"\npredicted {predicted['total_s']:.3f} s, measured {measured:.3f} s: {predicted}")
    assert predicted["communication_s"] > predicted["compute_s"], "nothing of it would show"
    assert 0.75 < predicted["total_s"] / measured < 1.25
