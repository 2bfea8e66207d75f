"""Two workers on each of two hosts, joined by TF_CONFIG."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from hosts import NAMES, Hosts

_WORKERS = [f"{host}:{port}" for host in NAMES for port in (2222, 2223)]


def start_workers(hosts: Hosts, words: Sequence[object]) -> list["subprocess.Popen[str]"]:
    """`phalanx` with these words as each of the four workers, in the order of their ranks."""
    assert not {"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"} & os.environ.keys()
    return [
        hosts.popen(
            worker.partition(":")[0],
            [sys.executable, "-m", "phalanx", *words],
            {"TF_CONFIG": tf_config(_WORKERS, index)},
        )
        for index, worker in enumerate(_WORKERS)
    ]


def tf_config(workers: Sequence[str], index: int) -> str:
    """What TF_CONFIG says to one worker."""
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {"worker": list(workers)}, "task": task})
