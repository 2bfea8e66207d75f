"""What a launcher tells each rank."""

import json
from dataclasses import replace

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
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1661140992.0;tcp://10.0.0.1,192.0.2.2:54191;tcp6://[fd00::2]:59127",
    "PMIX_NAMESPACE": "1661140993",
}
SLURM = {
    "SLURM_PROCID": "4",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "rack[2-3,7]n[01-04],login",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
}
WORKERS = ["a:2222", "b:2222", "b:2223"]


def tf_config(kind: str = "worker", index: object = 0, **cluster: list[str]) -> dict[str, str]:
    """The variable for one task of these."""
    task = {"type": kind, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster or {"worker": WORKERS}, "task": task})}


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


# --- Open MPI ---


def test_open_mpis_world_is_read():
    found = read_world(OPEN_MPI)
    assert found == World(
        rank=3,
        size=4,
        local_rank=1,
        local_size=2,
        address="10.0.0.1",
        port=found.port if found else 0,
        size_variable="OMPI_COMM_WORLD_SIZE",
    )
    assert 20_000 <= found.port < 30_000, "not among those of outgoing connections"
    other = read_world({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    assert other == replace(found, rank=2, local_rank=0)
    later = read_world({**OPEN_MPI, "PMIX_NAMESPACE": "1661140995"})
    assert later is not None and later.port != found.port
    given = read_world({**OPEN_MPI, "MASTER_ADDR": "node-1", "MASTER_PORT": "7"})
    assert given == replace(found, address="node-1", port=7)
    here = read_world({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert here == replace(found, local_size=4, address="127.0.0.1")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"OMPI_MCA_orte_hnp_uri": ""}, "MASTER_ADDR: is not set, and mpirun does not say where "),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://192.0.2.77:5"},
            "MASTER_ADDR: is not set, and mpirun runs on another host; give it the address of rank "
            "0's host: mpirun -x MASTER_ADDR=ADDRESS ...",
        ),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "x"}, "OMPI_COMM_WORLD_LOCAL_RANK: expected a whole "),
        ({"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK 4: ranks of OMPI_COMM_WORLD_SIZE 4 "),
        ({"MASTER_PORT": "0"}, "MASTER_PORT 0: expected a number from 1 to 65535"),
        (tf_config(), "TF_CONFIG: lists 3 workers, and mpirun started 4 ranks; list 4, or unset "),
    ],
)
def test_a_world_of_open_mpi_that_cannot_be_is_refused(changes, told):
    with pytest.raises(NetworkError) as caught:
        read_world({**OPEN_MPI, **changes})
    assert str(caught.value).startswith(told)


# --- Slurm ---


def test_slurms_world_is_read():
    found = read_world(SLURM)
    assert found == World(
        rank=4,
        size=5,
        local_rank=0,
        local_size=1,
        address="rack2n01",
        port=found.port if found else 0,
        size_variable="SLURM_STEP_NUM_TASKS",
    )
    other = read_world({**SLURM, "SLURM_PROCID": "1", "SLURM_NODEID": "0", "SLURM_LOCALID": "1"})
    assert other == replace(found, rank=1, local_rank=1, local_size=2)
    queued_again = read_world({**SLURM, "SLURM_RESTART_COUNT": "1"})
    assert queued_again is not None and queued_again.restart == 0, "the whole job, not its ranks"
    assert queued_again.port != found.port
    here = read_world({**SLURM, "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "5"})
    assert here == replace(found, local_size=5, address="127.0.0.1")
    assert read_world({**SLURM, "MASTER_ADDR": "ib-1"}) == replace(found, address="ib-1")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("hosta,hostb", "hosta"),
        ("node[1-3,7]", "node1"),
        ("node[007,009-010]-ib", "node007-ib"),
        ("gpu-1.cluster.org", "gpu-1.cluster.org"),
        ("a[1,3]b[05-06]c,d2", "a1b05c"),
    ],
)
def test_the_first_host_of_a_list_in_slurms_notation(nodes, first):
    found = read_world({**SLURM, "SLURM_STEP_NODELIST": nodes})
    assert found is not None and found.address == first


def test_only_a_step_of_several_tasks_is_a_world():
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "12"}
    assert read_world(batch) is None, "a batch script is not a step"
    assert read_world({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None
    with pytest.raises(NetworkError, match="SLURM_STEP_NODELIST: expected a list of hosts, got ''"):
        read_world({**SLURM, "SLURM_STEP_NODELIST": ""})


# --- TF_CONFIG ---


def test_the_world_of_tf_config_is_read():
    assert read_world(tf_config(index=2)) == World(
        rank=2,
        size=3,
        local_rank=1,
        local_size=2,
        address="a",
        port=2222,
        size_variable="TF_CONFIG",
        members=tuple(WORKERS),
    )
    cluster = {"worker": WORKERS[1:], "chief": ["[::1]:99"], "ps": ["p:1"]}
    chief, worker = read_world(tf_config("chief", **cluster)), read_world(tf_config(**cluster))
    assert chief is not None and (chief.rank, chief.size) == (0, 3)
    assert (chief.address, chief.port) == ("::1", 99)
    assert worker is not None and (worker.rank, worker.local_size) == (1, 2)
    assert worker.address == "::1"
    assert read_world({"TF_CONFIG": "{}"}) is None
    assert read_world(tf_config(worker=["a:1"])) is None, "one rank is alone"


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"TF_CONFIG": "{worker"}, "TF_CONFIG: is not JSON (Expecting property name enclosed in "),
        ({"TF_CONFIG": "[1]"}, "TF_CONFIG: has no cluster; expected {"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "TF_CONFIG: has no task; expected {"),
        (tf_config(index=3), "TF_CONFIG: the task is worker 3, and its cluster lists 3 workers, "),
        (tf_config(index="0"), "TF_CONFIG: the task is worker '0', and its cluster lists 3 "),
        (tf_config("chief"), "TF_CONFIG: the task is chief 0, and its cluster lists 0 chiefs, "),
        (tf_config("ps"), "TF_CONFIG: a task of type 'ps' has no part in a run; give 'chief' or "),
        (tf_config(worker=["a", "b"]), "TF_CONFIG: worker: expected a list of addresses such as "),
        (tf_config(worker={"a": 1}), "TF_CONFIG: worker: expected a list of addresses such as ["),
        (tf_config(worker=["a:0", "b:1"]), "TF_CONFIG: port 0: expected a number from 1 to "),
    ],
)
def test_a_tf_config_that_cannot_be_is_refused(variables, told):
    with pytest.raises(NetworkError) as caught:
        read_world(variables)
    assert str(caught.value).startswith(told) and caught.value.exit_code == 8


# --- several launchers ---


def test_the_innermost_launcher_counts():
    two = {"worker": WORKERS[:2]}
    all_of_them = {**tf_config(**two), **SLURM, **OPEN_MPI, **TORCHRUN}
    assert read_world(all_of_them) == read_world(TORCHRUN)
    assert read_world({**SLURM, **OPEN_MPI}) == read_world(OPEN_MPI)
    alone = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    assert read_world({**SLURM, **alone}) is None, "mpirun has started this one alone"
    task = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    with pytest.raises(NetworkError, match="lists 2 workers, and srun started 1 rank; list 1, or"):
        read_world({**tf_config(**two), **task})
    with pytest.raises(NetworkError, match="lists 2 workers, and srun started 5 ranks; list 5, or"):
        read_world({**SLURM, **tf_config(**two)})
