"""The page of `data verify`: what is wrong with a dataset, with pictures."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.data.verify.verify import (
    MISSING_CLASS,
    NOTE_KINDS,
    ImageLocation,
    VerifyResult,
    describe_problems,
)
from phalanx.disk import convert_out_errors, write_atomically
from phalanx.report.html import EmbeddedImage, embed_image, render_html

_SHOWN = {"images_shown": 24, "groups_shown": 24, "members_shown": 6, "classes_shown": 1000}

# the pixels of a split's image by its number; None if it cannot be decoded
_ReadPixels = Callable[[str, int], NDArray[np.uint8] | None]


def write_verify_page(path: Path, verdict: VerifyResult, read_pixels: _ReadPixels) -> None:
    """Write the page with pictures of what was found."""
    page = render_page(verdict, read_pixels)
    with convert_out_errors(path, "then run the same command again"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page)


def render_page(verdict: VerifyResult, read_pixels: _ReadPixels) -> str:
    """The whole page as HTML, including pictures."""

    def embed(image: ImageLocation) -> EmbeddedImage | None:
        pixels = read_pixels(image.split, image.number)
        return None if pixels is None else embed_image(pixels, "JPEG")

    return render_html(
        "verify.html",
        name=verdict.folder,
        state=describe_problems(verdict.wrong),
        all_well=not verdict.wrong,
        verdict=verdict,
        notes=NOTE_KINDS,
        missing=MISSING_CLASS,
        embed=embed,
        **_SHOWN,
    )
