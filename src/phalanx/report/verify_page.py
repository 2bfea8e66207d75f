"""The page about a set of images: what is wrong with it, with the pictures it is true of."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.data.verify.verify import MISSING, NOTES, ImageLocation, Verdict, count_wrong
from phalanx.disk import out_errors, write_atomically
from phalanx.report.html import EmbeddedImage, embed_image, render_html
from phalanx.units import format_count

_IMAGES_SHOWN, _GROUPS_SHOWN, _MEMBERS_SHOWN = 24, 24, 6
_CLASSES_SHOWN = 1000

# the pixels of a split's image by its number; None where it cannot be decoded
_ReadPixels = Callable[[str, int], NDArray[np.uint8] | None]


def write_verify_page(path: Path, verdict: Verdict, read_pixels: _ReadPixels) -> None:
    """Write the page with pictures of what was found."""
    page = render_page(verdict, read_pixels)
    with out_errors(path, "then run the same command again"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page)


def render_page(verdict: Verdict, read_pixels: _ReadPixels) -> str:
    """The whole page as HTML, pictures and all."""

    def embed(images: Sequence[ImageLocation]) -> list[tuple[ImageLocation, EmbeddedImage | None]]:
        read = [(image, read_pixels(image.split, image.number)) for image in images]
        return [(i, None if pixels is None else embed_image(pixels, "JPEG")) for i, pixels in read]

    singles = [
        {"kind": kind, "total": len(images), "images": embed(images[:_IMAGES_SHOWN]), "groups": []}
        for kind, images in verdict.single.items()
        if images
    ]
    groups = [
        {
            "kind": kind,
            "total": len(found),
            "groups": [
                {"total": len(group), "images": embed(group[:_MEMBERS_SHOWN])}
                for group in found[:_GROUPS_SHOWN]
            ],
        }
        for kind, found in verdict.groups.items()
        if found
    ]
    splits = list(verdict.counts)
    return render_html(
        "verify.html",
        name=verdict.folder,
        state=count_wrong(verdict.wrong),
        all_well=not verdict.wrong,
        data=verdict.data,
        manifest=verdict.manifest,
        tiles=[
            *((split, format_count(count), "images") for split, count in verdict.images.items()),
            ("classes", format_count(len(verdict.classes)), ""),
        ],
        totals=verdict.totals,
        notes=NOTES,
        missing={"title": MISSING, "lines": verdict.missing[:_CLASSES_SHOWN]},
        # what is wrong comes first, notes last
        findings=sorted([*singles, *groups], key=lambda finding: finding["kind"] in NOTES),
        splits=splits,
        classes=[
            (name, [verdict.counts[split][label] for split in splits])
            for label, name in enumerate(verdict.classes[:_CLASSES_SHOWN])
        ],
        class_count=len(verdict.classes),
    )
