"""What it costs to be a rank.

alone: steps as the only rank of a world of size one, compared with steps without ranks, alternating
in one process. On a GPU the ranks' sums go through NCCL.
beside: two ranks of one thread each, which share every step, compared with two single runs at the
same time, which do not: the sum of the speeds of each pair.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch

from phalanx.assemble.dataset_summary import plan_new_run
from phalanx.assemble.session import Session
from phalanx.assemble.torch_setup import prepare_torch
from phalanx.config.read import read_settings
from phalanx.parallel.ranks import Ranks, open_store
from phalanx.plan.world import World, read_world


def free_port() -> int:
    """A free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def steps_of(session: Session, device: torch.device) -> Iterator[None]:
    """Train one step at a time, endlessly."""
    passes = next(session.feed.batches_from(0))
    while True:
        session.train_step(passes, 0.01)
        if device.type == "cuda":
            torch.cuda.synchronize()
        yield


def time_round(steps: Iterator[None], count: int) -> float:
    """Mean seconds of a step over `count`, after one to warm up."""
    next(steps)
    begin = time.perf_counter()
    for _ in range(count):
        next(steps)
    return (time.perf_counter() - begin) / count


def compare_alone(flags: dict[str, str], rounds: int, count: int) -> None:
    """Print the speed of a rank compared with that without ranks."""
    settings, plan, _ = plan_new_run(read_settings(None, flags))
    device = prepare_torch(plan)
    world = World(rank=0, size=1, local_rank=0, local_size=1, address="127.0.0.1", port=free_port())
    ranks = Ranks(world, open_store(world, timeout=60), device, timeout=60)
    with (
        Session(settings.config, plan) as bare,
        Session(settings.config, plan, ranks=ranks) as ranked,
    ):
        without, within = steps_of(bare, device), steps_of(ranked, device)
        for steps in (without, within):
            time_round(steps, count)
        ratios = []
        for number in range(rounds):
            a, b = time_round(without, count), time_round(within, count)
            ratios.append(a / b)
            print(
                f"round {number}: {1e3 * a:.2f} ms without, {1e3 * b:.2f} ms as a rank", flush=True
            )
    print(f"speed of a rank, {plan.precision} on {plan.device}: median {median(ratios):.4f} of "
          f"none, {min(ratios):.4f} to {max(ratios):.4f}, n = {rounds}")  # fmt: skip
    ranks.close()


def run_worker(flags: dict[str, str], count: int, go: Path) -> None:
    """One process of `beside`: its images/s, from when all are ready."""
    world = read_world()
    settings, plan, _ = plan_new_run(read_settings(None, flags))
    device = prepare_torch(plan)
    ranks = world and Ranks(world, open_store(world, timeout=60), device, timeout=60)
    with Session(settings.config, plan, ranks=ranks) as session:
        steps = steps_of(session, device)
        time_round(steps, 3)
        print("ready", flush=True)
        while not go.exists():
            time.sleep(0.01)
        seconds = time_round(steps, count)
    own = plan.global_batch // (world.size if world else 1)
    print(own / seconds, flush=True)


def compare_beside(flags: dict[str, str], rounds: int, count: int, folder: Path) -> None:
    """Print the speed of two ranks compared with that of two single runs."""
    ratios = []
    for number in range(rounds):
        single = sum(start_pair(flags, count, folder / f"go-{number}-single"))
        ranked = sum(start_pair(flags, count, folder / f"go-{number}-ranks", ranked=True))
        ratios.append(ranked / single)
        print(f"round {number}: {single:.0f} images/s single, {ranked:.0f} as ranks", flush=True)
    print(f"two ranks: median {median(ratios):.3f} of two single runs, {min(ratios):.3f} to "
          f"{max(ratios):.3f}, n = {rounds}")  # fmt: skip


def start_pair(flags: dict[str, str], count: int, go: Path, *, ranked: bool = False) -> list[float]:
    """Images/s of two processes at the same time."""
    port = free_port()
    words = [sys.executable, __file__, "worker", json.dumps(flags), str(count), str(go)]
    processes = []
    for rank in range(2):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2,
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if ranked else {}  # fmt: skip
        env = {**os.environ, "OMP_NUM_THREADS": "1", **{n: str(v) for n, v in ranks.items()}}
        given = {**flags, **({"replicas": "2"} if ranked else {})}
        words[3] = json.dumps(given)
        processes.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True))
    for process in processes:
        assert process.stdout and process.stdout.readline() == "ready\n"
    go.touch()
    return [float(process.communicate()[0]) for process in processes]


def main() -> None:
    """Read the command line; options of a run follow ours."""
    if sys.argv[1] == "worker":
        return run_worker(json.loads(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["alone", "beside"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--folder", type=Path, default=Path("."))
    given, rest = parser.parse_known_args()
    flags = {
        name.removeprefix("--"): value for name, value in zip(rest[::2], rest[1::2], strict=True)
    }
    if given.what == "alone":
        compare_alone(flags, given.rounds, given.steps)
    else:
        compare_beside(flags, given.rounds, given.steps, given.folder)
    return None


if __name__ == "__main__":
    main()
