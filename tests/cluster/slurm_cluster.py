"""Slurm on two hosts of one machine: real daemons, and a folder for all that they write."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launched_runs import wait_for

from hosts import ADDRESSES, NAMES, Hosts

_TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol")
_SETTINGS = """
ClusterName=phalanx
SlurmctldHost=hosta({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=5
JobRequeue=1
SchedulerParameters=batch_sched_delay=1,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
{nodes}
PartitionName=low Nodes=hosta,hostb Default=YES MaxTime=60 PriorityTier=1 GraceTime=60
PartitionName=high Nodes=hosta,hostb MaxTime=60 PriorityTier=10 PreemptMode=OFF
"""


class SlurmCluster:
    """Runs Slurm's commands on the first host."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts = hosts
        self._variables = {"SLURM_CONF": folder / "slurm.conf"}

    def run(self, *words: object) -> "subprocess.CompletedProcess[str]":
        """One of Slurm's commands, run to its end."""
        return self._hosts.run("hosta", words, self._variables)

    def submit(self, script: Path) -> int:
        """Queue a batch script; its job's number."""
        done = self.run("sbatch", "--parsable", script)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def read_job(self, job: int) -> dict[str, str]:
        """What Slurm knows of a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_end(self, job: int, *, timeout: float) -> dict[str, str]:
        """A job that is neither waiting nor running any more."""

        def look() -> dict[str, str] | None:
            time.sleep(1)
            found = self.read_job(job)
            waits = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED")
            return found if found.get("JobState", "PENDING") not in waits else None

        return wait_for(look, timeout=timeout)


@contextmanager
def open_slurm(hosts: Hosts, folder: Path) -> Iterator[SlurmCluster]:
    """A cluster of the two hosts; skips the test where Slurm is not installed."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [tool for tool in _TOOLS if not shutil.which(tool, path=path)]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (apt-get install slurm-wlm munge)")
    folder.mkdir()
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    nodes = [f"NodeName={host} NodeAddr={ADDRESSES[host]} CPUs=4 State=UNKNOWN" for host in NAMES]
    text = _SETTINGS.format(controller=ADDRESSES["hosta"], folder=folder, nodes="\n".join(nodes))
    (folder / "slurm.conf").write_text(text)
    munge = [
        f"--{name}={folder}/munge.{name[:-5]}" for name in ("key-file", "pid-file", "log-file")
    ]
    munge += [f"--seed-file={folder}/munge.seed", f"--socket={folder}/munge.socket", "--force"]
    daemons = {
        "munged": ("hosta", ["munged", "--foreground", *munge]),
        "slurmctld": ("hosta", ["slurmctld", "-D"]),
        "slurmd hosta": ("hosta", ["slurmd", "-D", "-N", "hosta"]),
        "slurmd hostb": ("hostb", ["slurmd", "-D", "-N", "hostb"]),
    }
    variables = {"SLURM_CONF": folder / "slurm.conf", "PATH": path}
    processes = []
    try:
        for name, (host, words) in daemons.items():
            log = (folder / f"{name}.out").open("w")
            output = {"stdout": log, "stderr": subprocess.STDOUT}
            processes.append(hosts.popen(host, words, variables, **output))
            log.close()
            if name == "munged":
                wait_for(lambda: (folder / "munge.socket").exists() or None, timeout=20)
        cluster = SlurmCluster(hosts, folder)
        wait_for(lambda: has_idle_nodes(cluster) or None, timeout=60)
        yield cluster
        cluster.run("scancel", "--user=root")
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(timeout=30)


def has_idle_nodes(cluster: SlurmCluster) -> bool:
    """Whether both hosts wait for work."""
    return cluster.run("sinfo", "--noheader", "--Node", "--format=%N %t").stdout.count("idle") >= 4
