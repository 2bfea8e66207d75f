"""The ranks of a run: how they connect, and what they exchange."""

import atexit
import gc
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from phalanx.errors import FailedElsewhere, NetworkError
from phalanx.parallel.interfaces import find_interface, find_own_address, is_loopback
from phalanx.parallel.stage_links import StageLinks
from phalanx.plan.layout import Layout
from phalanx.plan.world import World
from phalanx.units import format_plural

Store = Any  # of torch.distributed, which hides it from type checkers
_Value = TypeVar("_Value")
_FAILED = "failed"  # the key for the first rank that fails, and its exit code
_INFORMED = "told"  # ... which counts the ranks that know of the failure
_POLL_S = 0.02
_LONGEST_SILENCE = 3.0  # seconds within which a failing rank reports it


def open_store(world: World, *, timeout: float) -> Store:
    """The key-value store of the ranks of a world; each restart has its own keys.

    NetworkError if this rank was started with another world than rank 0.
    """
    store = _open_store(world, world.restart, timeout)
    with convert_peer_errors(world):
        problem = _register_rank(world, store, timeout)
    if problem:
        if register_failure(world, store, NetworkError.exit_code) is not None:
            raise FailedElsewhere
        raise NetworkError(problem)
    return store


def _register_rank(world: World, store: Store, timeout: float) -> str:
    """Publish this rank's host, address and world; returns what is wrong with them, or ""."""
    host, address = socket.gethostname(), find_own_address(world.address)
    if store.add(f"came/{world.rank}", 1) > 1:
        return (
            f"rank {world.rank} on {host}: another process has already come as rank {world.rank}; "
            "each must have its own number"
        )
    mine = {"host": host, "address": address, "size": world.size, "members": [*world.members]}
    store.set(f"introduced/{world.rank}", json.dumps(mine))
    if world.rank == 0:
        return ""
    first = json.loads(wait_for_key(store, "introduced/0", timeout=timeout))
    if first["size"] != world.size:
        told = f"{world.size_variable} gives {format_plural(world.size, 'rank')}"
        what = f"{told}, and that of rank 0 on {first['host']} of {first['size']}"
    elif first["members"] != mine["members"]:
        what = f"{world.size_variable} lists other ranks than that of rank 0 on {first['host']}"
    else:
        return ""
    return f"rank {world.rank} on {host}: {what}; all ranks must have the same"


def find_in_earlier_store(world: World, key: str, *, timeout: float) -> str:
    """The value of a key before the launcher, which keeps the store, restarted the ranks."""
    for restart in reversed(range(world.restart)):
        store = _open_store(world, restart, timeout)
        if store.check([key]):
            return str(store.get(key).decode())
    return ""


def wait_for_key(store: Store, key: str, *, timeout: float) -> str:
    """Wait for the value that rank 0 sets for a key."""
    try:
        store.wait([key], timedelta(seconds=timeout))
        return str(store.get(key).decode())
    except (dist.DistError, RuntimeError) as error:
        raise NetworkError(
            f"rank 0 was not ready within {timeout:g} s; check its output, or wait longer with "
            "--rank-timeout"
        ) from error


def wait_for_count(store: Store, key: str, count: int, *, timeout: float) -> None:
    """Wait until so many ranks have incremented a key, or until the timeout."""
    deadline = time.monotonic() + timeout
    while store.add(key, 0) < count and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _open_store(world: World, restart: int, timeout: float) -> Store:
    is_master = world.rank == 0 and not world.joins_store
    where = f"{world.address}:{world.port}"
    try:
        if is_master:
            socket.getaddrinfo(world.address, world.port)
        else:
            _wait_for_listener(world, timeout)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            world.address,
            world.port,
            is_master=is_master,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
        )
    except (dist.DistError, RuntimeError, OSError) as error:
        if is_master and "EADDRINUSE" in str(error):
            raise NetworkError(
                f"MASTER_PORT {world.port}: is in use by another program; choose another port"
            ) from error
        raise NetworkError(
            f"rank {world.rank} on {socket.gethostname()}: rank 0 cannot be reached at {where} "
            f"within {timeout:g} s; check MASTER_ADDR, MASTER_PORT and the firewall"
        ) from error
    return dist.PrefixStore(f"phalanx-{restart}", store)  # type: ignore[attr-defined]


def _wait_for_listener(world: World, timeout: float) -> None:
    """Wait until rank 0 listens; torch would wait twice as long, and log pages of errors."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((world.address, world.port), timeout=timeout).close()
            return
        except OSError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)


class Ranks:
    """The process group of a run, seen from one of its ranks.

    Python objects and flags are exchanged with gloo, gradients between devices.
    """

    def __init__(self, world: World, store: Store, device: torch.device, *, timeout: float) -> None:
        self.rank, self.size, self.world = world.rank, world.size, world
        addresses = _wait_for_all(world, store, timeout)
        _choose_interface(world, addresses)
        # longer than the watchdog's, whose report says more
        self._limit = limit = timedelta(seconds=2 * timeout + 60)
        backend = "nccl" if device.type == "cuda" else "gloo"
        own = dist.PrefixStore("ranks", store)  # type: ignore[attr-defined]
        with convert_peer_errors(world):
            dist.init_process_group(
                backend,
                store=own,
                rank=world.rank,
                world_size=world.size,
                timeout=limit,
                device_id=torch.device("cuda", device.index or 0) if backend == "nccl" else None,
            )
            self._host: Any = dist.new_group(backend="gloo", timeout=limit)
        self._flag = torch.zeros((), dtype=torch.int32)
        self._device = device
        self._links: dict[Layout, StageLinks] = {}
        # gloo's threads end with the last reference to their group, and sessions have cycles; a
        # thread that still releases a tensor while Python shuts down aborts the process
        atexit.register(gc.collect)

    def link_stages(self, layout: Layout) -> StageLinks | None:
        """The links of this rank's stage to the others; None if the model has one stage.

        All ranks must call it, in the same order for several layouts.
        """
        if layout.stages == 1:
            return None
        if layout not in self._links:
            self._links[layout] = StageLinks(layout, self.rank, self._device, timeout=self._limit)
        return self._links[layout]

    def gather(self, value: _Value) -> list[_Value]:
        """The values of all ranks, in order."""
        values: list[_Value | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self._host)
        return values  # type: ignore[return-value]

    def any(self, value: bool) -> bool:
        """Whether `value` is true in any rank."""
        self._flag.fill_(value)
        dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._host)
        return bool(self._flag)

    def refuse_differences(self, digests: Mapping[str, str]) -> None:
        """Raise NetworkError unless these digests, by name, are the same on all ranks."""
        everybody = self.gather((socket.gethostname(), dict(digests)))
        expected = everybody[0][1]
        for rank, (host, found) in enumerate(everybody):
            other = [name for name, digest in found.items() if digest != expected.get(name)]
            if other:
                raise NetworkError(
                    f"rank {rank} on {host} has different {' and '.join(other)} from rank 0 on "
                    f"{everybody[0][0]}; all ranks must have the same"
                )

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the process group; the others may continue."""
        self._links.clear()
        self._host = None
        if dist.is_initialized():
            with suppress(dist.DistError, RuntimeError):
                dist.destroy_process_group()


def register_failure(world: World, store: Store, exit_code: int) -> int | None:
    """Report this rank's failure; returns the exit code of a rank that failed before, or None."""
    mine = f"{world.rank} {exit_code}"
    with suppress(dist.DistError, RuntimeError):
        signed = store.compare_set(_FAILED, "", mine).decode()
        return None if signed == mine else int(signed.split()[1])
    # the store ended with rank 0: rank 1 of its host and the first rank of each other host report
    first = 1 if world.rank == world.local_rank else 0
    return None if world.local_rank <= first else exit_code


def find_failure(world: World, store: Store) -> int | None:
    """The exit code of another rank that failed, waiting a moment for its report; else None."""
    deadline = time.monotonic() + _LONGEST_SILENCE
    while time.monotonic() < deadline:
        with suppress(dist.DistError, RuntimeError):
            if store.check([_FAILED]):
                rank, code = store.get(_FAILED).decode().split()
                return int(code) if int(rank) != world.rank else None
        time.sleep(0.05)
    return None


def has_failure(store: Store) -> bool:
    """Whether a rank has reported a failure."""
    with suppress(dist.DistError, RuntimeError):
        return bool(store.check([_FAILED]))
    return False


def leave_store(world: World, store: Store) -> None:
    """Leave after a failure; rank 0, with which the store ends, waits until all others know."""
    with suppress(dist.DistError, RuntimeError):
        store.add(_INFORMED, 1)
        if world.rank == 0 and not world.joins_store:
            wait_for_count(store, _INFORMED, world.size, timeout=_LONGEST_SILENCE)


def _wait_for_all(world: World, store: Store, timeout: float) -> list[str]:
    """Wait for all ranks, and return their addresses; NetworkError names missing ranks."""
    store.set(f"here/{world.rank}", "")
    deadline = time.monotonic() + timeout
    missing = list(range(world.size))
    while missing and time.monotonic() < deadline:
        missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
        if store.check([_FAILED]):
            raise PeersLost(f"rank {world.rank} of {world.size}: another rank could not begin")
        time.sleep(0.02 * bool(missing))
    if missing:
        names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        who, whose = ("rank", "its") if len(missing) == 1 else ("ranks", "their")
        raise NetworkError(
            f"{who} {names} of {world.size} did not start within {timeout:g} s; check {whose} "
            "output, or wait longer with --rank-timeout"
        )
    return [json.loads(store.get(f"introduced/{rank}"))["address"] for rank in range(world.size)]


def _choose_interface(world: World, addresses: list[str]) -> None:
    """Make gloo use the interface that reaches the other ranks, unless the user has set one.

    By default it uses that of the host's own name, which others may not reach.
    """
    own = addresses[world.rank]
    if is_loopback(own) and world.local_size < world.size:
        # the host of rank 0 may resolve its own name to the loopback address
        peer = next((other for other in addresses if not is_loopback(other)), "")
        own = find_own_address(peer) if peer else own
    name = find_interface(own)
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


class PeersLost(NetworkError):
    """The connection to another rank broke, so something happened to that rank."""


@contextmanager
def convert_peer_errors(world: World) -> Iterator[None]:
    """Context in which a broken connection between ranks becomes PeersLost."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        is_ours = isinstance(error, dist.DistError) or any(
            word in str(error) for word in ("gloo", "Gloo", "NCCL", "Connection", "process group")
        )
        if not is_ours:
            raise
        # strip the location in gloo's code at the start, and the advice at the end
        reason = re.sub(r"^\[\S+:\d+\] ", "", str(error).strip().splitlines()[0]).split(". ")[0]
        raise PeersLost(
            f"rank {world.rank} of {world.size} on {socket.gethostname()}: lost the other ranks "
            f"({reason})"
        ) from error
