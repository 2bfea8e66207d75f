"""Which files are images, by version of the rule, and which are ignored, counted by reason."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from phalanx.catalog.datasets import NEWEST_LISTING_RULE as NEWEST_RULE
from phalanx.units import format_plural

_FIRST_SUFFIXES = (".jpg", ".jpeg", ".png")
_SUFFIXES = (
    *(".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"),
)
_HEIF_SUFFIXES = (".heic", ".heif")  # read with pillow-heif, which is optional
_OTHER_SYSTEMS = ("__MACOSX",)  # folders that archivers add
_REASONS_SHOWN = 8

Ignored = Counter[str]  # files by the reason why they are not read: ".txt", "outside class folders"


def find_image_suffixes(rule: int = NEWEST_RULE) -> tuple[str, ...]:
    """The suffixes of the files that count as images, in lower case.

    >>> find_image_suffixes(1)
    ('.jpg', '.jpeg', '.png')
    """
    if rule == 1:
        return _FIRST_SUFFIXES
    has_heif = find_spec("pillow_heif") is not None
    return (*_SUFFIXES, *(_HEIF_SUFFIXES if has_heif else ()))


def strip_image_suffix(name: str) -> str:
    """The name without the suffix of an image.

    >>> strip_image_suffix("cat/1.JPG"), strip_image_suffix("cat/no.1")
    ('cat/1', 'cat/no.1')
    """
    stem, dot, last = name.rpartition(".")
    return stem if f"{dot}{last}".lower() in (*_SUFFIXES, *_HEIF_SUFFIXES) else name


def describe_reason(name: str) -> str:
    """Why a file that is not an image is ignored, in a word or two.

    >>> describe_reason("notes.TXT"), describe_reason("README")
    ('.txt', 'without a suffix')
    """
    suffix = PurePosixPath(name).suffix.lower()
    if suffix in _HEIF_SUFFIXES:
        return f"{suffix} (pip install 'phalanx[heic]')"
    return suffix or "without a suffix"


def describe_ignored(ignored: Mapping[str, int]) -> str:
    """A line about ignored files; empty if there are none.

    >>> describe_ignored({".txt": 1, ".xcf": 12})
    'ignored 13 files: 12 .xcf, 1 .txt'
    """
    reasons = sorted(ignored.items(), key=lambda item: (-item[1], item[0]))
    total = sum(ignored.values())
    if not total:
        return ""
    shown = [f"{count:,} {reason}" for reason, count in reasons[:_REASONS_SHOWN]]
    rest = sum(count for _, count in reasons[_REASONS_SHOWN:])
    shown += [format_plural(rest, "other")] if rest else []
    return f"ignored {format_plural(total, 'file')}: {', '.join(shown)}"


@dataclass
class _FoundFiles:
    """The images and folders below a folder, as relative paths, and what is ignored."""

    images: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    ignored: Ignored = field(default_factory=Counter)


def list_folders(folder: Path) -> list[str]:
    """The names of the folders in a folder, without hidden ones."""
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if not is_hidden(e.name) and _is_folder(e))


def list_images(folder: Path, *, rule: int = NEWEST_RULE) -> _FoundFiles:
    """The images of a class folder, sorted: at any depth, or by rule 1 only directly in it."""
    found, suffixes = _FoundFiles(), find_image_suffixes(rule)
    for name in _walk(folder, found.folders, deep=rule > 1):
        if name.lower().endswith(suffixes):
            found.images.append(name)
        else:
            found.ignored[describe_reason(name)] += 1
    found.images.sort()
    found.folders.sort()
    return found


def count_loose_images(folder: Path) -> int:
    """The number of images directly in a folder."""
    return sum(1 for _ in _iterate_loose_images(folder))


def list_broken_links(folder: Path) -> list[str]:
    """The broken links in a folder, except those with the name of an image."""
    suffixes = find_image_suffixes()
    with os.scandir(folder) as entries:
        links = [e.name for e in entries if e.is_symlink() and not is_hidden(e.name)]
    named = (name for name in links if not name.lower().endswith(suffixes))
    return sorted(name for name in named if not os.path.exists(folder / name))


def has_loose_images(folder: Path) -> bool:
    """Whether an image is directly in a folder; stops at the first."""
    return any(True for _ in _iterate_loose_images(folder))


def _iterate_loose_images(folder: Path) -> Iterator[str]:
    suffixes = find_image_suffixes()
    with os.scandir(folder) as entries:
        for entry in entries:
            is_image = entry.name.lower().endswith(suffixes) and not is_hidden(entry.name)
            if is_image and not _is_folder(entry):
                yield entry.name


def has_images(folder: Path) -> bool:
    """Whether there is an image in a folder, at any depth; stops at the first."""
    return any(True for _ in iterate_images(folder))


def iterate_images(folder: Path) -> Iterator[str]:
    """The images of a folder as relative paths, unsorted, at any depth."""
    suffixes = find_image_suffixes()
    return (n for n in _walk(folder, [], deep=True) if n.lower().endswith(suffixes))


def _walk(root: Path, folders: list[str], *, deep: bool) -> Iterator[str]:
    """The files below a folder as relative paths; `folders` is extended by the folders found."""
    waiting = [""]
    while waiting:
        below = waiting.pop()
        with os.scandir(root / below) as entries:
            seen = [entry for entry in entries if not is_hidden(entry.name)]
        inner = [entry for entry in seen if _is_folder(entry)]
        yield from (f"{below}{entry.name}" for entry in seen if not _is_folder(entry))
        for entry in inner if deep else ():
            if not (entry.is_symlink() and _leads_back(entry, root / below)):
                folders.append(f"{below}{entry.name}")
                waiting.append(f"{below}{entry.name}/")


def _leads_back(link: os.DirEntry[str], folder: Path) -> bool:
    """Whether a link points to a folder above it, so that images would be read twice.

    A part of the path may itself be a link, so the parents of each part's target count, too.
    """
    target = Path(link).resolve()
    return any(part.resolve().is_relative_to(target) for part in (folder, *folder.parents))


def is_hidden(name: str) -> bool:
    """Whether a file or folder of that name is skipped."""
    return name.startswith(".") or name in _OTHER_SYSTEMS


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether a path is a folder; a broken link is a bad image, not a folder."""
    try:
        return entry.is_dir()
    except OSError:
        return False
