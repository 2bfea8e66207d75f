"""Where the cores' time goes while a folder of photographs is read, with and without training.

    python scripts/lab/folder_cores.py DIR [--workers 14 16 18] [--seconds 8] [OPTION...]

DIR is a folder of photographs, by split and class. For each number of workers, reads batches of 256
as training does, first alone, then in `phalanx train` with the options that follow, and prints
images/s and, per image, the CPU time of the workers and of everything else: the training process
with its threads.

Why: on the GPU machine 16 cores decode 8,040 whole photographs a second in 16 processes that do
nothing else (1.99 ms each), while training reads 5,312. On a machine with two cores a worker takes
1.09 ms for an image of which a process that only decodes takes 0.97, and two workers are busy 95 %
of the time: that predicts 7,100 on the GPU machine. What to expect if threads that wait for the GPU
take the rest: 7,000 alone, and more than 0.4 ms an image outside the workers in training.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from phalanx.data.loading.loader import Loader
from phalanx.data.loading.reader import InputSpec
from phalanx.data.transforms.transform import TransformSpec
from phalanx.plan.order import Order

TICKS_S = os.sysconf("SC_CLK_TCK")


def read_cpu_s(root: int) -> tuple[float, float]:
    """Seconds of CPU time of a process and of all that it started and that lives."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        number = int(stat.parent.name)
        parents[number] = int(fields[1])
        seconds[number] = (int(fields[11]) + int(fields[12])) / TICKS_S
    below = 0.0
    for number, used in seconds.items():
        above = number
        while above not in (0, root):
            above = parents.get(above, 0)
        below += used * (above == root and number != root)
    return seconds.get(root, 0.0), below


def describe(images: float, elapsed: float, own: float, below: float) -> str:
    """A row of the table."""
    return (
        f"{images / elapsed:>8,.0f} images/s{1e3 * below / images:>8.2f} ms workers"
        f"{1e3 * own / images:>8.2f} ms besides"
    )


def measure_alone(words: argparse.Namespace, workers: int) -> str:
    """Batches as fast as they come."""
    spec = InputSpec(
        data="folder",
        data_dir=str(words.dir),
        image_size=224,
        transform=TransformSpec(augment="resized-crop"),
        seed=1,
    )
    images = len(spec.open("train"))
    spec = InputSpec(
        **{**vars(spec), "order": Order(images=images, global_batch=words.batch, seed=1)}
    )
    with Loader(spec, workers=workers) as loader:
        steps = loader.steps_from(0, 10**6, micro_batch=words.batch)
        for _ in range(4):
            next(steps)
        before, begin, count = read_cpu_s(os.getpid()), time.perf_counter(), 0
        while time.perf_counter() - begin < words.seconds:
            next(steps)
            count += words.batch
        elapsed, after = time.perf_counter() - begin, read_cpu_s(os.getpid())
    return describe(count, elapsed, after[0] - before[0], after[1] - before[1])


def count_steps(run: Path) -> int:
    """The steps that a run has logged."""
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def measure_training(words: argparse.Namespace, workers: int, options: list[str]) -> str:
    """Some seconds of `phalanx train`, from its twentieth step on."""
    with TemporaryDirectory() as place:
        run = Path(place, "run")
        command = [sys.executable, "-m", "phalanx", "train", "synthetic-resnet50", "--data=folder"]
        command += [
            f"--data-dir={words.dir}",
            f"--workers={workers}",
            f"--batch-size={words.batch}",
        ]
        command += [
            "--validation-mode=none",
            "--ckpts-per-epoch=0",
            "--steps=100000",
            f"--run-dir={run}",
        ]
        training = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
        while count_steps(run) < 20 and training.poll() is None:
            time.sleep(0.2)
        before, begin, first = read_cpu_s(training.pid), time.perf_counter(), count_steps(run)
        time.sleep(words.seconds)
        elapsed, count = time.perf_counter() - begin, count_steps(run) - first
        after = read_cpu_s(training.pid)
        training.terminate()
        training.wait()
    return describe(
        max(count, 1) * words.batch, elapsed, after[0] - before[0], after[1] - before[1]
    )


def main() -> int:
    """Measure with every number of workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=[14, 16, 18])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--batch", type=int, default=256)
    words, options = parser.parse_known_args()
    for workers in words.workers:
        print(f"{workers:>3} alone    {measure_alone(words, workers)}")
        row = measure_training(words, workers, options)
        print(f"{workers:>3} training {row}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
