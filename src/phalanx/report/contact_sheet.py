"""A contact sheet: images in a grid, each with a line of text below."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from phalanx.disk import convert_disk_errors
from phalanx.errors import ConfigError

_CELL, _GAP, _CAPTION, _FONT_SIZE = 120, 8, 18, 11  # pixels
_INK, _PAPER = (20, 24, 40), (255, 255, 255)
_FORMATS = (".png", ".jpg", ".jpeg", ".webp")
_PLACEHOLDERS = "LastResort"  # begins the names of fonts that have a box for every letter


def find_font(text: str) -> Path | None:
    """A font that has all letters of a text, preferably matplotlib's own; None if no font has."""
    from matplotlib import font_manager

    letters = {ord(letter) for letter in text if letter.isprintable() and not letter.isspace()}
    if _has_letters(_find_own_font(), letters):
        return _find_own_font()
    found = sorted(map(Path, font_manager.findSystemFonts()))
    fonts = (font for font in found if not font.name.startswith(_PLACEHOLDERS))
    return next((font for font in fonts if _has_letters(font, letters)), None)


def _find_own_font() -> Path:
    # Pillow's own font has no letters beyond ASCII
    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"


def _has_letters(font: Path, letters: Iterable[int]) -> bool:
    """Whether a font has all letters, and can be drawn in our size."""
    from matplotlib.ft2font import FT2Font

    try:
        ImageFont.truetype(font, _FONT_SIZE)
        return all(map(FT2Font(str(font)).get_char_index, letters))
    except (OSError, RuntimeError):  # a font of bitmaps, or a damaged one
        return False


def write_contact_sheet(
    path: Path, pixels: NDArray[np.uint8], captions: Sequence[str], *, title: str
) -> None:
    """Draw [n, height, width, 3] images with their captions into an image file."""
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"--out {path}: expected a name that ends in {', '.join(_FORMATS)}")
    columns = min(12, math.ceil(math.sqrt(len(pixels))))
    rows = math.ceil(len(pixels) / columns)
    step_x, step_y = _CELL + _GAP, _CELL + _CAPTION + _GAP
    sheet = Image.new("RGB", (columns * step_x + _GAP, rows * step_y + 2 * _CAPTION + _GAP), _PAPER)
    font_file = find_font("".join((title, *captions))) or _find_own_font()
    draw, font = ImageDraw.Draw(sheet), ImageFont.truetype(font_file, _FONT_SIZE)
    draw.text((_GAP, _GAP), title, _INK, font)
    for index, (picture, caption) in enumerate(zip(pixels, captions, strict=True)):
        x, y = _GAP + index % columns * step_x, 2 * _CAPTION + index // columns * step_y
        # small images are enlarged without smoothing, to show what the model sees
        smooth = Image.Resampling.LANCZOS if len(picture) > _CELL else Image.Resampling.NEAREST
        sheet.paste(Image.fromarray(picture).resize((_CELL, _CELL), smooth), (x, y))
        draw.text((x, y + _CELL + 1), _shorten(caption, font), _INK, font)
    with convert_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(path)


def _shorten(text: str, font: ImageFont.FreeTypeFont) -> str:
    """The text, cut to the width of a cell."""
    if font.getlength(text) <= _CELL:
        return text
    while font.getlength(text + "…") > _CELL:
        text = text[:-1]
    return text + "…"
