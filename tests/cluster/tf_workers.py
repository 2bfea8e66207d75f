"""Two workers on each of two hosts, joined by TF_CONFIG."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from hosts import NAMES, Hosts

_WORKERS = [f"{host}:{port}" for host in NAMES for port in (2222, 2223)]


def start_workers(
    hosts: Hosts, words: Sequence[object], before: Mapping[str, Sequence[object]] | None = None
) -> list["subprocess.Popen[str]"]:
    """`phalanx` with these words as each of the four workers, in the order of their ranks.

    before: by host, the words of a command that runs it.
    """
    assert not {"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"} & os.environ.keys()
    started = []
    for index, worker in enumerate(_WORKERS):
        host = worker.partition(":")[0]
        command = [*(before or {}).get(host, []), sys.executable, "-m", "phalanx", *words]
        started.append(hosts.popen(host, command, {"TF_CONFIG": tf_config(_WORKERS, index)}))
    return started


def tf_config(workers: Sequence[str], index: int) -> str:
    """What TF_CONFIG says to one worker."""
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {"worker": list(workers)}, "task": task})
