"""The hosts that the proofs run on: they have names, a cable of some speed, and can be cut off."""

import os
import time
from pathlib import Path

import pytest

from hosts import ADDRESSES, INTERFACE, NAMES, open_hosts

pytestmark = pytest.mark.slow
_RECEIVE = """
import socket, time
with socket.create_server(("", 7000)) as server:
    link, _ = server.accept()
    start, count = time.monotonic(), 0
    while data := link.recv(1 << 20):
        count += len(data)
    print(count * 8e-6 / (time.monotonic() - start))
"""
_SEND = """
import socket, time
deadline = time.monotonic() + 20
while True:
    try:
        link = socket.create_connection(("hosta", 7000), 5)
        break
    except OSError:
        assert time.monotonic() < deadline
link.sendall(bytes(10 << 20))
"""


def test_hosts_have_names_and_reach_each_other():
    with open_hosts() as hosts:
        for host in NAMES:
            assert hosts.run(host, ["hostname"]).stdout == f"{host}\n"
            shown = hosts.run(host, ["ip", "-4", "address", "show", INTERFACE]).stdout
            assert ADDRESSES[host] in shown
        variables = hosts.run("hosta", ["env"], {"ONLY_HERE": 1}).stdout.splitlines()
        assert "ONLY_HERE=1" in variables and "ONLY_HERE" not in os.environ
        left = hosts.popen("hostb", ["sleep", 1000])
    assert left.wait(timeout=5) < 0
    assert not list(Path("/run/netns").glob(f"phalanx-{os.getpid()}-*"))


def test_the_cable_is_as_fast_as_it_is_told():
    with open_hosts() as hosts:
        hosts.limit(100)
        assert measure_mbit(hosts) < 110
        hosts.limit(None)
        assert measure_mbit(hosts) > 110


def test_a_cut_cable_carries_nothing():
    with open_hosts() as hosts:
        hosts.cut()
        cut = hosts.popen("hosta", ["python3", "-c", _RECEIVE])
        sender = hosts.popen("hostb", ["python3", "-c", _SEND])
        time.sleep(2)
        assert cut.poll() is None and sender.poll() is None
        hosts.mend()
        assert sender.wait(timeout=20) == 0 and cut.wait(timeout=20) == 0


def measure_mbit(hosts):
    """What the cable carries from hostb to hosta."""
    receiver = hosts.popen("hosta", ["python3", "-c", _RECEIVE])
    assert hosts.run("hostb", ["python3", "-c", _SEND]).returncode == 0
    return float(receiver.communicate(timeout=20)[0])
