"""Decode and random resized crop: ours and Pillow's, on one core, alternating.

    python scripts/race_with_pillow.py IMAGES [--pairs 20] [--size 224]

IMAGES is a folder of JPEG files. Both sides take the same crops of the same files, held in memory,
to the same size. Also prints how much our pixels differ from Pillow's: the mean over all images,
and the worst image, in 255ths.
"""

import argparse
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from phalanx.bench.paired_ratio import measure_pairs
from phalanx.data.formats.decode import EncodedImage, Pixels
from phalanx.data.transforms.augment import Crop
from phalanx.data.transforms.transform import (
    FIXED_COLUMNS,
    TransformSpec,
    choose_crop_and_flip,
    resized_crop,
)
from phalanx.plan.draws import draw_uniform

PHOTOGRAPHS = TransformSpec(augment="resized-crop")


def crop_of(height: int, width: int, draws: list[float]) -> Crop:
    """The crop that training takes of an image of this height and width."""
    return choose_crop_and_flip(PHOTOGRAPHS, (height, width), None, [1.0, *draws])[0]


def ours(data: bytes, draws: list[float], size: int) -> Pixels:
    """As training does it, without mirroring."""
    picture = EncodedImage(data, "image")
    return resized_crop(picture, crop_of(picture.height, picture.width, draws), size)


def pillows(data: bytes, draws: list[float], size: int) -> Pixels:
    """The obvious way with Pillow: its antialiased bilinear resize of a box."""
    with Image.open(io.BytesIO(data)) as image:
        rgb = image.convert("RGB")
        top, left, tall, wide = crop_of(rgb.height, rgb.width, draws)
        box = (left, top, left + wide, top + tall)
        return np.asarray(rgb.resize((size, size), Image.Resampling.BILINEAR, box))


def main() -> None:
    """Compare speed, then pixels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--size", type=int, default=224)
    words = parser.parse_args()
    files = [path.read_bytes() for path in sorted(words.images.iterdir()) if path.is_file()]
    places = np.arange(len(files))
    columns = [draw_uniform(0, name, places, lane) for name, lane in FIXED_COLUMNS]
    rows = np.stack(columns, axis=1).tolist()

    def block(crop: Callable[[bytes, list[float], int], Pixels]) -> Callable[[], int]:
        def run() -> int:
            for data, draws in zip(files, rows, strict=True):
                crop(data, draws, words.size)
            return len(files)

        return run

    ratio = measure_pairs(block(ours), block(pillows), pairs=words.pairs, done=lambda _: None)
    low, high = ratio.interval95
    print(
        f"{len(files)} files, {words.pairs} pairs: {ratio.median:.2f} times Pillow's rate "
        f"({low:.2f} to {high:.2f}); {np.median(ratio.ours):,.0f} and "
        f"{np.median(ratio.theirs):,.0f} images/s on one core"
    )
    apart = [
        np.abs(ours(data, draws, words.size).astype(int) - pillows(data, draws, words.size)).mean()
        for data, draws in zip(files, rows, strict=True)
    ]
    print(f"pixels apart: {np.mean(apart):.2f} of 255 on average, {max(apart):.2f} at most")


if __name__ == "__main__":
    main()
