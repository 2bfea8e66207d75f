"""Turns the image files of requests into rows for the model, in threads of their own."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from phalanx.assemble.dataset_summary import Preprocessing
from phalanx.data.formats.decode import BadImage, EncodedImage, Pixels
from phalanx.data.formats.image_file import ReadLimits
from phalanx.data.pillow_image import PILLOW_ERRORS
from phalanx.data.transforms.normalization import find_scale_and_shift
from phalanx.data.transforms.transform import build_transform

_DECODE_ERRORS = (cv2.error, MemoryError, *PILLOW_ERRORS)


@dataclass(frozen=True)
class ImageFile:
    """One image file of a request."""

    name: str
    data: bytes | memoryview


@dataclass
class PreprocessedImages:
    """The readable images of a request, and what is wrong with the others."""

    rows: NDArray[Any]  # as the model accepts them, without those that cannot be read
    pixels: NDArray[np.uint8]  # [images, size, size, 3], of all images
    problems: dict[int, str]  # by the index of the image


class _RowNormaliser:
    """Normalises bytes [H, W, 3] to the model's input [3, H, W], as `Normaliser` does in torch."""

    def __init__(self, preprocessing: Preprocessing) -> None:
        how = preprocessing.normalization
        scale, shift = find_scale_and_shift(preprocessing.mean, preprocessing.std, how)
        self._scale = np.array(scale, np.float32)[:, None, None]
        self._shift = np.array(shift, np.float32)[:, None, None]
        self._per_image = how == "per-image"

    def write(self, pixels: Pixels, out: NDArray[np.float32]) -> None:
        """Normalise one image into its row."""
        planes = pixels.transpose(2, 0, 1)
        if self._per_image:
            values = planes.astype(np.float32)
            std = max(float(values.std()), values.size**-0.5)
            np.divide(values - values.mean(), std, out=out)
            return
        np.multiply(planes, self._scale, out=out, dtype=np.float32)
        out += self._shift


class ImagePreprocessor:
    """Decodes and resizes images as for the model's scores, in threads.

    Threads are enough, because OpenCV and the JPEG decoder release Python's lock.
    """

    def __init__(
        self, preprocessing: Preprocessing, limits: ReadLimits, *, threads: int, as_bytes: bool
    ) -> None:
        self._preprocessing, self._limits = preprocessing, limits
        self._as_bytes = as_bytes  # the model normalises images itself
        self._transform = build_transform(self._preprocessing.transform)
        self.normaliser = _RowNormaliser(self._preprocessing)
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")

    def warm_up(self) -> None:
        """Use each decoder once, so that it loads what it needs."""
        out = np.zeros((self._preprocessing.image_size,) * 2 + (3,), np.uint8)
        for name in (".jpg", ".png"):
            data = cv2.imencode(name, out)[1].tobytes()
            self.read(ImageFile(name, data), out)

    def close(self) -> None:
        """Stop the threads."""
        self.pool.shutdown(wait=True, cancel_futures=True)

    async def preprocess(self, images: Sequence[ImageFile]) -> PreprocessedImages:
        """All images of a request, as the model accepts them."""
        size = self._preprocessing.image_size
        pixels = np.zeros((len(images), size, size, 3), np.uint8)
        rows = pixels if self._as_bytes else np.empty((len(images), 3, size, size), np.float32)
        loop, problems = asyncio.get_running_loop(), dict[int, str]()

        def preprocess_one(place: int) -> None:
            image = images[place]
            try:
                self.read(image, pixels[place])
            except BadImage as bad:
                problems[place] = bad.reason
                return
            if not self._as_bytes:
                self.normaliser.write(pixels[place], rows[place])

        await asyncio.gather(
            *(
                loop.run_in_executor(self.pool, preprocess_one, place)
                for place in range(len(images))
            )
        )
        good = [place for place in range(len(images)) if place not in problems]
        return PreprocessedImages(rows[good] if problems else rows, pixels, problems)

    def read(self, image: ImageFile, out: Pixels) -> None:
        """Write one image, cut to the model's size, into its row; raises BadImage."""
        name, limits = image.name, self._limits
        limits.refuse_too_large(len(image.data), name)
        try:
            encoded = EncodedImage(
                bytes(image.data),
                name,
                max_pixels=limits.max_pixels,
                upright=self._preprocessing.exif_orientation,
            )
            self._refuse_narrow(encoded)
            self._transform.apply_evaluation(encoded, out)
        except _DECODE_ERRORS as error:
            raise BadImage(name, str(error) or type(error).__name__) from None

    def _refuse_narrow(self, image: EncodedImage) -> None:
        """Raise BadImage for an image so narrow that, resized, it would exceed the pixel limit."""
        short, long = sorted((image.height, image.width))
        if not short:
            raise BadImage(image.name, "has no pixels")
        scaled = self._preprocessing.image_size / self._preprocessing.eval_crop
        if self._preprocessing.augment == "resized-crop" and (
            scaled**2 * long / short > self._limits.max_pixels
        ):
            raise BadImage(
                image.name,
                f"{image.width}x{image.height} pixels are too narrow: brought to the model's size, "
                f"they would be over the {self._limits.max_pixels:,} of --max-pixels",
            )
