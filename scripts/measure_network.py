"""Step times over a slow network, compared with the predictions of `phalanx plan --network`.

    python scripts/measure_network.py measure FILE --ranks 2 --mbit 100,500,2000 [--option value]...
    python scripts/measure_network.py compare FILE...

Two network namespaces act as hosts (needs root; tests/cluster/hosts.py), and a kernel queue (tc
tbf) limits the link between them. Each host has half of the ranks, processes that live for the
whole measurement. Each round consists of
parts: forward and backward pass separately, of a model that ranks do not share;
reduce, gather: collectives of BARE_MIB without any training, at each bandwidth;
alone: steps that ranks do not share, in all processes at once, so that cores are equally busy;
ddp, strict, stages, interleaved: steps that all ranks share, at each bandwidth, with `alone` before
and after; those of --modes.
`compare` predicts each block of shared steps as `phalanx plan --network` does, only from the
`alone` steps around it and the package's constants.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
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
MODES = {  # options of the runs that ranks share; a pipeline has two stages
    "ddp": {},
    "strict": {"determinism": "strict"},
    "stages": {"pipeline-splits": "layer3/0", "gradient-accumulation": "4"},
    "interleaved": {
        "pipeline-splits": "layer3/0",
        "gradient-accumulation": "8",
        "pipeline-schedule": "Interleaved",
    },
}
STEPS = {
    "parts": 6,
    "alone": 6,
    "reduce": 2,
    "gather": 2,
    "ddp": 2,
    "strict": 2,
    "stages": 2,
    "interleaved": 2,
}
FAST, MORE = 1000.0, 3  # from so many Mbit/s on, network blocks have this many times the steps


# --- one rank ---


def run_rank(flags: dict[str, str], variables: dict[str, str], modes: list[str]) -> None:
    """Execute the commands on standard input, and answer with seconds."""
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
    os.environ |= variables  # from here on, one of several ranks
    world = read_world()
    assert world is not None
    ranks = Ranks(world, open_store(world, timeout=60), prepare_torch(bare[1]), timeout=600)
    sessions = {
        "alone": Session(*bare),
        **{mode: Session(*plan(**share(mode, world.size)), ranks=ranks) for mode in modes},
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


def share(mode: str, ranks: int) -> dict[str, str]:
    """The options of a run shared by that many ranks."""
    return {
        **MODES[mode],
        "replicas": str(ranks // 2 if "pipeline-splits" in MODES[mode] else ranks),
    }


def time_call(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


# --- all of them ---


class Fleet:
    """The ranks on two hosts."""

    def __init__(self, hosts: Any, flags: dict[str, str], count: int, modes: list[str]) -> None:
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
            words = [sys.executable, __file__, "rank", json.dumps(flags), texts, json.dumps(modes)]
            env = {"OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": INTERFACE}
            self._processes.append(
                hosts.popen(NAMES[rank // each], words, env, stdin=subprocess.PIPE, stderr=None)
            )
        self._limited = UNLIMITED

    def do(self, what: str, mbit: float = UNLIMITED) -> list[list[Any]]:
        """The answer of each rank."""
        if mbit != self._limited:
            self._hosts.limit(mbit or None)
            self._limited = mbit
        is_quick = what not in ("parts", "alone") and (mbit >= FAST or mbit == UNLIMITED)
        count = STEPS[what] * (MORE if is_quick else 1)
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


def measure(path: Path, flags: dict[str, str], given: argparse.Namespace) -> None:
    """Write all times to a JSON file."""
    speeds, modes = [float(word) for word in given.mbit.split(",")], given.modes.split(",")
    sys.path.insert(0, str(HOME / "tests" / "cluster"))
    from hosts import open_hosts

    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True, cwd=HOME)
    rows: list[dict[str, Any]] = []
    with open_hosts() as hosts:
        fleet = Fleet(hosts, flags, given.ranks, modes)
        for what in ("parts", "alone", *modes):  # to warm up; DDP rebuilds its buckets
            fleet.do(what)
        for number in range(given.rounds):
            for what, mbit in list_blocks(speeds, modes):
                times = fleet.do(what, mbit)
                rows.append({"round": number, "what": what, "mbit": mbit, "times": times,
                             "load": os.getloadavg()[0]})  # fmt: skip
                print(f"round {number} {what} {mbit:g} Mbit/s: {show(times)}", flush=True)
        fleet.close()
    found = {"commit": commit.strip(), "ranks": given.ranks, "flags": flags, "rows": rows}
    path.write_text(json.dumps(found), encoding="utf-8")


def list_blocks(speeds: list[float], modes: list[str]) -> Iterator[tuple[str, float]]:
    """The blocks of a round."""
    yield "parts", UNLIMITED
    for mbit in (UNLIMITED, *speeds):
        yield from (("reduce", mbit), ("gather", mbit), ("alone", UNLIMITED))
        for mode in modes:
            yield from ((mode, mbit), ("alone", UNLIMITED))


# --- beside the prediction ---


def compare(path: Path) -> None:
    """Print tables of predictions and measurements."""
    found = json.loads(path.read_text(encoding="utf-8"))
    rows, ranks = found["rows"], found["ranks"]
    shares = []
    for number in {row["round"] for row in rows}:
        blocks = {row["what"]: row for row in rows if row["round"] == number}
        backward = median(part[1] for times in blocks["parts"]["times"] for part in times)
        shares.append(backward / median(flat(blocks["alone"])))
    print(f"\n{ranks} ranks on 2 hosts, commit {found['commit']}: {found['flags']}")
    print(f"backward pass, of a step alone: {spread(shares)}")
    print("\n| Mbit/s | of it, ring | of it, gather |\n|---:|---|---|")
    for mbit in list_speeds(rows):
        shown = [spread(rate_collective(row, ranks) / (mbit or 1000) for row in rows
                        if (row["what"], row["mbit"]) == (what, mbit))
                 for what in ("reduce", "gather")]  # fmt: skip
        print(f"| {f'{mbit:,.0f}' if mbit else 'no limit, in Gbit/s'} | {shown[0]} | {shown[1]} |")
    print("\n| sums | Mbit/s | alone, s | predicted, s | measured, s | predicted / measured | n |")
    print("|---|---:|---|---|---|---|---:|")
    for what in (mode for mode in MODES if any(row["what"] == mode for row in rows)):
        predict = build_prediction(found["flags"], ranks, what)
        for mbit in list_speeds(rows):
            places = [n for n, row in enumerate(rows) if (row["what"], row["mbit"]) == (what, mbit)]
            alone = [median([*flat(rows[n - 1]), *flat(rows[n + 1])]) for n in places]
            taken = [median(flat(rows[n])) for n in places]
            if not mbit:
                cells = [spread(alone), "", spread(taken), ""]
            else:
                expected = [predict(mbit, seconds) for seconds in alone]
                ratios = [one / other for one, other in zip(expected, taken, strict=True)]
                cells = [spread(alone), spread(expected), spread(taken), f"**{spread(ratios)}**"]
            name = f"{mbit:,.0f}" if mbit else "no limit"
            print(f"| {what} | {name} | {' | '.join(cells)} | {len(places)} |")


def list_speeds(rows: list[dict[str, Any]]) -> list[float]:
    """The bandwidths of a measurement, slowest first."""
    return sorted({row["mbit"] for row in rows}, key=lambda mbit: mbit or 1e9)


def flat(row: dict[str, Any]) -> list[float]:
    """The steps of a block, over all ranks."""
    return [seconds for times in row["times"] for seconds in times]


def rate_collective(row: dict[str, Any], ranks: int) -> float:
    """Mbit/s of the link in each direction, of a bare collective."""
    sent = 2 * (ranks - 1) / ranks if row["what"] == "reduce" else ranks - 1
    return sent * BARE_MIB * 2**20 * 8e-6 / median(flat(row))


def build_prediction(
    flags: dict[str, str], ranks: int, what: str
) -> Callable[[float, float], float]:
    """A function that predicts a step's seconds from Mbit/s and the seconds of a step alone."""
    from phalanx.assemble.dataset_summary import plan_new_run
    from phalanx.assemble.memory import (
        predict_exchanges,
        predict_stage_costs,
        predict_step_memory,
    )
    from phalanx.cli.plan_stages import build_picture
    from phalanx.config.read import read_settings
    from phalanx.plan.exchange import (
        Network,
        predict_step_time,
        time_exchange,
        time_stage_waits,
    )

    more = {**share(what, ranks), "devices": str(ranks)}
    settings, plan, _ = plan_new_run(read_settings(None, {**flags, **more}))
    config, bubble = settings.config, 0.0
    exchanges = predict_exchanges(config, plan, predict_step_memory(config, plan))
    costs = predict_stage_costs(config, plan) if plan.pipeline else []
    if costs:
        bubble = build_picture(config, plan, costs, footer="").bubble
    by_stage = {"shares": [one.share for one in costs], "received": [one.received for one in costs]}

    def predict(mbit: float, alone: float) -> float:
        network = Network(gbit=mbit / 1000, hosts=2)
        use = time_exchange(plan, exchanges, network, bucket_mib=config.machine.bucket_mib)
        rate = plan.micro_batch / alone
        waits = time_stage_waits(plan, network, **by_stage, images_per_second=rate)
        return predict_step_time(
            plan, use, images_per_second=rate, bubble=bubble, stage_waits_s=waits
        ).total_s

    return predict


def spread(values: Iterable[float]) -> str:
    """The median, and the range."""
    known = sorted(values)
    return f"{median(known):.3g} ({known[0]:.3g} to {known[-1]:.3g})"


def show(times: list[list[Any]]) -> str:
    """The steps of rank 0."""
    return " ".join(
        "/".join(f"{part:.3f}" for part in step) if isinstance(step, list) else f"{step:.3f}"
        for step in times[0]
    )


def main() -> None:
    """Read the command line; options of a run follow ours."""
    if sys.argv[1] == "rank":
        return run_rank(*map(json.loads, sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["measure", "compare"])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mbit", default="100,500,2000")
    parser.add_argument("--modes", default="ddp,strict")
    parser.add_argument("--rounds", type=int, default=5)
    given, rest = parser.parse_known_args()
    flags = {
        name.removeprefix("--"): value for name, value in zip(rest[::2], rest[1::2], strict=True)
    }
    if given.what == "measure":
        measure(given.files[0], OPTIONS | flags, given)
    else:
        for path in given.files:
            compare(path)
    return None


if __name__ == "__main__":
    main()
