"""Step times over a slow network, beside what `phalanx plan --network` predicts.

    python scripts/measure_network.py measure FILE --ranks 2 --mbit 100,500,2000 [--option value]...
    python scripts/measure_network.py compare FILE...

Two network namespaces stand in for hosts (root; tests/cluster/hosts.py), a queue of the kernel (tc
tbf) limits the cable between them. Each host has half of the ranks, processes that stay for the
whole measurement. In each round they take turns at
parts: forward and backward pass apart, of a model that no rank shares;
alone: steps that no rank shares, all processes at the same time, so that cores are as busy;
reduce, gather: collectives of BARE_MIB without any training, at each bandwidth;
ddp, strict: steps that all ranks share, at each bandwidth.
`compare` predicts from `alone` and the constants of the package, and from nothing else.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HOME = Path(__file__).parents[1]
BARE_MIB = 40
UNLIMITED = 0.0
OPTIONS = {
    "data": "synthetic",
    "model": "resnet50",
    "image-size": "64",
    "batch-size": "8",
    "iterations": "1000",
    "device": "cpu",
    "threads": "1",
}
STEPS = {"parts": 5, "alone": 5, "reduce": 2, "gather": 2, "ddp": 2, "strict": 2}
FAST = 1000.0  # Mbit/s, from where on a block has more steps
MORE = 3


# --- one rank ---


def run_rank(flags: dict[str, str], variables: dict[str, str]) -> None:
    """Do what the lines on the standard input say, and answer with seconds."""
    import torch
    import torch.distributed as dist

    from phalanx.assemble.dataset_summary import plan_new_run
    from phalanx.assemble.session import Session
    from phalanx.assemble.torch_setup import prepare_torch
    from phalanx.config.read import read_settings
    from phalanx.parallel.ranks import Ranks, open_store
    from phalanx.plan.world import read_world

    def plan(**more: str) -> tuple[Any, Any]:
        settings, found, _ = plan_new_run(read_settings(None, {**flags, **more}))
        return settings.config, found

    bare = plan(replicas="1")
    os.environ |= variables  # from here on one of several
    world, size = read_world(), variables["WORLD_SIZE"]
    assert world is not None
    ranks = Ranks(world, open_store(world, timeout=60), prepare_torch(bare[1]), timeout=600)
    sessions = {
        "alone": Session(*bare),
        "ddp": Session(*plan(replicas=size), ranks=ranks),
        "strict": Session(*plan(replicas=size, determinism="strict"), ranks=ranks),
    }
    batches = {name: next(session.feed.batches_from(0)) for name, session in sessions.items()}
    numbers = torch.zeros(BARE_MIB * 2**20 // 4)
    gathered = [torch.empty_like(numbers) for _ in range(world.size)]
    work: dict[str, Callable[[], object]] = {
        "reduce": lambda: dist.all_reduce(numbers),
        "gather": lambda: dist.all_gather(gathered, numbers),
        **{
            name: lambda name=name: sessions[name].train_step(batches[name], 1e-6)
            for name in sessions
        },
    }
    model, images = sessions["alone"].model, batches["alone"][0].images

    def time_parts() -> tuple[float, float]:
        """Seconds of a forward and of a backward pass."""
        begin = time.perf_counter()
        loss = model(images).sum()
        middle = time.perf_counter()
        loss.backward()
        return middle - begin, time.perf_counter() - middle

    for line in sys.stdin:
        what, count = json.loads(line)
        dist.barrier()
        if what == "parts":
            times: list[Any] = [time_parts() for _ in range(count)]
            model.zero_grad()
        else:
            times = [time_call(work[what]) for _ in range(count)]
        print(json.dumps(times), flush=True)
    for session in sessions.values():
        session.__exit__(None, None, None)
    ranks.close()


def time_call(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


# --- all of them ---


class Fleet:
    """The ranks on two hosts."""

    def __init__(self, hosts: Any, flags: dict[str, str], count: int) -> None:
        from hosts import ADDRESSES, INTERFACE, NAMES

        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        each = count // len(NAMES)
        self._hosts, self._processes = hosts, []
        for rank in range(count):
            variables = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank % each,
                         "LOCAL_WORLD_SIZE": each, "MASTER_ADDR": ADDRESSES[NAMES[0]],
                         "MASTER_PORT": port}  # fmt: skip
            texts = json.dumps({name: str(value) for name, value in variables.items()})
            words = [sys.executable, __file__, "rank", json.dumps(flags), texts]
            env = {"OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": INTERFACE}
            self._processes.append(
                hosts.popen(NAMES[rank // each], words, env, stdin=subprocess.PIPE, stderr=None)
            )
        self._limited = UNLIMITED

    def do(self, what: str, mbit: float = UNLIMITED) -> list[list[Any]]:
        """What each rank answers."""
        if mbit != self._limited:
            self._hosts.limit(mbit or None)
            self._limited = mbit
        count = STEPS[what] * (MORE if mbit >= FAST or mbit == UNLIMITED else 1)
        for process in self._processes:
            process.stdin.write(json.dumps([what, count]) + "\n")
            process.stdin.flush()
        return [json.loads(process.stdout.readline()) for process in self._processes]

    def close(self) -> None:
        """Let the ranks end."""
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            process.wait()


def measure(path: Path, flags: dict[str, str], ranks: int, speeds: list[float], n: int) -> None:
    """Write all times to a file, as JSON."""
    sys.path.insert(0, str(HOME / "tests" / "cluster"))
    from hosts import open_hosts

    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True, cwd=HOME)
    rows: list[dict[str, Any]] = []
    with open_hosts() as hosts:
        fleet = Fleet(hosts, flags, ranks)
        for what in ("parts", "alone", "ddp", "strict"):  # to warm up; DDP makes its buckets anew
            fleet.do(what)
        for number in range(n):
            for what, mbit in list_blocks(speeds):
                times = fleet.do(what, mbit)
                rows.append({"round": number, "what": what, "mbit": mbit, "times": times,
                             "load": os.getloadavg()[0]})  # fmt: skip
                print(f"round {number} {what} {mbit:g} Mbit/s: {show(times)}", flush=True)
        fleet.close()
    found = {"commit": commit.strip(), "ranks": ranks, "flags": flags, "rows": rows}
    path.write_text(json.dumps(found), encoding="utf-8")


def list_blocks(speeds: list[float]) -> Iterator[tuple[str, float]]:
    """What a round consists of."""
    yield "parts", UNLIMITED
    for mbit in (UNLIMITED, *speeds):
        yield "alone", UNLIMITED
        for what in ("reduce", "gather", "ddp", "strict"):
            yield what, mbit


def show(times: list[list[Any]]) -> str:
    """The steps of rank 0."""
    return " ".join(
        "/".join(f"{part:.3f}" for part in step) if isinstance(step, list) else f"{step:.3f}"
        for step in times[0]
    )


def main() -> None:
    """Read the command line; options of a run follow ours."""
    if sys.argv[1] == "rank":
        return run_rank(json.loads(sys.argv[2]), json.loads(sys.argv[3]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["measure", "compare"])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mbit", default="100,500,2000")
    parser.add_argument("--rounds", type=int, default=5)
    given, rest = parser.parse_known_args()
    flags = {
        name.removeprefix("--"): value for name, value in zip(rest[::2], rest[1::2], strict=True)
    }
    if given.what == "measure":
        speeds = [float(word) for word in given.mbit.split(",")]
        measure(given.files[0], OPTIONS | flags, given.ranks, speeds, given.rounds)
    return None


if __name__ == "__main__":
    main()
