"""Which files are images: the rule, by version, and what it leaves out, counted by reason."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from phalanx.catalog.datasets import NEWEST_LISTING_RULE as NEWEST_RULE

_FIRST_SUFFIXES = (".jpg", ".jpeg", ".png")
_SUFFIXES = (
    *(".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"),
)
_HEIF_SUFFIXES = (".heic", ".heif")  # read with pillow-heif, which is an extra
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
    """Why a file that is no image is ignored, in a word or two.

    >>> describe_reason("notes.TXT"), describe_reason("README")
    ('.txt', 'without a suffix')
    """
    suffix = PurePosixPath(name).suffix.lower()
    if suffix in _HEIF_SUFFIXES:
        return f"{suffix} (pip install 'phalanx[heic]')"
    return suffix or "without a suffix"


def describe_ignored(ignored: Mapping[str, int]) -> str:
    """What was ignored, in a line; empty where nothing was.

    >>> describe_ignored({".txt": 1, ".xcf": 12})
    'ignored 13 files: 12 .xcf, 1 .txt'
    """
    reasons = sorted(ignored.items(), key=lambda item: (-item[1], item[0]))
    total = sum(ignored.values())
    if not total:
        return ""
    shown = [f"{count:,} {reason}" for reason, count in reasons[:_REASONS_SHOWN]]
    rest = sum(count for _, count in reasons[_REASONS_SHOWN:])
    shown += [f"{rest:,} others"] if rest else []
    return f"ignored {total:,} file{'s' * (total != 1)}: {', '.join(shown)}"


@dataclass
class _FoundFiles:
    """The images below a folder, by their path from there, the folders, and what is ignored."""

    images: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    ignored: Ignored = field(default_factory=Counter)


def list_folders(folder: Path) -> list[str]:
    """The names of the folders in a folder, without hidden ones."""
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if not _is_hidden(e.name) and _is_folder(e))


def list_images(folder: Path, *, rule: int = NEWEST_RULE) -> _FoundFiles:
    """The images of a class folder, sorted: to the bottom, or its own alone by rule 1."""
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
    """How many images lie in a folder itself, in no folder below it."""
    return sum(1 for _ in _iterate_loose_images(folder, NEWEST_RULE))


def list_broken_links(folder: Path) -> list[str]:
    """The links in a folder that lead nowhere, without those that are called as images are."""
    suffixes = find_image_suffixes()
    with os.scandir(folder) as entries:
        links = [e.name for e in entries if e.is_symlink() and not _is_hidden(e.name)]
    named = (name for name in links if not name.lower().endswith(suffixes))
    return sorted(name for name in named if not os.path.exists(folder / name))


def has_loose_images(folder: Path, *, rule: int = NEWEST_RULE) -> bool:
    """Whether an image lies in a folder itself; stops at the first."""
    return any(True for _ in _iterate_loose_images(folder, rule))


def _iterate_loose_images(folder: Path, rule: int) -> Iterator[str]:
    suffixes = find_image_suffixes(rule)
    with os.scandir(folder) as entries:
        for entry in entries:
            is_image = entry.name.lower().endswith(suffixes) and not _is_hidden(entry.name)
            if is_image and not _is_folder(entry):
                yield entry.name


def holds_images(folder: Path, *, rule: int = NEWEST_RULE) -> bool:
    """Whether an image lies in a folder, by rule 2 at any depth; stops at the first."""
    return any(True for _ in iterate_images(folder, rule=rule))


def iterate_images(folder: Path, *, rule: int = NEWEST_RULE) -> Iterator[str]:
    """The images of a folder as they are met, by rule 2 at any depth, by their path from there."""
    suffixes = find_image_suffixes(rule)
    return (n for n in _walk(folder, [], deep=rule > 1) if n.lower().endswith(suffixes))


def _walk(root: Path, folders: list[str], *, deep: bool) -> Iterator[str]:
    """The files under a folder by their path from there; the folders met are added to a list."""
    waiting = [""]
    while waiting:
        below = waiting.pop()
        with os.scandir(root / below) as entries:
            seen = [entry for entry in entries if not _is_hidden(entry.name)]
        inner = [entry for entry in seen if _is_folder(entry)]
        yield from (f"{below}{entry.name}" for entry in seen if not _is_folder(entry))
        for entry in inner if deep else ():
            if not (entry.is_symlink() and _leads_back(entry, root / below)):
                folders.append(f"{below}{entry.name}")
                waiting.append(f"{below}{entry.name}/")


def _leads_back(link: os.DirEntry[str], folder: Path) -> bool:
    """Whether a link leads to a folder on the way to where it lies: its images would be read twice.

    Links on the way may have led elsewhere, so each part of it counts with what is above it.
    """
    target = Path(link).resolve()
    return any(part.resolve().is_relative_to(target) for part in (folder, *folder.parents))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name in _OTHER_SYSTEMS


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether a folder lies there; a link that leads nowhere is a bad image, not a folder."""
    try:
        return entry.is_dir()
    except OSError:
        return False
