"""Finds the network interface of a host that reaches the other ranks."""

import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

_GET_ADDRESS = 0x8915  # SIOCGIFADDR, of Linux
_LOOPBACK = "lo"


def find_own_address(peer: str) -> str:
    """This host's address on the route to a peer; empty if there is no route."""
    with suppress(OSError):
        for family, kind, _, _, where in socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(where)  # nothing is sent
                return str(probe.getsockname()[0])
    return ""


def is_loopback(address: str) -> bool:
    """Whether an address reaches only this host."""
    return bool(address) and ip_address(address.partition("%")[0]).is_loopback


def find_interface(address: str) -> str | None:
    """The name of the interface that has an address of this host; None if not known."""
    if sys.platform != "linux" or not address:
        return None
    if is_loopback(address):
        return _LOOPBACK
    wanted = ip_address(address.partition("%")[0]).packed
    return next((name for name, packed in _list_addresses() if packed == wanted), None)


def _list_addresses() -> Iterator[tuple[str, bytes]]:
    """The interfaces of this host and their addresses."""
    import fcntl  # not on every system

    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, *_, name = line.split()
            yield name, bytes.fromhex(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                request = struct.pack("256s", name.encode())
                yield name, fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)[20:24]
