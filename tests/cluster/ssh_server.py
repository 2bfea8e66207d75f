"""A server on the second host that lets the first one in by ssh."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launched_runs import wait_for

from hosts import ADDRESSES, Hosts

_PORT = 2222


@contextmanager
def open_ssh_server(hosts: Hosts, folder: Path) -> Iterator[list[str]]:
    """The options with which ssh gets from hosta to hostb; skips where there is no sshd."""
    server = shutil.which("sshd", path="/usr/sbin:/sbin:/usr/local/sbin")
    if server is None or not shutil.which("ssh"):
        pytest.skip("needs sshd and ssh (apt-get install openssh-server)")
    folder.mkdir()
    for name in ("host", "user"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True)
    Path("/run/sshd").mkdir(exist_ok=True)  # where it leaves its privileges behind
    given = {
        "ListenAddress": ADDRESSES["hostb"],
        "Port": _PORT,
        "AuthorizedKeysFile": folder / "user.pub",
        "StrictModes": "no",
        "PermitRootLogin": "yes",
        "PidFile": "none",
    }
    options = [word for name, value in given.items() for word in ("-o", f"{name}={value}")]
    words = [server, "-D", "-f", "/dev/null", "-h", folder / "host", *options]
    process = hosts.popen("hostb", words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    known = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
    way = ["-q", "-p", str(_PORT), "-i", str(folder / "user"), *known]

    def answers() -> bool | None:
        done = hosts.run("hosta", ["ssh", *way, ADDRESSES["hostb"], "true"])
        return done.returncode == 0 or None

    try:
        wait_for(answers, timeout=20)
        yield way
    finally:
        process.terminate()
        process.wait(timeout=20)
