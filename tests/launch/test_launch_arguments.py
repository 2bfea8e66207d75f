"""The words of the older launcher, as they stand in the READMEs of the older programs."""

import shlex

import pytest

from phalanx.errors import ConfigError
from phalanx.launch.arguments import parse_launch_arguments

HERE = {"PATH": "/bin", "PYTHONPATH": "/src", "LD_LIBRARY_PATH": "/lib"}
POD64 = """-v --host 10.1.3.101,10.1.3.102,10.1.3.103,10.1.3.104 --numa-aware=yes
    --vipu-server-host=10.1.3.101 --vipu-partition=p64 --reset-partition=no --update-partition=no
    --mpi-global-args="--tag-output --mca btl_tcp_if_include 10.1.3.0/24"
    --mpi-local-args="-x LD_LIBRARY_PATH -x PATH -x PYTHONPATH -x TF_CPP_VMODULE=poplar_compiler=1
    -x IPUOF_VIPU_API_TIMEOUT=300 -x TF_POPLAR_FLAGS=--executable_cache_path=/w/exec_cache"
    --num-replicas=16 --num-instances=16 --ipus-per-replica 4 -- train"""
POD128 = """-v --host 10.10.19.150,10.10.19.151 --numa-aware=yes --vipu-server-host=10.3.19.150
    --vipu-server-timeout=300 --vipu-partition=gcl128 --vipu-cluster=gcl --reset-partition=no
    --update-partition=no --num-ilds=2
    --mpi-global-args="--tag-output --allow-run-as-root --mca oob_tcp_if_include 10.10.0.0/16
    --mca btl_tcp_if_include 10.10.0.0/16" --mpi-local-args="-x PATH -x POPLAR_ENGINE_OPTIONS"
    --ipus-per-replica 4 --num-replicas=32 --num-instances=32 -- train"""


def test_a_line_for_four_hosts_is_understood():
    words = parse_launch_arguments(shlex.split(POD64), HERE)
    assert words.command == ("train",)
    hosts = "10.1.3.101,10.1.3.102,10.1.3.103,10.1.3.104"
    numbers = ["--num-replicas=16", "--num-instances=16", "--devices-per-replica", "4"]
    assert words.own == ["--host", hosts, *numbers]
    assert words.tag_output and words.interface == "10.1.3.0/24" and words.timeout == "300"
    assert words.variables == {
        **HERE,
        "TF_CPP_VMODULE": "poplar_compiler=1",
        "TF_POPLAR_FLAGS": "--executable_cache_path=/w/exec_cache",
    }
    left_out = "-v --numa-aware=yes --vipu-server-host=10.1.3.101 --vipu-partition=p64"
    left_out += " --reset-partition=no --update-partition=no"
    noted = [note.partition(":")[0] for note in words.notes if "left out" in note]
    assert noted == left_out.split()
    assert "-x IPUOF_VIPU_API_TIMEOUT 300: taken as --rank-timeout 300" in words.notes


def test_a_line_for_two_pods_is_understood():
    words = parse_launch_arguments(shlex.split(POD128), HERE)
    assert words.interface == "10.10.0.0/16" and words.timeout == "300"
    assert words.mpi_args == ["--allow-run-as-root"]
    assert "-x POPLAR_ENGINE_OPTIONS: is not set here and was left out" in words.notes


@pytest.mark.parametrize(
    ("line", "own", "notes"),
    [
        ("-v --numa-aware 1 --num-instance 8 --", ["--num-instances", "8"], 2),
        ("--num-replicas 4 --ipus-per-replica=1 --numa-aware --", None, 1),
        ("--num-ipus 8 --replication-factor 4 --", None, 0),
        ("--only-output-from-instance 0 --print-topology=yes -vv --", [], 3),
        ("--executable-cache-path ./cache --offline-mode=on --sync-type auto --", [], 3),
    ],
)
def test_words_without_a_meaning_are_left_out_with_one_note_each(line, own, notes):
    words = parse_launch_arguments(line.split(), {})
    assert len(words.notes) == notes
    assert own is None or words.own == own
    assert all(note.count("left out") == 1 for note in words.notes)


@pytest.mark.parametrize("line", ["-x A=1 -xB=2 --", "-x A=1 -x=B=2 --"])
def test_variables_come_with_their_value_or_from_here(line):
    assert parse_launch_arguments(line.split(), {}).variables == {"A": "1", "B": "2"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--num-replicas 2 train demo", "`--` is missing"),
        ("--num-replicas 2 python3 train.py --config x", "in place of `python3 train.py`"),
        ("-x A-B=1 --", "-x A-B=1: expected NAME or NAME=VALUE"),
        ("-x --", "-x: expected a value after it"),
        ("--mca --", "--mca: expected a value after it"),
        ('--mpi-local-args "-x \'a" --', "No closing quotation"),
    ],
)
def test_mistakes_are_told(line, words):
    with pytest.raises(ConfigError) as refused:
        parse_launch_arguments(shlex.split(line), {})
    assert words in str(refused.value)
