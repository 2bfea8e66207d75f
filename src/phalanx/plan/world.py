"""The ranks that a launcher has started, as described by its environment variables.

launcher                  sets, among others                address of rank 0
torchrun, ourselves       RANK, WORLD_SIZE                  MASTER_ADDR, MASTER_PORT
Open MPI's mpirun         OMPI_COMM_WORLD_RANK, _SIZE       MASTER_ADDR, else the host of mpirun
Slurm's srun              SLURM_PROCID, _STEP_NUM_TASKS     MASTER_ADDR, else the step's first host
TF_CONFIG                 TF_CONFIG                         the first worker that it lists

The first one found is used: torchrun may be started by srun, and mpirun inside a Slurm allocation.
With the last three, a single rank is not a world.
"""

import json
import os
import re
import socket
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.errors import NetworkError
from phalanx.plan.machine import count_cores
from phalanx.units import format_plural

_MOST_DIGITS, _HIGHEST_PORT = 9, 65_535
_FIRST_PORT, _PORTS = 20_000, 10_000  # below those that the system gives to outgoing connections
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among the ranks of a run."""

    rank: int
    size: int
    local_rank: int  # among the ranks of this machine
    local_size: int
    address: str  # where the ranks connect to each other
    port: int
    restart: int = 0  # how often all ranks were restarted
    joins_store: bool = False  # whether the launcher, not rank 0, runs the key-value store
    supervised: bool = False  # whether the launcher is our own, which reports lost ranks
    has_own_cores: bool = False  # whether the cores that this rank sees are no other rank's
    size_variable: str = "WORLD_SIZE"  # the variable with the number of ranks
    members: tuple[str, ...] = ()  # the addresses of all ranks, if that variable lists them


_RESTART = "PHALANX_RESTART"  # set by our own supervisor
_Environment = Mapping[str, str]


def read_world(environment: _Environment = os.environ) -> World | None:
    """The world that this process was started in; None if it is a single process."""
    for names, read in _LAUNCHERS.items():
        if set(names) <= environment.keys():
            return read(environment)
    return None


def count_rank_cores(ranks: int) -> int:
    """The cores for each of so many ranks of this machine."""
    world, cores = read_world(), count_cores()
    return cores if world and world.has_own_cores else max(1, cores // ranks)


def is_first_rank() -> bool:
    """Whether this process is the one of its world that prints."""
    try:
        world = read_world()
    except NetworkError:
        return True
    return world is None or world.rank == 0


def _read_torchrun(environment: _Environment) -> World:
    def number(name: str, default: str | None = None) -> int:
        way_out = (
            "a launcher such as torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; to "
            "run alone, unset RANK"
        )
        return _read_number(environment, name, default, way_out=way_out)

    rank, size = number("RANK"), number("WORLD_SIZE")
    local = number("LOCAL_RANK", str(rank)), number("LOCAL_WORLD_SIZE", str(size))
    _check_rank(rank, size, "RANK", "WORLD_SIZE")
    _check_rank(*local, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return World(
        rank=rank,
        size=size,
        local_rank=local[0],
        local_size=local[1],
        address=environment.get("MASTER_ADDR", _LOOPBACK),
        port=_check_port(number("MASTER_PORT")),
        restart=number(_RESTART, environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
        supervised=_RESTART in environment,
        joins_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _read_open_mpi(environment: _Environment) -> World | None:
    def number(name: str) -> int:
        way_out = "mpirun sets it; to run alone, unset OMPI_COMM_WORLD_RANK"
        return _read_number(environment, f"OMPI_COMM_WORLD_{name}", way_out=way_out)

    rank, size, local_size = number("RANK"), number("SIZE"), number("LOCAL_SIZE")
    _check_rank(rank, size, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    _refuse_other_list(environment, size, launcher="mpirun")
    if size == 1:
        return None
    job = environment.get("PMIX_NAMESPACE", environment.get("OMPI_MCA_ess_base_jobid", ""))
    address = environment.get("MASTER_ADDR") or (_LOOPBACK if local_size == size else "")
    return World(
        rank=rank,
        size=size,
        local_rank=number("LOCAL_RANK"),
        local_size=local_size,
        address=address or _find_mpirun(environment, rank),
        port=_choose_port(environment, job),
        size_variable="OMPI_COMM_WORLD_SIZE",
    )


def _find_mpirun(environment: _Environment, rank: int) -> str:
    """The address of mpirun's host; NetworkError if unknown, or if rank 0 is elsewhere."""
    found = re.search(r"tcp://([^:,;]+)", environment.get("OMPI_MCA_orte_hnp_uri", ""))
    if found is None or (rank == 0 and not _is_own(found[1])):
        where = "does not say where rank 0 is" if found is None else "runs on another host"
        raise NetworkError(
            f"MASTER_ADDR: is not set, and mpirun {where}; give it the address of rank 0's host: "
            "mpirun -x MASTER_ADDR=ADDRESS ..."
        )
    return found[1]


def _is_own(address: str) -> bool:
    """Whether an address belongs to this machine."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _read_slurm(environment: _Environment) -> World | None:
    def number(name: str, default: str | None = None) -> int:
        way_out = "srun sets it; to run alone, unset SLURM_PROCID"
        return _read_number(environment, name, default, way_out=way_out)

    rank, size = number("SLURM_PROCID"), number("SLURM_STEP_NUM_TASKS")
    _check_rank(rank, size, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    _refuse_other_list(environment, size, launcher="srun")
    if size == 1:
        return None  # a batch script, or a shell in an allocation
    tasks = _expand_tasks(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = number("SLURM_NODEID", "0")
    local_size = tasks[node] if node < len(tasks) else size
    address = environment.get("MASTER_ADDR") or (_LOOPBACK if local_size == size else "")
    allocated = number("SLURM_CPUS_ON_NODE", "0")
    # a requeued job keeps its number, and its last port may still be in use
    ids = [environment.get(f"SLURM_{name}", "") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT")]
    return World(
        rank=rank,
        size=size,
        local_rank=number("SLURM_LOCALID"),
        local_size=local_size,
        address=address or _find_first_host(environment.get("SLURM_STEP_NODELIST", "")),
        port=_choose_port(environment, *ids),
        has_own_cores=count_cores() * local_size <= allocated,
        size_variable="SLURM_STEP_NUM_TASKS",
    )


def _expand_tasks(text: str) -> list[int]:
    """The number of tasks of each node, from Slurm's notation.

    >>> _expand_tasks("2(x3),1")
    [2, 2, 2, 1]
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def _find_first_host(nodes: str) -> str:
    """The first host of a list in Slurm's notation.

    >>> _find_first_host("rack[2-3,7]n[01-04],login")
    'rack2n01'
    """
    found = re.match(r"(?:[^,\[\]]|\[[^\[\]]+\])+", nodes)
    if found is None:
        raise NetworkError(
            f"SLURM_STEP_NODELIST: expected a list of hosts, got {nodes!r}; set MASTER_ADDR to the "
            "host of rank 0"
        )
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", found[0])


def _read_tf_config(environment: _Environment) -> World | None:
    chiefs, workers, task = _read_cluster(environment["TF_CONFIG"])
    members = (*chiefs, *workers)
    if not members:
        return None
    kind, index = task.get("type"), task.get("index")
    if kind not in ("chief", "master", "worker"):
        raise NetworkError(
            f"TF_CONFIG: a task of type {kind!r} has no part in a run; give 'chief' or 'worker', "
            "or unset TF_CONFIG to run alone"
        )
    first, count = (len(chiefs), len(workers)) if kind == "worker" else (0, len(chiefs))
    if type(index) is not int or not 0 <= index < count:
        listed = f"its cluster lists {format_plural(count, kind)}, numbered from 0"
        raise NetworkError(f"TF_CONFIG: the task is {kind} {index!r}, and {listed}")
    if len(members) == 1:
        return None
    rank = first + index
    hosts = [host for host, _ in members]
    return World(
        rank=rank,
        size=len(members),
        local_rank=hosts[:rank].count(hosts[rank]),
        local_size=hosts.count(hosts[rank]),
        address=hosts[0],
        port=members[0][1],
        size_variable="TF_CONFIG",
        members=tuple(f"{host}:{port}" for host, port in members),
    )


_Members = tuple[tuple[str, int], ...]  # host and port of each


def _read_cluster(text: str) -> tuple[_Members, _Members, Mapping[str, Any]]:
    """The chiefs and workers in a TF_CONFIG, and its task."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NetworkError(
            f"TF_CONFIG: is not JSON ({error}); correct it, or unset it to run alone"
        ) from None
    cluster = config.get("cluster", {}) if isinstance(config, dict) else None
    task = config.get("task") if isinstance(config, dict) else None
    if not isinstance(cluster, dict) or (cluster and not isinstance(task, dict)):
        missing = "no task" if isinstance(cluster, dict) else "no cluster"
        raise NetworkError(
            f'TF_CONFIG: has {missing}; expected {{"cluster": {{"worker": ["host:port", ...]}}, '
            '"task": {"type": "worker", "index": 0}}'
        )
    chiefs = _read_addresses(cluster, "chief") + _read_addresses(cluster, "master")
    return chiefs, _read_addresses(cluster, "worker"), task or {}


def _read_addresses(cluster: Mapping[str, Any], kind: str) -> _Members:
    """Host and port of each task of a type."""
    listed = cluster.get(kind, [])
    found = [
        re.fullmatch(r"\[?([^]\s]+?)\]?:(\d{1,5})", text) if isinstance(text, str) else None
        for text in (listed if isinstance(listed, list) else [listed])
    ]
    if None in found:
        raise NetworkError(
            f"TF_CONFIG: {kind}: expected a list of addresses such as ['host:2222'], got {listed!r}"
        )
    return tuple(
        (match[1], _check_port(int(match[2]), "TF_CONFIG: port")) for match in found if match
    )


def _refuse_other_list(environment: _Environment, size: int, *, launcher: str) -> None:
    """Raise NetworkError if TF_CONFIG is also set, with another number of ranks."""
    if "TF_CONFIG" not in environment:
        return
    chiefs, workers, _ = _read_cluster(environment["TF_CONFIG"])
    listed = len(chiefs) + len(workers)
    if listed and listed != size:
        raise NetworkError(
            f"TF_CONFIG: lists {format_plural(listed, 'worker')}, and {launcher} started "
            f"{format_plural(size, 'rank')}; list {size}, or unset TF_CONFIG"
        )


def _read_number(
    environment: _Environment, name: str, default: str | None = None, *, way_out: str
) -> int:
    text = environment.get(name, default)
    if text is None or not text.isdecimal() or len(text) > _MOST_DIGITS:
        got = f"expected a whole number in the environment, got {text!r}"
        what = "is not set in the environment" if text is None else got
        raise NetworkError(f"{name}: {what}; {way_out}")
    return int(text)


def _check_rank(rank: int, size: int, rank_name: str, size_name: str) -> None:
    if size < 1:
        raise NetworkError(f"{size_name} {size}: expected at least one rank")
    if rank >= size:
        raise NetworkError(
            f"{rank_name} {rank}: ranks of {size_name} {size} are numbered from 0 to {size - 1}"
        )


def _check_port(port: int, name: str = "MASTER_PORT") -> int:
    if not 0 < port <= _HIGHEST_PORT:
        raise NetworkError(f"{name} {port}: expected a number from 1 to {_HIGHEST_PORT}")
    return port


def _choose_port(environment: _Environment, *job: str) -> int:
    """MASTER_PORT, else a port that is the same for all ranks of a job."""
    if "MASTER_PORT" in environment:
        way_out = "unset it to have one chosen"
        return _check_port(_read_number(environment, "MASTER_PORT", way_out=way_out))
    return _FIRST_PORT + zlib.crc32(" ".join(job).encode()) % _PORTS


_LAUNCHERS: dict[tuple[str, ...], Callable[[_Environment], World | None]] = {
    ("RANK", "WORLD_SIZE"): _read_torchrun,
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"): _read_open_mpi,
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"): _read_slurm,
    ("TF_CONFIG",): _read_tf_config,
}
