"""Images that a caller passes, as files, folders, Pillow images or arrays, read as pixels."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from phalanx.data.formats.decode import (
    EncodedImage,
    Image,
    grey_to_rgb,
    pillow_to_pixels,
)
from phalanx.data.formats.image_file import ReadLimits, read_image_file
from phalanx.data.formats.index import convert_read_errors
from phalanx.data.layouts.image_files import describe_ignored, list_images
from phalanx.errors import DataError

_ImageInput = str | Path | Pillow.Image | NDArray[Any]
_NO_LISTS = (str, Path, Pillow.Image, np.ndarray, bytes, bytearray, dict)
_KINDS = "a file, a folder, a Pillow image, an array, or a list of these"


@dataclass(frozen=True)
class NamedImage:
    """One image that a caller passed, and its name in answers."""

    name: str
    image: Path | Pillow.Image | NDArray[np.uint8]

    def read(self, limits: ReadLimits, *, upright: bool) -> Image:
        """The image; raises BadImage for a file that is not an image or is too large.

        A file is decoded as far as needed, as for scores: else its answer would differ from them.
        """
        if isinstance(self.image, Path):
            data = read_image_file(self.image, self.name, limits)
            return EncodedImage(data, self.name, max_pixels=limits.max_pixels, upright=upright)
        if isinstance(self.image, Pillow.Image):
            return pillow_to_pixels(
                self.image, self.name, max_pixels=limits.max_pixels, upright=upright
            )
        return self.image


ImageInputs = _ImageInput | Iterable[_ImageInput] | Iterable[NamedImage]


def collect_images(images: ImageInputs) -> list[NamedImage]:
    """All images of an input, in order; a folder stands for all images in it.

    Raises DataError for an input that is not an image or contains none.
    """
    is_list = isinstance(images, Iterable) and not isinstance(images, _NO_LISTS)
    given: list[Any] = list(images) if is_list and not _is_tensor(images) else [images]  # type: ignore[arg-type]
    if not given:
        raise DataError(f"no image was given, the list is empty; give {_KINDS}")
    found: list[NamedImage] = []
    for one in given:
        found += _list_one(one, len(found) + 1)
    return found


def _list_one(given: Any, number: int) -> list[NamedImage]:
    """The images of one item of a list; number: that of its first image, counted from 1."""
    if isinstance(given, NamedImage):
        return [given]
    if isinstance(given, str | Path):
        return _list_path(Path(given))
    if isinstance(given, Pillow.Image):
        return [NamedImage(getattr(given, "filename", "") or f"image {number}", given)]
    if isinstance(given, np.ndarray):
        arrays = given if given.ndim == 4 else [given]
        if not len(arrays):
            raise DataError(f"no image was given, the array is empty; give {_KINDS}")
        return [
            NamedImage(f"image {at}", _array_to_pixels(array, f"image {at}"))
            for at, array in enumerate(arrays, start=number)
        ]
    if _is_tensor(given):
        raise DataError(
            f"image {number}: is a torch tensor; give an array of [height, width, 3], such as "
            "tensor.permute(1, 2, 0).numpy(), or call the torch module itself"
        )
    raise DataError(f"image {number}: is of type {type(given).__name__}; give {_KINDS}")


def _is_tensor(given: object) -> bool:
    """Whether it is a torch tensor; checked without importing torch."""
    return type(given).__module__.partition(".")[0] == "torch"


def _list_path(path: Path) -> list[NamedImage]:
    """A file, or the images of a folder and its subfolders, by name."""
    name = str(path)
    if "\0" in name:
        raise DataError(f"{name!r}: contains a zero byte, which no file name can have")
    if path.is_dir():
        with convert_read_errors(path):
            found = list_images(path)
        if not found.images:
            ignored = describe_ignored(found.ignored) or "it is empty"
            raise DataError(f"{name}: no image in this folder; {ignored}")
        return [NamedImage(str(path / file), path / file) for file in found.images]
    if not os.path.lexists(path):  # a broken link counts as a bad image
        raise DataError(f"{name}: no such file or folder")
    return [NamedImage(name, path)]


def _array_to_pixels(array: NDArray[Any], name: str) -> NDArray[np.uint8]:
    """The RGB bytes of an array of bytes, or of floats from 0 to 1."""
    channels_last = array[..., None] if array.ndim == 2 else array
    if channels_last.ndim != 3 or channels_last.shape[2] not in (1, 3, 4) or not array.size:
        hint = ""
        if array.ndim == 3 and array.shape[0] in (1, 3, 4):
            hint = "; channels come last: array.transpose(1, 2, 0)"
        raise DataError(
            f"{name}: has shape {list(array.shape)}, expected [height, width, 3] or [height, "
            f"width]{hint}"
        )
    if np.issubdtype(array.dtype, np.floating):
        low, high = float(array.min()), float(array.max())
        if not 0 <= low <= high <= 1:  # false for nan, too
            raise DataError(
                f"{name}: floats must be from 0 to 1, these go from {low:g} to {high:g}; give "
                "pixels that are not normalised, or bytes from 0 to 255: array.astype('uint8')"
            )
        channels_last = np.rint(channels_last * 255).astype(np.uint8)
    elif array.dtype != np.uint8:
        raise DataError(
            f"{name}: has type {array.dtype}, expected bytes from 0 to 255, as from "
            "array.astype('uint8'), or floats from 0 to 1"
        )
    if channels_last.shape[2] == 1:
        return grey_to_rgb(channels_last[..., 0])
    return np.ascontiguousarray(channels_last[..., :3])  # like Pillow, drops an alpha channel
