"""The rate of several workers, compared with what the machine itself allows.

    python scripts/measure_scaling.py DIR [--model resnet50] [--batch-size 256] [--seconds 5]

For 1, 2, 4 ... workers, up to the number of cores, in images/s:
bare: independent processes that decode and crop images of DIR into their own memory;
loader: the batches of a Loader with that many workers, discarded;
device: the same as training gets them, copied to the device and normalised.
The first column is the machine's own ceiling: shared caches, clocks and hyper-threads lower it too.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from phalanx.data.loading.reader import InputSpec, Reader
from phalanx.plan.machine import count_cores

ROWS = 16  # that a process fills at a time, as the Loader's do
APART = 1 << 20  # positions of the stream between one bare process and the next
WARM_UP = 4  # steps
OPTIONS = {"model": "resnet50", "image-size": "", "batch-size": "256"}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Rates(NamedTuple):
    """Images/s of a number of workers."""

    workers: int
    bare: float
    loader: float
    device: float


def fill_alone(first: int, seconds: float) -> None:
    """Be a bare process: prepare, wait for the signal, fill, and print the rate."""
    spec = InputSpec.from_dict(json.loads(sys.stdin.readline()))
    reader = Reader(spec, "train")
    out = np.empty((ROWS, spec.image_size, spec.image_size, 3), np.uint8)
    groups = iter(range(first, first + APART, ROWS))
    reader.fill(np.arange(next(groups), first + ROWS), out)
    print("ready", flush=True)
    sys.stdin.readline()  # all start together
    begin, images = perf_counter(), 0
    while perf_counter() - begin < seconds:
        start = next(groups)
        reader.fill(np.arange(start, start + ROWS), out)
        images += ROWS
    print(images / (perf_counter() - begin))


def rate_bare(spec: InputSpec, workers: int, seconds: float) -> float:
    """The total rate of bare processes running at the same time."""
    command = [sys.executable, __file__, "-", "--seconds", str(seconds), "--first"]
    processes = [
        subprocess.Popen(
            [*command, str(number * APART)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ONE_THREAD},
        )
        for number in range(workers)
    ]
    start = json.dumps(spec.to_dict())
    for line in (start, "go"):  # the second when every process has answered the first
        for process in processes:
            process.stdin.write(line + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        answers = [process.stdout.readline() for process in processes]  # type: ignore[union-attr]
    for process in processes:
        process.communicate()
    return sum(map(float, answers))


def rate_of(steps: Iterator[Any], images: int, seconds: float, settle: Callable[[], None]) -> float:
    """Images/s of an iterator, without its first steps; `settle` waits for the device."""
    for _ in range(WARM_UP):
        next(steps)
    settle()
    begin, done = perf_counter(), 0
    while perf_counter() - begin < seconds:
        next(steps)
        done += images
    settle()
    return done / (perf_counter() - begin)


def measure(words: argparse.Namespace) -> Iterator[Rates]:
    """One row for each number of workers."""
    from phalanx.assemble.dataset_summary import build_input_spec, plan_run
    from phalanx.assemble.find_data import read_settings_with_data
    from phalanx.assemble.session import Session  # imports torch, which bare processes do not need
    from phalanx.bench.synthetic_steps import synchronise
    from phalanx.data.loading.loader import Loader

    given = {name: getattr(words, name.replace("-", "_")) for name in OPTIONS}
    options = {name: value for name, value in given.items() if value}
    settings = read_settings_with_data(None, {**options, "data-dir": words.dir})
    plan, config = replace(plan_run(settings)[0], total_steps=10**6), settings.config
    spec, session, seconds = build_input_spec(config, plan), Session(config, plan), words.seconds
    images, cores = plan.global_batch, count_cores()
    for workers in sorted({*(2**k for k in range(cores.bit_length())), cores}):
        bare = rate_bare(spec, workers, seconds)
        with Loader(spec, workers=workers) as loader:
            steps = loader.steps_from(0, plan.total_steps, micro_batch=images)
            loaded = rate_of(steps, images, seconds, lambda: None)
        with session.open_feed(replace(plan, workers=workers)) as feed:
            steps = feed.batches_from(0)
            copied = rate_of(steps, images, seconds, lambda: synchronise(session.device))
        yield Rates(workers, bare, loaded, copied)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir")
    for option, usual in OPTIONS.items():
        parser.add_argument(f"--{option}", default=usual)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.first is not None:
        return fill_alone(words.first, words.seconds)
    print("in parentheses: as a share of one worker times their number\n")
    print("| workers | bare | loader | device | loader / bare | device / bare |")
    print("|---:|---:|---:|---:|---:|---:|", flush=True)
    one = None
    for row in measure(words):
        one = one or row
        cells = [
            f"{rate:,.0f} ({rate / first / row.workers:.2f})"
            for rate, first in zip(row[1:], one[1:], strict=True)
        ]
        cells += [f"{row.loader / row.bare:.2f}", f"{row.device / row.bare:.2f}"]
        print(f"| {row.workers} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
