"""The hosts of a run, and how many ranks each of them gets."""

import math
import re
import socket
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from phalanx.errors import ConfigError
from phalanx.units import format_multiples, format_plural

_HERE = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(?:[\w.-]+@)?\w[\w.:-]*")


@dataclass(frozen=True, kw_only=True)
class HostLayout:
    """How ranks are distributed over hosts; a replica has one rank per device."""

    hosts: tuple[str, ...]  # as ssh takes them; empty if a scheduler names them
    replicas: int
    devices_per_replica: int
    nodes: int | None  # the number of hosts; None if only the scheduler knows

    @property
    def ranks(self) -> int:
        """The number of processes, each with one device."""
        return self.replicas * self.devices_per_replica

    @property
    def ranks_per_host(self) -> int:
        """How many processes run on one host."""
        return self.ranks // (self.nodes or 1)


def make_host_layout(
    *, hosts: Sequence[str], nodes: int | None, replicas: int, devices_per_replica: int
) -> HostLayout:
    """The layout of ranks over hosts; raises if they do not divide, with the nearest that do."""
    layout = HostLayout(
        hosts=tuple(hosts),
        replicas=replicas,
        devices_per_replica=devices_per_replica,
        nodes=nodes,
    )
    if nodes and layout.ranks % nodes:
        factor = nodes // math.gcd(nodes, devices_per_replica)
        product = f"{replicas} x {devices_per_replica} = " if devices_per_replica > 1 else ""
        raise ConfigError(
            f"--num-replicas {replicas}: {product}{format_plural(layout.ranks, 'rank')} cannot be "
            f"shared evenly by {format_plural(nodes, 'host')}; give --num-replicas "
            f"{format_multiples(replicas, factor)}, or another number of hosts"
        )
    return layout


def check_instances(instances: int, replicas: int) -> None:
    """Refuse a number of instances that the older launcher would have refused."""
    if instances > replicas:
        raise ConfigError(
            f"--num-instances {instances}: there cannot be more instances than replicas, which are "
            f"{replicas}; give --num-instances {replicas} or fewer"
        )
    if replicas % instances:
        raise ConfigError(
            f"--num-instances {instances}: the number of replicas, {replicas}, must be a multiple "
            f"of it; give --num-replicas {format_multiples(replicas, instances)}"
        )


def count_devices_per_replica(devices: int, replicas: int) -> int:
    """The devices of one replica, from those of all."""
    if devices % replicas:
        raise ConfigError(
            f"--num-devices {devices}: the number of devices must be a multiple of the replication "
            f"factor, which is {replicas}; give --num-devices {format_multiples(devices, replicas)}"
        )
    return devices // replicas


def parse_hosts(text: str) -> tuple[str, ...]:
    """The hosts in --host, separated by commas or spaces."""
    hosts = tuple(text.replace(",", " ").split())
    for host in hosts:
        if not _HOST.fullmatch(host):  # such as -oProxyCommand=..., which ssh would obey
            raise ConfigError(f"--host: {host!r} is not the name or address of a host")
        if hosts.count(host) > 1:
            raise ConfigError(
                f"--host: {host} is named {hosts.count(host)} times; name it once: its ranks are "
                "counted by --num-replicas and --devices-per-replica"
            )
    if not hosts:
        raise ConfigError("--host: expected names or addresses of hosts, such as node1,node2")
    return hosts


def strip_user(host: str) -> str:
    """A host without the user that ssh logs in as."""
    return host.rpartition("@")[2]


def is_this_host(host: str) -> bool:
    """Whether a name or address is that of this machine.

    Other loopback addresses, such as 127.0.0.2, count as other hosts.
    """
    own = (*_HERE, socket.gethostname(), socket.gethostname().partition(".")[0])
    if "@" in host or host in own:
        return host in own  # another user is reached by ssh
    with suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            if not str(address[0]).startswith("127.") and _can_bind(family, str(address[0])):
                return True
    return False


def _can_bind(family: socket.AddressFamily, address: str) -> bool:
    """Whether one of our network interfaces has the address."""
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
