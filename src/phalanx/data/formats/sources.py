"""Where images come from: one table from a dataset's name to what opens it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.catalog.datasets import DATASETS
from phalanx.data.formats.arrays import open_embedded
from phalanx.data.formats.detect import DATA_FORMATS
from phalanx.data.formats.folder import open_with_val_split
from phalanx.data.formats.generated import GeneratedSpec, open_generated
from phalanx.errors import ConfigError, DataError, suggest

Split = Literal["train", "valid"]


class Source(Protocol):
    """Random access to the images of one split."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """The class of each image."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each class."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> NDArray[np.uint8]:
        """The image as RGB, [height, width, 3]; raises BadImage."""

    def name(self, index: int) -> str:
        """What a person can find the image by."""

    def fingerprint(self) -> dict[str, Any]:
        """Counts and a hash that change when the data does."""


_Opener = Callable[[str | None, Split, GeneratedSpec | None], Source]


class ValSplit(NamedTuple):
    """How a folder without a validation split gets one."""

    share: float
    seed: int


def _in_folder(open_form: Callable[[Path, str], Source]) -> _Opener:
    """The opener of a form that lies in --data-dir."""
    return lambda data_dir, split, _spec: open_form(_existing_folder(data_dir), split)


OPENERS: dict[str, _Opener] = {  # "synthetic" is made on the device and has nothing to open
    "embedded": lambda _dir, split, _spec: open_embedded(split),
    "generated": lambda _dir, _split, spec: open_generated(spec),
    **{name: _in_folder(form.open) for name, form in DATA_FORMATS.items() if form.open is not None},
}


def open_source(
    data: str,
    data_dir: str | None,
    split: Split,
    *,
    generated: GeneratedSpec | None = None,
    val_split: ValSplit | None = None,
) -> Source:
    """The images of one split of a dataset."""
    if data not in OPENERS:
        raise ConfigError(f"--data: {data!r} has no images to read; {suggest(data, OPENERS)}")
    if not data_dir and DATASETS[data].needs_folder:
        raise DataError(
            f"--data {data} lies in a folder: give --data-dir DIR, or set DATA_DIR in the "
            "environment"
        )
    if val_split is not None:
        return open_with_val_split(
            _existing_folder(data_dir), split, share=val_split.share, seed=val_split.seed
        )
    return OPENERS[data](data_dir, split, generated)


def _existing_folder(data_dir: str | None) -> Path:
    folder = Path(data_dir or "").expanduser()
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "no such folder"
        raise DataError(f"{folder}: {what}; give the dataset's folder with --data-dir or DATA_DIR")
    return folder
