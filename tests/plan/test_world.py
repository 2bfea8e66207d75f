"""What a launcher tells each rank."""

import pytest

from phalanx.errors import NetworkError
from phalanx.plan.world import World, read_world

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_without_a_launcher_there_is_no_world():
    assert read_world({}) is None
    assert read_world({"RANK": "0", "MASTER_PORT": "1"}) is None, "other programs set RANK, too"


def test_torchruns_world_is_read():
    assert read_world(TORCHRUN) == World(
        rank=5,
        size=8,
        local_rank=1,
        local_size=4,
        address="node-0",
        port=29500,
        restart=2,
        joins_store=True,
    )


def test_a_launcher_that_says_less_is_on_one_machine():
    found = read_world({"RANK": "1", "WORLD_SIZE": "3", "MASTER_PORT": "29500"})
    assert found is not None
    assert (found.local_rank, found.local_size, found.address) == (1, 3, "127.0.0.1")
    assert (found.restart, found.joins_store) == (0, False)


def test_our_own_restarts_count():
    found = read_world({**TORCHRUN, "PHALANX_RESTART": "4"})
    assert found is not None and (found.restart, found.supervised) == (4, True)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"RANK": "first"}, "RANK: expected a whole number in the environment, got 'first'; a "),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE: expected a whole number in the environment, got '-2'"),
        ({"MASTER_PORT": ""}, "MASTER_PORT: expected a whole number in the environment, got ''; "),
        ({"RANK": "8"}, "RANK 8: ranks of WORLD_SIZE 8 are numbered from 0 to 7"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE 0: expected at least one rank"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK 4: ranks of LOCAL_WORLD_SIZE 4 are numbered from 0 to 3"),
    ],
)
def test_a_world_that_cannot_be_is_refused(changes, told):
    with pytest.raises(NetworkError) as caught:
        read_world({**TORCHRUN, **changes})
    assert str(caught.value).startswith(told) and caught.value.exit_code == 8


def test_a_missing_port_is_named():
    with pytest.raises(NetworkError) as caught:
        read_world({name: text for name, text in TORCHRUN.items() if name != "MASTER_PORT"})
    assert str(caught.value) == (
        "MASTER_PORT: is not set in the environment; a launcher such as torchrun sets RANK, "
        "WORLD_SIZE, MASTER_ADDR and MASTER_PORT; to run alone, unset RANK"
    )
