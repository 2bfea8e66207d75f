"""One set of photographs in every form: the same order, the same pixels, the same score.

python scripts/show_formats.py FOLDER --out DIR [--image-size 48] [--epochs-fed 10]

FOLDER holds train/CLASS and validation/CLASS. Each form is built from it by `phalanx data build`
(parquet by this script, if pyarrow is installed) and trained on for one
epoch by `phalanx train`, with all images and the same options. The second table shows the memory of
the reading processes over ten epochs of batches.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from phalanx.data.convert.source_splits import SPLITS, SourceSplit, find_source_splits, read_sample
from phalanx.data.formats.detect import detect_datasets
from phalanx.data.layouts.split_folders import find_split_folders
from phalanx.data.loading.loader import Loader
from phalanx.data.loading.reader import Batch, InputSpec
from phalanx.data.transforms.transform import TransformSpec
from phalanx.plan.order import Order
from phalanx.units import format_bytes

BUILT = {
    "folder": ("--to", "folder"),
    "tar": ("--to", "tar"),
    "tfrecord": ("--to", "tfrecord", "--shards", "16"),
    "packed": ("--to", "packed"),
    "packed, raw": ("--to", "packed", "--raw"),
}
BATCH = 59  # 3,068 images are 52 steps of it: an epoch takes every image once
SAMPLED_STEPS = 8
WORKERS = 2
ROW_GROUP = 16  # rows; reading an image of a parquet file means reading its group
PARQUET_NAMES = {"train": "train", "valid": "validation"}
COLUMNS = (
    *("form", "disk", "built in", "images", "encoded anew", "files the same", "order the same"),
    *("pixels differ by", "top-1", "weights_sha256"),
)


@dataclass(kw_only=True)
class Row:
    """The results of one form."""

    form: str
    folder: Path
    build_s: float = 0.0
    encoded: int = 0


def phalanx(*words: object) -> str:
    """The output of a command; raises if it fails."""
    line = [sys.executable, "-m", "phalanx", *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(line)}\n{done.stdout}{done.stderr}")
    return done.stdout


def build_all(source: Path, out: Path) -> Iterator[Row]:
    """The source, and each form built from it."""
    yield Row(form="source", folder=source)
    for form, words in BUILT.items():
        folder = out / form.replace(", ", "-")
        facts = json.loads(phalanx("data", "build", source, *words, "--out", folder, "--json"))
        encoded = sum(split["encoded"] for split in facts["splits"].values())
        yield Row(form=form, folder=folder, build_s=facts["elapsed_s"], encoded=encoded)
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        print("without parquet: pyarrow is not installed")
        return
    begin = perf_counter()
    write_parquet(source, out / "parquet")
    yield Row(form="parquet", folder=out / "parquet", build_s=perf_counter() - begin)


def write_parquet(source: Path, out: Path) -> None:
    """The images byte for byte in parquet files, as Hugging Face lays them out."""
    import pyarrow
    import pyarrow.parquet

    out.mkdir(parents=True, exist_ok=True)
    for split in find_source_splits(source):
        samples = [read_sample(split.source, number) for number in range(split.images)]
        images = [{"bytes": sample.data, "path": sample.name} for sample in samples]
        table = pyarrow.table({"image": images, "label": [sample.label for sample in samples]})
        features = {"label": {"names": split.classes, "_type": "ClassLabel"}}
        facts = json.dumps({"info": {"features": features}}).encode()
        pyarrow.parquet.write_table(
            table.replace_schema_metadata({b"huggingface": facts}),
            out / f"{PARQUET_NAMES[split.name]}-00000-of-00001.parquet",
            row_group_size=ROW_GROUP,
        )


def disk_bytes(row: Row) -> int:
    """The size of the images on disk; for the source, of the two splits that are converted."""
    found = find_split_folders(row.folder)
    splits = [found.find(split) for split in SPLITS] if row.form == "source" else []
    places = [place for place in splits if place is not None] or [row.folder]
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    return sum(512 * path.stat().st_blocks for path in files if path.parent.name != ".phalanx")


# --- the same order, the same pixels ---


def digests(splits: list[SourceSplit]) -> list[tuple[int, str]]:
    """The label of each image of both splits and the sha256 of its file, in index order."""
    found = []
    for split in splits:
        for number in range(split.images):
            sample = read_sample(split.source, number)
            found.append((sample.label, hashlib.sha256(sample.data).hexdigest()))
    return found


def make_spec(folder: Path, image_size: int) -> InputSpec:
    """Batches as training gets them."""
    found = detect_datasets(folder)[0]
    train = find_source_splits(folder)[0]
    return InputSpec(
        data=found.data,
        data_dir=str(found.folder),
        image_size=image_size,
        transform=TransformSpec(augment="resized-crop"),
        seed=0,
        order=Order(images=train.images, global_batch=min(BATCH, train.images), seed=0),
    )


def sample_batches(spec: InputSpec) -> list[Batch]:
    """The batches of the first training steps, and all of validation."""
    assert spec.order is not None
    batch = spec.order.global_batch
    with Loader(spec, workers=WORKERS) as loader:
        steps = [step for [step] in loader.steps_from(0, SAMPLED_STEPS, micro_batch=batch)]
        return [*steps, *loader.evaluation_batches(batch)]


def same_order(batches: list[Batch], wanted: list[Batch]) -> bool:
    """Whether all batches hold images with the same indices and labels."""
    return all(
        np.array_equal(mine.indices, its.indices) and np.array_equal(mine.labels, its.labels)
        for mine, its in zip(batches, wanted, strict=True)
    )


def largest_difference(batches: list[Batch], wanted: list[Batch]) -> int:
    """The largest difference of two corresponding pixels, in 255ths."""
    return max(
        int(np.abs(mine.pixels.astype(np.int16) - its.pixels).max())
        for mine, its in zip(batches, wanted, strict=True)
    )


def train(row: Row, run: Path, image_size: int) -> dict[str, object]:
    """The summary of one epoch."""
    words = ["--model", "resnet8", "--image-size", image_size, "--batch-size", BATCH]
    words += ["--epochs", 1, "--warmup-epoch", 0, "--device", "cpu", "--workers", WORKERS]
    phalanx("train", "--data-dir", row.folder, *words, "--run-dir", run)
    summary: dict[str, object] = json.loads((run / "summary.json").read_bytes())
    return summary


# --- memory ---


def resident_mib() -> float:
    """The resident memory of this process and its workers."""
    own = os.getpid()
    children = Path(f"/proc/{own}/task/{own}/children").read_text(encoding="utf-8").split()
    total = 0
    for pid in (own, *children):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    return total / 1024


def feed(spec: InputSpec, epochs: int) -> list[float]:
    """The resident size after each epoch of batches, training and validation."""
    assert spec.order is not None
    batch, sizes = spec.order.global_batch, []
    steps = spec.order.images // batch
    with Loader(spec, workers=WORKERS) as loader:
        for epoch in range(epochs):
            for _ in loader.steps_from(epoch * steps, (epoch + 1) * steps, micro_batch=batch):
                pass
            for _ in loader.evaluation_batches(batch):
                pass
            sizes.append(resident_mib())
    return sizes


# --- the tables ---


def show_forms(rows: list[Row], out: Path, image_size: int) -> None:
    """Print the first table line by line, as results arrive."""
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    files: list[tuple[int, str]] = []
    batches: list[Batch] = []
    for row in rows:
        mine = digests(find_source_splits(row.folder))
        sampled = sample_batches(make_spec(row.folder, image_size))
        files, batches = files or mine, batches or sampled
        labels = [label for label, _ in mine] == [label for label, _ in files]
        order = labels and same_order(sampled, batches)
        same = sum(own == its for own, its in zip(mine, files, strict=True))
        summary = train(row, out / "runs" / row.form.replace(", ", "-"), image_size)
        built = f"{row.build_s:.1f} s" if row.build_s else ""
        print(
            f"| {row.form} | {format_bytes(disk_bytes(row))} | {built} | {len(mine):,} | "
            f"{row.encoded:,} | {same:,} | {'yes' if order else 'NO'} | "
            f"{largest_difference(sampled, batches)} | {summary['top1']:.4%} | "
            f"`{str(summary['weights_sha256'])[:16]}` |",
            flush=True,
        )


def show_memory(rows: list[Row], image_size: int, epochs: int) -> None:
    """Print the second table."""
    print(f"\nMiB of this process and {WORKERS} workers, after an epoch")
    print("| form | 1 | 2 | middle | last | last over 2 |")
    print("|---|---:|---:|---:|---:|---:|")
    for row in rows:
        sizes = feed(make_spec(row.folder, image_size), epochs)
        first, second, middle, last = sizes[0], sizes[1], sizes[epochs // 2], sizes[-1]
        print(
            f"| {row.form} | {first:.1f} | {second:.1f} | {middle:.1f} | {last:.1f} | "
            f"{last / second - 1:+.1%} |",
            flush=True,
        )


def main() -> None:
    """Build, train, compare, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--image-size", type=int, default=48)
    parser.add_argument("--epochs-fed", type=int, default=10)
    args = parser.parse_args()
    rows = list(build_all(args.folder, args.out))
    show_forms(rows, args.out, args.image_size)
    if args.epochs_fed > 1:
        show_memory(rows, args.image_size, args.epochs_fed)


if __name__ == "__main__":
    main()
