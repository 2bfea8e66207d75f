"""A rank that adds numbers with its peers through gloo, and continues from the last sum saved."""

import faulthandler
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

(Path(sys.argv[1]) / f"{os.environ['RANK']}.pid").write_text(f"{os.getpid()}\n")

import torch  # noqa: E402 - a rank may be killed while it imports this
import torch.distributed as dist  # noqa: E402

from phalanx.parallel.supervisor import watch_supervisor  # noqa: E402
from phalanx.parallel.watchdog import Watchdog  # noqa: E402

STEPS = 1500


def main(folder: Path) -> int:
    watch_supervisor()
    faulthandler.enable(2)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, ranks, rank == 0, timedelta(seconds=60))
    store = dist.PrefixStore(f"restart {os.environ['PHALANX_RESTART']}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    saved = folder / "sum.txt"
    step, total = map(int, saved.read_text().split()) if saved.exists() else (0, 0)

    with Watchdog(3, lambda: f"step {step}", rank=rank, ranks=ranks, report=None) as watchdog:
        while step < STEPS:
            number = torch.tensor(step * (rank + 1))
            try:
                dist.all_reduce(number)
            except RuntimeError:
                return 8  # a peer is gone
            step, total = step + 1, total + int(number)
            watchdog.beat()
            time.sleep(0.01)
            if rank == 0 and step % 5 == 0:
                (folder / "sum.new").write_text(f"{step} {total}")
                (folder / "sum.new").rename(saved)
    return 0


sys.exit(main(Path(sys.argv[1])))
