"""Real images on which an export is compared with its checkpoint."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from phalanx.assemble.dataset_summary import build_input_spec
from phalanx.assemble.feed import LoadedFeed
from phalanx.assemble.score import read_pixels
from phalanx.assemble.session import Session
from phalanx.data.formats.arrays import open_embedded
from phalanx.data.formats.decode import BadImage
from phalanx.data.loading.image_inputs import NamedImage
from phalanx.data.loading.reader import open_image
from phalanx.data.transforms.transform import build_transform
from phalanx.disk import expand_home
from phalanx.errors import DataError
from phalanx.units import format_plural

_GENERATED_DATA = ("synthetic", "generated")


@dataclass(frozen=True)
class CheckImages:
    """Images of a model's input size, with their names and a description of their source."""

    pixels: NDArray[np.uint8]  # [N, size, size, 3]
    names: tuple[str, ...]
    source: str


def choose_check_images(
    session: Session, given: Sequence[NamedImage] | None, *, count: int, needs_data: bool
) -> CheckImages:
    """The given images, else some of the run's data, else those that come with Phalanx.

    Of the data, validation images; training images where there are no others.
    needs_data: the data was named, so that it is a mistake if it cannot be read.
    """
    if given is not None:
        return _read_given(session, given[:count])
    if session.config.data.data in _GENERATED_DATA:
        return _read_embedded(session, count, "its data is noise")
    # named data may hold validation images although the run had none
    is_scored = needs_data or session.plan.valid_images > 0
    problems: list[DataError] = []
    for read_split in (*[_read_validation] * is_scored, _read_training):
        try:
            return read_split(session, count)
        except DataError as problem:
            problems.append(problem)
    if needs_data:
        raise problems[0]
    folder = session.config.data.data_dir
    is_there = folder is not None and expand_home(folder).exists()
    why = "its data cannot be read any more" if is_there else "its data is not on this machine"
    return _read_embedded(session, count, why)


def _read_given(session: Session, images: Sequence[NamedImage]) -> CheckImages:
    pixels, problems = read_pixels(session, images)
    good = [row for row in range(len(images)) if row not in problems]
    if not good:
        first = next(iter(problems))
        raise DataError(
            f"--images: none of them can be read; {images[first].name}: {problems[first]}"
        )
    names = tuple(images[row].name for row in good)
    return CheckImages(
        pixels[good], names, f"{format_plural(len(good), 'image')} given by --images"
    )


def _read_validation(session: Session, count: int) -> CheckImages:
    """Images spread over the validation split; unreadable ones are left out."""
    feed = session.scoring_feed
    assert isinstance(feed, LoadedFeed)
    chosen = _choose_evenly(len(feed.loader.source("valid")), count)
    pixels = feed.thumbnails(chosen)
    readable = [row for row in range(len(chosen)) if pixels[row].any()]
    if not readable:
        raise DataError("none of the validation images can be read")
    names = feed.names(np.array(chosen)[readable])
    data = session.config.data.data
    source = f"{format_plural(len(readable), 'validation image')} of its data ({data})"
    return CheckImages(pixels[readable], tuple(names), source)


def _read_training(session: Session, count: int) -> CheckImages:
    """Images spread over the training split, cropped as for scoring; bad ones are left out."""
    preprocessing, spec = session.preprocessing, build_input_spec(session.config, session.plan)
    source = replace(spec, order=None, upright=preprocessing.exif_orientation).open("train")
    transform = build_transform(preprocessing.transform)
    pixels, names = [], []
    for index in _choose_evenly(len(source), count):
        row = np.zeros((preprocessing.image_size, preprocessing.image_size, 3), np.uint8)
        with suppress(BadImage):
            transform.apply_evaluation(open_image(source, index), row)
            pixels.append(row)
            names.append(source.name(index))
    if not pixels:
        raise DataError("none of the training images can be read")
    data = session.config.data.data
    words = f"{format_plural(len(pixels), 'training image')} of its data ({data})"
    return CheckImages(np.stack(pixels), tuple(names), words)


def _read_embedded(session: Session, count: int, why: str) -> CheckImages:
    source, size = open_embedded("valid"), session.preprocessing.image_size
    transform = build_transform(session.preprocessing.transform)
    chosen = _choose_evenly(len(source), count)
    pixels = np.zeros((len(chosen), size, size, 3), np.uint8)
    for row, index in enumerate(chosen):
        transform.apply_evaluation(source.read(index), pixels[row])
    names = tuple(source.name(index) for index in chosen)
    come = "comes" if len(chosen) == 1 else "come"
    words = f"{format_plural(len(chosen), 'image')} that {come} with Phalanx ({why})"
    return CheckImages(pixels, names, words)


def _choose_evenly(images: int, count: int) -> list[int]:
    """Indices spread evenly over all images, since datasets are often sorted by class."""
    return np.linspace(0, images - 1, min(count, images)).astype(int).tolist()
