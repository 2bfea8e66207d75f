"""One run, started by every launcher that there is: the same weights to the last bit."""

import shutil
import sys
from pathlib import Path

import pytest
from launched_runs import ranked_run

from hosts import ADDRESSES, NAMES, NETWORK, open_hosts
from phalanx.report.summary import read_summary
from slurm_cluster import open_slurm
from small_runs import run_phalanx
from ssh_server import open_ssh_server
from tf_workers import start_workers

pytestmark = pytest.mark.slow
PHALANX = [sys.executable, "-m", "phalanx"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe"]
FORWARDED = [word for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS") for word in ("-x", name)]


@pytest.fixture(scope="module")
def hosts():
    with open_hosts() as both:
        yield both


@pytest.fixture(scope="module")
def expected(digits, tmp_path_factory):
    """What the run ends with where Phalanx starts its ranks itself."""
    run = tmp_path_factory.mktemp("expected") / "run"
    done = run_phalanx(*ranked_run(digits, run, ranks=4, epochs=2))
    assert done.returncode == 0, done.stderr
    return show("phalanx train --devices 4", run)


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def words(digits, run):
    """The same run as a launcher starts it."""
    return ranked_run(digits, run, ranks=4, launched=True, epochs=2)


def show(launcher: str, run: Path) -> str:
    """The hash of the weights that a run has ended with, in a line of a table."""
    found = read_summary(run).weights_sha256
    print(f"\n| {launcher} | `{found}` |")
    return found


def test_torchrun_on_two_hosts(hosts, words, run, expected):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    torchrun += ["--nproc-per-node", "2", "--master-addr", ADDRESSES["hosta"]]
    started = [
        hosts.popen(host, [*torchrun, "--node-rank", node, "-m", "phalanx", *words])
        for node, host in enumerate(NAMES)
    ]
    ended = [(*process.communicate(timeout=240), process.returncode) for process in started]
    assert [code for *_, code in ended] == [0, 0], ended
    assert show("torchrun --nnodes 2 --nproc-per-node 2", run) == expected


def test_slurm_on_two_hosts(hosts, words, run, expected, tmp_path):
    with open_slurm(hosts, tmp_path / "slurm") as cluster:
        step = ["srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2"]
        done = cluster.run(*step, *PHALANX, *words)
    assert done.returncode == 0, done.stderr
    assert show("srun --nodes 2 --ntasks 4", run) == expected


def skip_without_open_mpi() -> None:
    if not shutil.which("mpirun"):
        pytest.skip("needs mpirun (apt-get install openmpi-bin)")


def test_open_mpi_on_one_host(hosts, words, run, expected):
    skip_without_open_mpi()
    done = hosts.run("hosta", [*MPIRUN, "-np", 4, *PHALANX, *words])
    assert done.returncode == 0, done.stderr
    assert show("mpirun -np 4", run) == expected


@pytest.fixture
def mpirun(hosts, tmp_path):
    """mpirun on hosta, with the options by which it reaches hostb."""
    skip_without_open_mpi()
    with open_ssh_server(hosts, tmp_path / "ssh") as way:
        reach = ["--mca", "plm_rsh_args", " ".join(way)]
        for part in ("oob", "btl"):
            reach += ["--mca", f"{part}_tcp_if_include", NETWORK]
        yield [*MPIRUN, *reach, *FORWARDED]


def test_open_mpi_on_two_hosts(hosts, mpirun, words, run, expected):
    both = ["--host", ",".join(f"{ADDRESSES[host]}:2" for host in NAMES)]
    done = hosts.run("hosta", [*mpirun, "-np", 4, *both, *PHALANX, *words])
    assert done.returncode == 0, done.stderr
    assert show("mpirun -np 4 --host hosta:2,hostb:2", run) == expected


def test_open_mpi_with_rank_0_on_another_host(hosts, mpirun, words, run, expected):
    def split(*variables: str) -> list[object]:
        """The run with ranks 0 and 1 on hostb, the other two on hosta."""
        first, second = (
            [*variables, "-np", 2, "--host", f"{ADDRESSES[host]}:2", *PHALANX, *words]
            for host in reversed(NAMES)
        )
        return [*mpirun, *first, ":", *second]

    done = hosts.run("hosta", split())
    assert done.returncode == 8, done.stderr
    assert "mpirun runs on another host; give it the address of rank 0's host" in done.stderr
    assert not run.exists()
    done = hosts.run("hosta", split("-x", f"MASTER_ADDR={ADDRESSES['hostb']}"))
    assert done.returncode == 0, done.stderr
    assert show("mpirun with rank 0 on hostb, and -x MASTER_ADDR", run) == expected


def test_tf_config_on_two_hosts_that_call_themselves_the_loopback(words, run, expected):
    with open_hosts(own_name="127.0.1.1") as hosts:
        started = start_workers(hosts, words)
        ended = [(*process.communicate(timeout=240), process.returncode) for process in started]
    assert [code for *_, code in ended] == [0, 0, 0, 0], ended
    assert show("TF_CONFIG, two workers on each of two hosts", run) == expected
