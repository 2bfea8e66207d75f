"""Classes as prefixes of file names."""

import re
from pathlib import Path, PurePosixPath

from phalanx.data.layouts.image_files import iterate_images

_PREFIX = re.compile(r"([^._-]+)[._-]")  # up to the first dot, underscore or hyphen


def find_prefix(path: str) -> str | None:
    """The class that a file's name starts with, or None.

    >>> find_prefix("train/cat.1.jpg"), find_prefix("n01440764_tench.JPEG"), find_prefix("7.jpg")
    ('cat', 'n01440764', None)
    """
    found = _PREFIX.match(PurePosixPath(path).stem)
    return found[1] if found else None


def has_prefixes(folder: Path) -> bool:
    """Whether any image in a folder, at any depth, has a name that starts with a class."""
    return any(map(find_prefix, iterate_images(folder)))
