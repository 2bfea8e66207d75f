"""The layouts that people have their images in, as small folders of real files."""

import json
from itertools import count

import numpy as np
from PIL import Image

CLASSES = ("cat", "dog")
SYNSETS = ("n01443537", "n01629819")
_SEEDS = count()


def write_image(path):
    """A picture that no other call makes, in the format that its name promises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    blotches = np.random.default_rng(next(_SEEDS)).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    Image.fromarray(blotches).resize((40, 36)).save(path)


def write_classes(root, images, *, names=CLASSES, suffixes=("jpg",), below=""):
    """So many images in each of some class folders."""
    for name in names:
        for number in range(images):
            suffix = suffixes[number % len(suffixes)]
            write_image(root / name / below / f"{name}{number}.{suffix}")
    return root


def write_splits(root, folders, **options):
    """Class folders in each of some folders, which have so many images a class."""
    for folder, images in folders.items():
        write_classes(root / folder, images, **options)
    return root


def write_tiny_imagenet(root):
    """As Tiny-ImageNet is unpacked: boxes beside the images, a table for validation."""
    write_classes(root / "train", 8, names=SYNSETS, suffixes=("JPEG",), below="images")
    for name in SYNSETS:
        (root / "train" / name / f"{name}_boxes.txt").write_text("a box\n")
    rows = []
    for number in range(4):
        write_image(root / f"val/images/val_{number}.JPEG")
        rows.append(f"val_{number}.JPEG\t{SYNSETS[number % 2]}\t0\t0\t9\t9\n")
    (root / "val/val_annotations.txt").write_text("".join(rows))
    write_image(root / "test/images/test_0.JPEG")
    return root


def write_prefixes(root):
    """Cats and dogs as Kaggle has them: one folder, and a test without labels."""
    for number in range(10):
        for name in CLASSES:
            write_image(root / f"train/{name}.{number}.jpg")
    write_image(root / "test/1.jpg")
    return root


def write_labels(root, *, splits=("train", "val"), form="csv"):
    """Ten images in one folder and a table of what they show; the last two are of another split."""
    rows = []
    for number in range(10):
        write_image(root / f"images/{number}.jpg")
        rows.append([f"images/{number}.jpg", "ab"[number % 2], splits[number >= 8]])
    if form == "csv":
        text = "\ufeffpath,label,split\n" + "".join(",".join(row) + "\n" for row in rows)
    else:
        keys = ("path", "label", "split")
        text = "".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows)
    (root / f"labels.{form}").write_text(text, encoding="utf-8")
    return root
