"""Ranks that meet: what they must have been told alike, and how they learn of a failure."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from phalanx.cli.main import main
from phalanx.errors import FailedElsewhere, NetworkError
from phalanx.parallel.interfaces import find_interface, find_own_address, is_loopback
from phalanx.parallel.ranks import (
    PeersLost,
    Ranks,
    convert_peer_errors,
    find_failure,
    leave_store,
    open_store,
    register_failure,
)
from phalanx.plan.world import World

HOST = socket.gethostname()


@pytest.fixture
def first():
    """Rank 0 of two."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return World(rank=0, size=2, local_rank=0, local_size=2, address="127.0.0.1", port=port)


# --- launchers ---

OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")}
OPEN_MPI |= {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
SLURM = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"}
SLURM |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
WORKERS = {"worker": ["127.0.0.1:2222", "127.0.0.1:2223"]}
TF_CONFIG = {"TF_CONFIG": json.dumps({"cluster": WORKERS, "task": {"type": "worker", "index": 1}})}


@pytest.mark.parametrize("variables", [OPEN_MPI, SLURM, TF_CONFIG])
def test_a_plan_counts_the_ranks_of_every_launcher(variables, capsys, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    words = ["plan", "demo", "--no-memory", "--replicas=4", "--device=cpu", "--json"]
    assert main(words) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [rank["replicas"] for rank in ranks] == [[[0], [2]], [[1], [3]]]


# --- leaving ---

RANK = """
import atexit, pathlib, torch
from phalanx.parallel.ranks import Ranks, open_store
from phalanx.plan.world import World

def count():
    names = [file.read_text() for file in pathlib.Path("/proc/self/task").glob("*/comm")]
    return sum("gloo" in name for name in names)

atexit.register(lambda: print(count()))
world = World(rank=0, size=1, local_rank=0, local_size=1, address="127.0.0.1", port=PORT)
with Ranks(world, open_store(world, timeout=30), torch.device("cpu"), timeout=30) as ranks:
    kept = [torch.distributed.group.WORLD]
    kept.append(kept)  # a cycle, as sessions and exceptions make them
    del kept
    print(ranks.gather("here"), count() > 0)
"""


def test_no_thread_of_gloo_outlives_the_last_line(first):
    program = RANK.replace("PORT", str(first.port))
    command = [sys.executable, "-c", program]
    told = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (told.stdout, told.stderr, told.returncode) == ("['here'] True\n0\n", "", 0)


# --- worlds that differ ---


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"rank": 2, "size": 3, "size_variable": "TF_CONFIG"},
            f"rank 2 on {HOST}: TF_CONFIG gives 3 ranks, and that of rank 0 on {HOST} of 2; all "
            "ranks must have the same",
        ),
        (
            {"rank": 1, "members": ("a:1", "c:1"), "size_variable": "TF_CONFIG"},
            f"rank 1 on {HOST}: TF_CONFIG lists other ranks than that of rank 0 on {HOST}; all ",
        ),
        ({"rank": 0, "joins_store": True}, f"rank 0 on {HOST}: another process has already come "),
    ],
)
def test_a_rank_of_another_world_ends_all(changes, told, first):
    first = replace(first, members=("a:1", "b:1"))
    store = open_store(first, timeout=5)
    with pytest.raises(NetworkError) as caught:
        open_store(replace(first, **changes), timeout=5)
    assert str(caught.value).startswith(told)
    with pytest.raises(PeersLost):  # at once
        Ranks(first, store, torch.device("cpu"), timeout=60)
    late = replace(first, rank=4, size=5)
    with pytest.raises(FailedElsewhere):  # one has told it already
        open_store(late, timeout=5)


# --- failures ---


def test_the_first_failure_is_known_to_all(first):
    second = replace(first, rank=1, local_rank=1)
    stores = [open_store(world, timeout=5) for world in (first, second)]
    assert register_failure(second, stores[1], 75) is None
    assert register_failure(first, stores[0], 3) == 75
    assert find_failure(first, stores[0]) == 75
    assert find_failure(second, stores[1]) is None, "its own"
    leave_store(second, stores[1])
    leave_store(first, stores[0])
    assert stores[0].add("told", 0) == 2


def test_a_failure_that_nobody_can_be_told_is_told_once_a_host(first):
    class Gone:
        def compare_set(self, *_):
            raise RuntimeError("the store is on the host that is gone")

    world = replace(first, size=6, local_size=3)
    silent = [
        register_failure(replace(world, rank=n, local_rank=n % 3), Gone(), 75) for n in range(6)
    ]
    assert silent[1:] == [None, 75, None, 75, 75], "rank 0 is gone"


def test_a_broken_connection_is_told_without_the_lines_of_other_code(first):
    gloo = (
        "[/__w/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:5. This is so"
    )
    with pytest.raises(PeersLost) as caught, convert_peer_errors(first):
        raise RuntimeError(gloo)
    assert str(caught.value) == (
        f"rank 0 of 2 on {HOST}: lost the other ranks (Connection closed by peer [10.0.0.2]:5)"
    )


# --- interfaces ---


def test_the_way_to_this_host_is_the_loopback():
    assert find_own_address("localhost") in ("127.0.0.1", "::1")
    assert is_loopback("127.0.1.1") and is_loopback("::1") and not is_loopback("10.0.0.1")
    assert find_interface("127.0.0.1") == find_interface("127.0.1.1") == "lo"
    assert find_interface("192.0.2.77") is None and find_interface("") is None
    assert find_own_address("no.such.host.invalid") == ""


def test_a_named_interface_stays(first, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    alone = replace(first, size=1, local_size=1, address="localhost")
    store = open_store(alone, timeout=5)
    monkeypatch.setattr("phalanx.parallel.ranks.find_interface", lambda _: "other0")
    Ranks(alone, store, torch.device("cpu"), timeout=5).close()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
