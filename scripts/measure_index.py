"""The cost of an index of ImageNet's size: opening it, holding it in four processes, seeking.

python scripts/measure_index.py [--images 1281167] [--workers 4] [--files]

The index is synthetic, with file names as long as ImageNet's; no image is read. With --files the
class folders exist, with empty files in them, and opening includes checking them.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from phalanx.data.formats.folder import open_folder
from phalanx.data.formats.index import Index, Snapshot, load_or_build_index
from phalanx.data.layouts.snapshot import snapshot_folder
from phalanx.data.string_array import pack_strings
from phalanx.plan.order import Order

CLASSES = 1000
STEPS = 200
BATCH = 256
MIB = 2**20


def make_index(images: int) -> Index:
    """An index like that of an ImageNet folder."""
    labels = np.sort(np.arange(images, dtype=np.int64) % CLASSES)
    return Index(
        classes=tuple(map(class_name, range(CLASSES))),
        files=pack_strings(file_name(int(label), n) for n, label in enumerate(labels)),
        file_numbers=np.arange(images, dtype=np.int32),
        offsets=np.zeros(images, np.int64),
        sizes=np.zeros(images, np.int64),
        labels=labels,
    )


def class_name(label: int) -> str:
    """A name as long as a synset's."""
    return f"n{label:08d}"


def file_name(label: int, number: int) -> str:
    """A path as long as ImageNet's."""
    return f"train/{class_name(label)}/{class_name(label)}_{number:07d}.JPEG"


def write_files(root: Path, images: int) -> None:
    """Create empty files with the names of the synthetic index."""
    for label in range(CLASSES):
        (root / "train" / class_name(label)).mkdir(parents=True)
    for number, label in enumerate(np.sort(np.arange(images) % CLASSES).tolist()):
        os.close(os.open(root / file_name(label, number), os.O_CREAT | os.O_WRONLY))


def open_kept(root: Path, images: int, *, files: bool) -> Index:
    """The index as a run opens it; created if it does not exist."""
    if files:
        return open_folder(root, "train").index
    snapshot: Snapshot = [[class_name(label), 0] for label in range(CLASSES)]
    return load_or_build_index(
        root, "measured", snapshot=snapshot, build=lambda: make_index(images)
    )


def memory() -> tuple[float, float]:
    """The resident and the proportional set size of this process, in MiB."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return kib["Rss"] / 1024, kib["Pss"] / 1024


def work(root: Path, images: int, *, files: bool) -> None:
    """Be a worker: open, touch every array, wait until all have, and print the figures."""
    rss, pss = memory()
    begin = perf_counter()
    index = open_kept(root, images, files=files)
    opened = perf_counter() - begin
    touched = int(index.labels.sum() + index.sizes.sum() + index.file_numbers.sum())
    touched += len(index.name(images - 1)) + int(index.files.data.sum())
    print("ready", flush=True)
    sys.stdin.readline()
    after = memory()
    print(opened, after[0] - rss, after[1] - pss, touched, flush=True)
    sys.stdin.readline()  # keeps the memory shared while the others measure


def ask_workers(words: list[str], count: int) -> list[list[float]]:
    """The figures of workers that hold the index at the same time."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [
        subprocess.Popen([sys.executable, __file__, *words], **pipes)  # type: ignore[call-overload]
        for _ in range(count)
    ]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    figures = []
    for worker in workers:
        worker.stdin.write("\n")
        worker.stdin.flush()
        figures.append([float(word) for word in worker.stdout.readline().split()])
    for worker in workers:
        worker.communicate("\n")
    return figures


def seek_times(index: Index) -> list[float]:
    """Milliseconds to find the images, labels and names of any step of 300 epochs."""
    order = Order(images=len(index), global_batch=BATCH, seed=0)
    steps = np.random.default_rng(0).integers(0, 300 * len(index) // BATCH, STEPS)
    times = []
    for step in steps.tolist():
        begin = perf_counter()
        places = order.indices(order.positions(step))
        labels, names = index.labels[places], [index.name(int(place)) for place in places]
        times.append(1e3 * (perf_counter() - begin))
        assert len(labels) == len(names)
    return times


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1_281_167)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.images, files=args.files)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), args)


def measure(root: Path, args: argparse.Namespace) -> None:
    """Build the index once, then open it repeatedly."""
    if args.files:
        write_files(root, args.images)
    begin = perf_counter()
    open_kept(root, args.images, files=args.files)
    built = perf_counter() - begin
    begin = perf_counter()
    index = open_kept(root, args.images, files=args.files)
    opened = perf_counter() - begin
    words = ["--images", str(args.images), "--work", str(root), *["--files"][: args.files]]
    figures = ask_workers(words, args.workers)
    seeks = seek_times(index)
    opening, resident, shared, _ = zip(*figures, strict=True)
    size = sum(path.stat().st_size for path in (root / ".phalanx").iterdir()) / MIB
    rows = {
        f"built once, {args.images:,} images": f"{built:.1f} s, {size:.1f} MiB on the disk",
        "opened again, one process": f"{opened:.3f} s",
        f"opened by {args.workers} at once, the slowest": f"{max(opening):.3f} s",
        f"added resident size, {args.workers} together": f"{sum(resident):.1f} MiB",
        f"added proportional size, {args.workers} together": f"{sum(shared):.1f} MiB",
        f"seek to a step of {BATCH}, median of {STEPS}": f"{median(seeks):.2f} ms",
        "seek to a step, the slowest": f"{max(seeks):.2f} ms",
    }
    if args.files:
        begin = perf_counter()
        snapshot_folder(root / "train", (), rule=2)
        rows["looking at the files, alone"] = f"{perf_counter() - begin:.3f} s"
    for what, figure in rows.items():
        print(f"{what:<48}{figure}")


if __name__ == "__main__":
    main()
