"""A small set of photographs in folders: real JPEG files, no two alike."""

import io

import numpy as np
from PIL import Image

CLASSES = ("cat", "dög", "fish")
COUNTS = {"train": 16, "val": 5}  # of each class


def photo(seed, *, size=(96, 72), mode="RGB"):
    """A picture of blotches that no other seed gives."""
    blotches = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(blotches).resize(size, Image.Resampling.BICUBIC).convert(mode)


def encode(image, form="JPEG", **options):
    """The picture as a file."""
    file = io.BytesIO()
    image.save(file, form, **({"quality": 92} if form == "JPEG" else {}) | options)
    return file.getvalue()


def write_photos(root, counts=COUNTS, *, size=(96, 72)):
    """train/CLASS and val/CLASS, names with spaces, each image of its own seed."""
    seed = 0
    for split, count in counts.items():
        for name in CLASSES:
            folder = root / split / name
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                (folder / f"{name} {number:03}.jpg").write_bytes(encode(photo(seed, size=size)))
                seed += 1
    return root


def tree_bytes(root):
    """The content of all files by path; an index that reading left behind does not count."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.suffix != ".index"
    }
