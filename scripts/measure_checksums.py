"""What checksums cost: images/s of the loader with and without them, as ratios of paired blocks.

    python scripts/measure_checksums.py FOLDER [--pairs 100] [--images 32]

FOLDER holds JPEGs, in folders of classes or not. They are used as a folder, packed as JPEG and
packed as raw pixels of at most 256 pixels on the short side; one process reads, crops and resizes
to 224 pixels.
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count as count_from
from pathlib import Path
from unittest.mock import patch

import numpy as np

from phalanx.bench.paired_ratio import measure_pairs
from phalanx.cli.main import main as phalanx
from phalanx.data.formats import packed
from phalanx.data.formats.index import IndexedSource
from phalanx.data.formats.sources import open_source
from phalanx.data.loading.image_checksums import ImageChecksums
from phalanx.data.loading.reader import InputSpec, Reader
from phalanx.data.transforms.transform import TransformSpec
from phalanx.plan.order import Order

FORMS = {"folder": ("folder", ()), "packed": ("packed", ()), "packed, raw": ("packed", ("--raw",))}


@contextmanager
def without_checksums() -> Iterator[None]:
    """Within the block, images are read without checksums."""
    read = IndexedSource.read_encoded
    with (
        patch.object(IndexedSource, "checksum", lambda *_: 0),
        patch.object(packed._PackedSource, "checksum", lambda *_: 0),
        patch.object(packed._PackedSource, "_read_checked", read),
    ):
        yield


def link_photos(photos: Path, root: Path) -> Path:
    """Two classes of links to the photographs, and two images to score."""
    files = sorted(path for path in photos.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    for number, path in enumerate(files):
        for split in ("train", "val") if number < 2 else ("train",):
            folder = root / split / f"class{number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.jpg").symlink_to(path.resolve())
    return root


def measure(form: str, data: Path, *, pairs: int, images: int) -> str:
    """One row of the table."""
    count = len(open_source(form, str(data), "train"))
    spec = InputSpec(
        data=form,
        data_dir=str(data),
        image_size=224,
        transform=TransformSpec(augment="resized-crop"),
        seed=0,
        order=Order(images=count, global_batch=images, seed=0),
    )
    reader = Reader(spec, "train")
    seen = ImageChecksums(reader.source, reader.problems)
    pixels = np.empty((images, 224, 224, 3), np.uint8)

    def read(step: int) -> int:
        batch = reader.fill(spec.order.positions(step), pixels)
        seen.compare(batch.indices.tolist())
        return images

    steps, unseen_steps = count_from(), count_from()  # both sides of a pair read the same images

    def read_seen() -> int:
        return read(next(steps))

    def read_unseen() -> int:
        with without_checksums():
            return read(next(unseen_steps))

    for block in (read_seen, read_unseen) * 2:
        block()
    ratio = measure_pairs(read_seen, read_unseen, pairs=pairs, done=lambda _: None)
    low, high = ratio.interval95
    return f"{ratio.median:.4f}, 95 % interval {low:.4f} to {high:.4f} (n={pairs})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--images", type=int, default=32)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = link_photos(args.photos, Path(name) / "photos")
        for title, (form, words) in FORMS.items():
            data = folder
            if form == "packed":
                data = Path(name) / title
                build = ["data", "build", folder, "--to", "packed", "--out", data, *words]
                phalanx([*map(str, build), *(["--short-side", "256"] if words else [])])
            row = measure(form, data, pairs=args.pairs, images=args.images)
            print(f"{title:<12} {row}", flush=True)
