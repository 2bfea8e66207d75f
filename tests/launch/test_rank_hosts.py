"""Ranks over hosts: what divides, what is refused, and which host is this one."""

import socket

import pytest

from phalanx.errors import ConfigError
from phalanx.launch.hosts import (
    check_instances,
    count_devices_per_replica,
    is_this_host,
    make_host_layout,
    parse_hosts,
)


def make_layout(replicas: int, devices: int, *hosts: str):
    return make_host_layout(
        hosts=hosts, nodes=len(hosts), replicas=replicas, devices_per_replica=devices
    )


@pytest.mark.parametrize(
    ("replicas", "devices", "hosts", "ranks", "each"),
    [(16, 1, 1, 16, 16), (16, 4, 4, 64, 16), (32, 4, 8, 128, 16), (1, 2, 2, 2, 1)],
)
def test_every_device_of_every_replica_has_a_rank(replicas, devices, hosts, ranks, each):
    layout = make_layout(replicas, devices, *(f"node{number}" for number in range(hosts)))
    assert (layout.ranks, layout.ranks_per_host) == (ranks, each)


@pytest.mark.parametrize(
    ("replicas", "devices", "hosts", "words"),
    [
        (3, 1, 2, "3 ranks cannot be shared evenly by 2 hosts; give --num-replicas 2 or 4"),
        (
            5,
            2,
            4,
            "5 x 2 = 10 ranks cannot be shared evenly by 4 hosts; give --num-replicas 4 or 6",
        ),
        (1, 1, 2, "1 rank cannot be shared evenly by 2 hosts; give --num-replicas 2, or"),
    ],
)
def test_ranks_that_hosts_cannot_share_are_refused_with_the_nearest(
    replicas, devices, hosts, words
):
    with pytest.raises(ConfigError) as refused:
        make_layout(replicas, devices, *(f"node{number}" for number in range(hosts)))
    assert words in str(refused.value)


def test_the_older_rules_are_told_in_their_words():
    with pytest.raises(ConfigError, match="cannot be more instances than replicas"):
        check_instances(8, 4)
    with pytest.raises(ConfigError, match="must be a multiple of it; give --num-replicas 3 or 6"):
        check_instances(3, 4)
    with pytest.raises(
        ConfigError,
        match="devices must be a multiple of the replication factor, which is 4; give "
        "--num-devices 4 or 8",
    ):
        count_devices_per_replica(6, 4)
    check_instances(8, 16)
    assert count_devices_per_replica(8, 4) == 2


@pytest.mark.parametrize("text", ["a,b", "a, b", "a b", "a,b,"])
def test_hosts_are_read_with_commas_or_spaces(text):
    assert parse_hosts(text) == ("a", "b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b,a", "a is named 2 times"),
        ("-oProxyCommand=evil", "is not the name or address of a host"),
        ("a;b", "is not the name or address of a host"),
        (",", "expected names or addresses"),
    ],
)
def test_what_is_no_host_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_hosts(text)


def test_this_host_is_known_by_its_names_and_addresses():
    own = ["localhost", "127.0.0.1", socket.gethostname()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # sends nothing
            own.append(probe.getsockname()[0])
        except OSError:
            pass  # a machine without a network
    assert [host for host in own if not is_this_host(host)] == []
    assert not is_this_host("127.0.0.2") and not is_this_host("198.51.100.1")
    assert not is_this_host("somebody@localhost")
