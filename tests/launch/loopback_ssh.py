"""A real sshd on this machine, at addresses that stand for other hosts."""

import getpass
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOSTS = ("127.0.0.2", "127.0.0.3")  # on Linux the whole network 127/8 is this machine
SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")


@contextmanager
def ssh_server(folder: Path) -> Iterator[str]:
    """Runs a server with keys of its own; the options that ssh needs to log in to it."""
    for name in ("host", "user"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    with socket.create_server((HOSTS[0], 0)) as probe:
        port = probe.getsockname()[1]
    options = {
        "AuthorizedKeysFile": folder / "user.pub",
        "StrictModes": "no",
        "UsePAM": "no",
        "PermitRootLogin": "yes",
        "PidFile": "none",
    }
    assert SSHD
    words = [SSHD, "-D", "-E", folder / "sshd.log", "-f", "/dev/null", "-p", str(port)]
    words += ["-h", folder / "host", *(f"-oListenAddress={host}" for host in HOSTS)]
    server = subprocess.Popen([*words, *(f"-o{name}={value}" for name, value in options.items())])
    try:
        _wait_for_port(port)
        yield (
            f"-p {port} -i {folder / 'user'} -l {getpass.getuser()} -o StrictHostKeyChecking=no "
            f"-o UserKnownHostsFile={folder / 'known'} -o LogLevel=ERROR -F none"
        )
    finally:
        server.terminate()
        server.wait()


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.create_connection((HOSTS[0], port)).close()
            return
        except OSError:
            assert time.monotonic() < deadline, "sshd does not listen"
            time.sleep(0.05)
