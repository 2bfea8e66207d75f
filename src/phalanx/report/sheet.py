"""A contact sheet: images in a grid, each with a line of text under it."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from phalanx.disk import disk_errors
from phalanx.errors import ConfigError

CELL, GAP, CAPTION = 120, 8, 18  # pixels
INK, PAPER = (20, 24, 40), (255, 255, 255)
FORMATS = (".png", ".jpg", ".jpeg", ".webp")


def write_sheet(
    path: Path, pixels: NDArray[np.uint8], captions: Sequence[str], *, title: str
) -> None:
    """Draw [n, height, width, 3] images with their captions into an image file."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--out {path}: wants a name that ends in {', '.join(FORMATS)}")
    columns = min(12, math.ceil(math.sqrt(len(pixels))))
    rows = math.ceil(len(pixels) / columns)
    step_x, step_y = CELL + GAP, CELL + CAPTION + GAP
    sheet = Image.new("RGB", (columns * step_x + GAP, rows * step_y + 2 * CAPTION + GAP), PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    draw.text((GAP, GAP), title, INK, font)
    for place, (picture, caption) in enumerate(zip(pixels, captions, strict=True)):
        x, y = GAP + place % columns * step_x, 2 * CAPTION + place // columns * step_y
        # small images stay square pixels, so that one can see what the model sees
        smooth = Image.Resampling.LANCZOS if len(picture) > CELL else Image.Resampling.NEAREST
        sheet.paste(Image.fromarray(picture).resize((CELL, CELL), smooth), (x, y))
        draw.text((x, y + CELL + 1), fitted(caption, font), INK, font)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(path)


def fitted(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """As much of the text as one cell is wide."""
    if font.getlength(text) <= CELL:
        return text
    while font.getlength(text + "…") > CELL:
        text = text[:-1]
    return text + "…"
