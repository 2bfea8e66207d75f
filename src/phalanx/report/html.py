"""Self-contained HTML pages, from values and the templates next to this file."""

import base64
import io
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from phalanx.units import format_count

if TYPE_CHECKING:
    from jinja2 import Environment

_THUMBNAIL, _JPEG_QUALITY, _FEW_PIXELS = 160, 80, 64


@cache
def _environment() -> "Environment":
    """The templates' environment, which escapes every value."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["count"] = format_count
    environment.filters["percent"] = lambda share, digits: f"{share:.{digits}%}"
    return environment


def render_html(template: str, **values: Any) -> str:
    """The page of a template with these values."""
    page = _environment().get_template(template).render(values)
    # bytes of a file's name that are not UTF-8 become question marks
    return page.encode(errors="replace").decode()


@dataclass(frozen=True)
class EmbeddedImage:
    """A thumbnail as a data URL."""

    address: str
    has_few_pixels: bool  # if so, it is enlarged without smoothing


def embed_image(pixels: NDArray[np.uint8], form: str) -> EmbeddedImage:
    """A thumbnail of the image, as PNG or JPEG, to embed in a page."""
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    file = io.BytesIO()
    image.save(file, format=form, quality=_JPEG_QUALITY)
    return EmbeddedImage(
        address=embed_file(file.getvalue(), form),
        has_few_pixels=max(pixels.shape) <= _FEW_PIXELS,
    )


def embed_file(content: bytes, form: str) -> str:
    """The file of an image, PNG or JPEG, as a data URL."""
    return f"data:image/{form.lower()};base64,{base64.b64encode(content).decode()}"
