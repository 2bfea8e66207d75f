"""CIFAR-10's binary files: a label byte, then 32x32 red, green and blue, image after image."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.data.arrays import ArraySource, build_arrays
from phalanx.errors import DataError

FILES = {
    "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "valid": ("test_batch.bin",),
}
FOLDERS = ("", "cifar-10-batches-bin")
RECORD = 1 + 3 * 32 * 32


def open_cifar10(folder: Path, split: str) -> ArraySource:
    """One split of CIFAR-10."""
    names = FILES[split]
    places = [folder / place for place in FOLDERS]
    home = next((place for place in places if (place / names[0]).is_file()), None)
    if home is None:
        raise DataError(
            f"{folder}: no {names[0]} here or in {FOLDERS[1]}/; point --data-dir at the folder "
            "with CIFAR-10's binary version (not the Python one)"
        )
    batches = [read_records(home / name) for name in names]
    if len({len(batch) for batch in batches}) > 1:
        counts = ", ".join(f"{n} {len(b):,}" for n, b in zip(names, batches, strict=True))
        raise DataError(f"{home}: files of unequal length ({counts} images); fetch them again")
    records = np.concatenate(batches)
    pixels = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return build_arrays("cifar10", np.ascontiguousarray(pixels), records[:, 0], files=names)


def read_records(path: Path) -> NDArray[np.uint8]:
    """The records of one file, [N, 3073]."""
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as cause:
        raise DataError(f"{path}: cannot be read ({cause.strerror}); fetch it again") from None
    if not data.size or data.size % RECORD:
        raise DataError(
            f"{path}: {data.size:,} bytes are no whole number of {RECORD}-byte records; the file "
            "is truncated or damaged, fetch it again"
        )
    return data.reshape(-1, RECORD)
