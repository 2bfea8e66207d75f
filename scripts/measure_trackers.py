"""What trackers cost a run: images/s with and without them, as ratios of interleaved pairs.

Both sides are the training loop of one run of the demo, which logs at its default interval of 25
steps. A tracker works after a log point, so a block has several of them and ends half-way between
two: nearly all of the work then falls into the block that caused it. Also prints how long a log
point takes to notify the trackers.

    python scripts/measure_trackers.py [--trackers tensorboard,wandb] [--pairs 40] [--log-points 4]
"""

import os
from argparse import ArgumentParser
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

from phalanx.assemble.prepare import prepare_new_run
from phalanx.assemble.train import open_training
from phalanx.bench.overhead import _phalanx_block
from phalanx.bench.paired_ratio import measure_pairs
from phalanx.config.read import read_settings
from phalanx.trackers.choice import choose_trackers
from phalanx.trackers.processes import Trackers, track_run

_LOG_STEPS = 25  # from one log point of the demo to the next


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser()
    parser.add_argument("--trackers", default="tensorboard,wandb")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--log-points", type=int, default=4, help="in each block")
    args = parser.parse_args()
    os.environ.setdefault("WANDB_MODE", "offline")
    names = args.trackers.split(",")
    block_steps = args.log_points * _LOG_STEPS
    with TemporaryDirectory() as folder, ExitStack() as stack:
        steps = str((2 * args.pairs + 8) * block_steps)
        flags = {"run-dir": str(Path(folder) / "run"), "steps": steps}
        # a longer run has more epochs, and logs as often in each
        settings = read_settings("demo", {**flags, **dict.fromkeys(names, "true")})
        prepared = prepare_new_run(settings, line="measure")
        silence = stack.enter_context(open(os.devnull, "w"))
        training = open_training(prepared, stack, stream=silence)
        chosen = choose_trackers(prepared.config)
        stack.enter_context(track_run(training.trackers, prepared.run, chosen, print))
        untracked = replace(training, trackers=Trackers())
        _phalanx_block(untracked, _LOG_STEPS // 2)()  # from here on, blocks end between log points
        tracked = _phalanx_block(training, block_steps)
        plain = _phalanx_block(untracked, block_steps)
        for block in (tracked, plain, tracked, plain):  # fills caches, imports packages
            block()
        ratio = measure_pairs(tracked, plain, pairs=args.pairs, done=lambda _: None)
        told_us = median(_time_us(partial(training.trackers.notify, 1)) for _ in range(101))
    low, high = ratio.interval95
    print(
        f"{' and '.join(names)}: {ratio.median:.4f} of the images/s without "
        f"(95 % interval {low:.4f} to {high:.4f}, {args.pairs} pairs of {block_steps} steps); "
        f"median {median(ratio.ours):,.0f} and {median(ratio.theirs):,.0f} images/s; "
        f"a log point waits {told_us:.0f} microseconds"
    )


def _time_us(work: partial[None]) -> float:
    begin = perf_counter()
    work()
    return 1e6 * (perf_counter() - begin)


if __name__ == "__main__":
    main()
