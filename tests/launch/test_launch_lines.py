"""The lines of torchrun, srun and mpirun."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.errors import ConfigError
from phalanx.launch.command_lines import RankCommand, build_launch_lines
from phalanx.launch.hosts import make_host_layout

BIN = Path(sys.executable).parent
RANK = [sys.executable, "-m", "phalanx", "train", "demo"]


def command(*hosts: str, replicas: int = 4, **more: object) -> RankCommand:
    layout = make_host_layout(
        hosts=hosts, nodes=len(hosts) or 1, replicas=replicas, devices_per_replica=1
    )
    given: dict = {"args": ("train", "demo"), "folder": Path("/work dir"), **more}
    return RankCommand(layout=layout, **given)


def torchrun(node: int, address: str, port: int, *, nodes: int, each: int) -> list[str]:
    words = f"--nnodes {nodes} --nproc-per-node {each} --node-rank {node} --master-addr {address}"
    return [str(BIN / "torchrun"), *words.split(), "--master-port", str(port), "-m", "phalanx"]


def test_one_host_is_one_line_of_torchrun():
    (line,) = build_launch_lines("torchrun", command(master=("127.0.0.1", 4000)))
    expected = torchrun(0, "127.0.0.1", 4000, nodes=1, each=4)
    assert shlex.split(line.text) == [*expected, "train", "demo"]


def test_other_hosts_get_a_line_each_by_ssh_in_the_same_folder():
    lines = build_launch_lines(
        "torchrun",
        command(
            "localhost", "node2", variables={"A": "b'c $d"}, ssh_args=("-p", "22"), master=("n", 1)
        ),
    )
    here, there = (shlex.split(line.text) for line in lines)
    own = torchrun(0, "n", 1, nodes=2, each=2)
    assert here == ["env", "A=b'c $d", *own, "train", "demo"]
    assert there[:3] == ["ssh", "-p", "22"] and there[-2] == "node2"
    assert {"BatchMode=yes", "ConnectTimeout=10"} < set(there)
    folder, remote = there[-1].split(" && exec ")
    assert shlex.split(folder) == ["cd", "/work dir"]
    assert shlex.split(remote) == [
        *here[:2],
        *torchrun(1, "n", 1, nodes=2, each=2),
        "train",
        "demo",
    ]


def test_what_ssh_gets_arrives_as_it_was(tmp_path):
    values = {"A": "two words", "B": 'it\'s $HOME; "quoted"', "C": ""}
    made = command("node1", "node2", variables=values, folder=tmp_path, args=("train", "a b"))
    text = build_launch_lines("torchrun", made)[1].text
    pretended = 'ssh() { eval "${@:$#}"; }; '  # what ssh does on the other side
    program = str(BIN / "torchrun")
    assert program in text
    show = tmp_path / "show"
    show.write_text("#!/bin/sh\npwd; printenv A B C; printf '%s\\n' \"$@\"\n")
    show.chmod(0o700)
    text = text.replace(program, str(show))
    done = subprocess.run(
        ["bash", "-c", pretended + text], capture_output=True, text=True, check=True
    )
    said = done.stdout.splitlines()
    assert said[:4] == [str(tmp_path), *values.values()] and said[-2:] == ["train", "a b"]


def test_srun_gets_tasks_and_nodes():
    made = command("n1", "me@n2", tag_output=True, variables={"A": "1"}, interface="eth0")
    (line,) = build_launch_lines("srun", made)
    options = "--ntasks 4 --kill-on-bad-exit=0 --nodes 2 --ntasks-per-node 2 --nodelist n1,n2"
    network = ["env", "GLOO_SOCKET_IFNAME=eth0", "NCCL_SOCKET_IFNAME=eth0", "A=1"]
    assert shlex.split(line.text) == ["srun", *options.split(), "--label", *network, *RANK]


def test_srun_gets_the_cores_of_the_allocations_tasks(monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "16")
    (line,) = build_launch_lines("srun", command("n1", "n2"))
    assert line.text.startswith("srun --cpus-per-task 16 --ntasks 4 ")


def test_mpirun_gets_slots_variables_and_interfaces():
    made = command(
        "n1",
        "n2",
        tag_output=True,
        variables={"A": "b c"},
        interface="eth0",
        mpi_args=("--allow-run-as-root", "--mca", "btl", "tcp,self"),
        ssh_args=("-i", "my key"),
    )
    words = shlex.split(build_launch_lines("mpirun", made)[0].text)
    assert words[:5] == ["mpirun", "-np", "4", "--host", "n1:2,n2:2"]
    assert words[5:9] == ["--bind-to", "none", "--wdir", "/work dir"]
    assert words.count("--allow-run-as-root") == 1 and "--tag-output" in words
    text = " ".join(words)
    assert "--mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0" in text
    assert "-x TERM=dumb -x GLOO_SOCKET_IFNAME=eth0 -x NCCL_SOCKET_IFNAME=eth0 -x A=b c" in text
    assert words[words.index("plm_rsh_args") + 1].startswith("-i 'my key' -o BatchMode=yes")
    assert words[-8:] == ["--mca", "btl", "tcp,self", *RANK]


def test_mpirun_gets_the_user_of_its_hosts_for_ssh_alone():
    words = build_launch_lines("mpirun", command("al@n1", "al@n2", ssh_args=("-v",)))[0].args
    assert words[words.index("--host") + 1] == "n1:2,n2:2"  # it takes no @ in a name
    assert words[words.index("plm_rsh_args") + 1].startswith("-v -l al -o BatchMode=yes")
    with pytest.raises(ConfigError, match="--host al@n1,n2: mpirun logs in to all hosts as one"):
        build_launch_lines("mpirun", command("al@n1", "n2"))


@pytest.mark.skipif(shutil.which("ip") is None, reason="needs ip")
@pytest.mark.parametrize(
    ("subnet", "code", "out", "err"),
    [
        ("127.0.0.0/8", 0, "lo\nlo\n", ""),
        ("198.51.100.0/24", 8, "", " has no address in 198.51.100.0/24\n"),
    ],
)
def test_a_subnet_finds_the_interface_of_each_host(subnet, code, out, err):
    (line,) = build_launch_lines("srun", command(interface=subnet))
    words = line.args[line.args.index("sh") : -len(RANK)]
    show = ["printenv", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    done = subprocess.run([*words, *show], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, out) and done.stderr.endswith(err)
