"""What happens to one image on its way from one form of data to another."""

from dataclasses import dataclass, replace
from pathlib import PurePosixPath

import cv2

from phalanx.data.convert.origin import Task, read_samples
from phalanx.data.convert.sample import PLAIN_JPEG, Looks, Sample, look_at, shrink
from phalanx.data.formats.decode import BadImage, Pixels, decode, encode_png

_FORM_OF_ENDING = {
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".jpe": "JPEG",
    ".png": "PNG",
    ".webp": "WEBP",
    ".bmp": "BMP",
    ".gif": "GIF",
}


@dataclass(frozen=True, kw_only=True)
class Change:
    """What is asked of every image: nothing at all, as it stands."""

    any_form: bool = True  # False: an RGB or grey JPEG is wanted
    short_side: int | None = None
    quality: int = 95
    raw: bool = False  # pixels are wanted


def convert_task(work: tuple[Task, Change]) -> list[tuple[int, Sample | str, bool]]:
    """Each image of a task: its number, the image or what is wrong with it, whether it changed."""
    task, change = work
    made: list[tuple[int, Sample | str, bool]] = []
    for number, sample in read_samples(task):
        try:
            if isinstance(sample, BadImage):
                raise sample
            after = _convert(sample, change)
            made.append((number, after, after is not sample))
        except BadImage as bad:
            made.append((number, str(bad), False))
    return made


def _convert(sample: Sample, change: Change) -> Sample:
    """The image as it is asked for, byte for byte the same where that will do.

    Every image is decoded, be it only to see that it can be: raises BadImage.
    """
    looks, pixels = look_at(sample.data), decode(sample.data, sample.name)
    if change.raw:
        # as BMP the pixels travel whole, and unpacking them costs next to nothing
        return replace(sample, data=_encode(shrink(pixels, change.short_side), ".bmp", []))
    if _will_do(looks, change):
        return sample
    pixels = shrink(pixels, change.short_side)
    if change.any_form and form_of(sample.name) == "PNG":
        return replace(sample, data=encode_png(pixels))
    data = _encode(pixels, ".jpg", [cv2.IMWRITE_JPEG_QUALITY, change.quality])
    return replace(sample, data=data, name=_as_jpeg(sample.name))


def _will_do(looks: Looks, change: Change) -> bool:
    """Whether an image can stay as it is."""
    small = change.short_side is None or min(looks.width, looks.height) <= change.short_side
    plain = looks.form == "JPEG" and looks.mode in PLAIN_JPEG
    return small and (change.any_form or plain)


def form_of(name: str) -> str:
    """The form that an image's name promises; empty where it promises none."""
    return _FORM_OF_ENDING.get(PurePosixPath(name).suffix.lower(), "")


def _as_jpeg(name: str) -> str:
    """The name for an image that is a JPEG now; one that promised no other form stays."""
    if form_of(name) in ("", "JPEG"):
        return name
    return name[: -len(PurePosixPath(name).suffix)] + ".jpg"


def _encode(image: Pixels, ending: str, options: list[int]) -> bytes:
    _, data = cv2.imencode(ending, cv2.cvtColor(image, cv2.COLOR_RGB2BGR), options)
    return data.tobytes()
