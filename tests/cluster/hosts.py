"""Two hosts on one machine: network namespaces with a cable between them."""

import itertools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

NAMES = ("hosta", "hostb")
ADDRESSES = dict(zip(NAMES, ("10.77.0.1", "10.77.0.2"), strict=True))
NETWORK, INTERFACE = "10.77.0.0/24", "cable0"
_LONGEST = 300  # seconds; what takes longer hangs
_OURS = re.compile(r"phalanx-(\d+)-\d+-host[ab]")
_NUMBERS = itertools.count()
# in mounts of its own, where only it sees the names; `ip netns exec` would hide /sys/fs/cgroup
_ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


class Hosts:
    """Runs commands on either of two hosts, which share all but the network and the names."""

    def __init__(self, spaces: Mapping[str, str], names: Mapping[str, Path]) -> None:
        self._spaces = spaces
        self._names = names
        self._started: list[subprocess.Popen[str]] = []

    def popen(
        self,
        host: str,
        words: Sequence[object],
        env: Mapping[str, object] | None = None,
        **options: Any,
    ) -> "subprocess.Popen[str]":
        """A command on a host, in a session of its own; the process is the command itself."""
        enter = ["nsenter", f"--net=/run/netns/{self._spaces[host]}", "unshare", "--uts", "--mount"]
        variables = {name: str(value) for name, value in (env or {}).items()}
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
        process = subprocess.Popen(
            [*enter, "sh", "-c", _ENTER, "sh", str(self._names[host]), host, *map(str, words)],
            text=True,
            env={**os.environ, **variables},
            **(given | options),
        )
        self._started.append(process)
        return process

    def run(
        self,
        host: str,
        words: Sequence[object],
        env: Mapping[str, object] | None = None,
        *,
        timeout: float = _LONGEST,
        **options: Any,
    ) -> "subprocess.CompletedProcess[str]":
        """A command on a host, run to its end."""
        process = self.popen(host, words, env, **options)
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()  # if it hangs
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def limit(self, mbit: float | None) -> None:
        """Slow the cable down in both directions, to Mbit/s; None lifts the limit."""
        for space in self._spaces.values():
            queue = ["tc", "-n", space, "qdisc"]
            if mbit is None:
                _call(*queue, "del", "dev", INTERFACE, "root")
                continue
            rate = ["tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
            _call(*queue, "replace", "dev", INTERFACE, "root", *rate)

    def cut(self) -> None:
        """Cut the cable: nothing arrives any more, and nobody is told."""
        self._set_link("hostb", "down")

    def mend(self) -> None:
        """Connect the hosts again."""
        self._set_link("hostb", "up")

    def close(self) -> None:
        """Remove the hosts, with all that runs on them."""
        for space in self._spaces.values():
            _remove(space)
        for process in self._started:
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def _set_link(self, host: str, state: str) -> None:
        _call("ip", "-n", self._spaces[host], "link", "set", INTERFACE, state)


@contextmanager
def open_hosts(*, own_name: str | None = None) -> Iterator[Hosts]:
    """Two hosts that reach each other by name; skips the test where that is not possible.

    own_name: the address that each of them knows itself by, if not that of the cable: Debian puts
    127.0.1.1 there. Whatever still runs on them when the block ends is killed.
    """
    _skip_without_namespaces()
    _remove_leftovers()
    number = next(_NUMBERS)  # a test may have several pairs of hosts
    spaces = {host: f"phalanx-{os.getpid()}-{number}-{host}" for host in NAMES}
    with TemporaryDirectory(prefix="phalanx-hosts-") as folder:
        names = {host: Path(folder, host) for host in NAMES}
        for host, path in names.items():
            known = {"localhost": "127.0.0.1", **ADDRESSES}
            known |= {host: own_name} if own_name else {}
            path.write_text("".join(f"{address} {name}\n" for name, address in known.items()))
        hosts = Hosts(spaces, names)
        try:
            _connect(spaces)
            yield hosts
        finally:
            hosts.close()


def _connect(spaces: Mapping[str, str]) -> None:
    """Make the namespaces, and the cable between them."""
    for space in spaces.values():
        _call("ip", "netns", "add", space)
        _call("ip", "-n", space, "link", "set", "lo", "up")
    one, other = spaces.values()
    ends = ["netns", one, "type", "veth", "peer", "name", INTERFACE, "netns", other]
    _call("ip", "link", "add", INTERFACE, *ends)
    for host, space in spaces.items():
        _call("ip", "-n", space, "address", "add", f"{ADDRESSES[host]}/24", "dev", INTERFACE)
        _call("ip", "-n", space, "link", "set", INTERFACE, "up")


def _skip_without_namespaces() -> None:
    missing = [tool for tool in ("ip", "tc", "nsenter", "unshare") if not shutil.which(tool)]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (apt-get install iproute2 util-linux)")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    name = f"phalanx-{os.getpid()}-{next(_NUMBERS)}-hosta"
    tried = _try("ip", "netns", "add", name)
    if tried.returncode:
        pytest.skip(f"network namespaces cannot be made here: {tried.stderr.strip()}")
    _remove(name)


def _remove_leftovers() -> None:
    """Remove the hosts of tests that were killed."""
    for path in Path("/run/netns").glob("phalanx-*"):
        found = _OURS.fullmatch(path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            _remove(path.name)


def _remove(space: str) -> None:
    """Remove a namespace, if it is there, with all that runs in it."""
    for pid in _try("ip", "netns", "pids", space).stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _try("ip", "netns", "delete", space)


def _call(*words: str) -> None:
    tried = _try(*words)
    assert tried.returncode == 0, (words, tried.stderr)


def _try(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, check=False, capture_output=True, text=True)
