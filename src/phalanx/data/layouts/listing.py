"""The images of a split with their classes, from folders, file names or a table."""

import hashlib
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from phalanx.catalog.datasets import NEWEST_LISTING_RULE as NEWEST_RULE
from phalanx.data.layouts.image_files import (
    Ignored,
    count_loose_images,
    describe_ignored,
    describe_reason,
    find_image_suffixes,
    is_hidden,
    list_broken_links,
    list_folders,
    list_images,
)
from phalanx.data.layouts.prefixes import find_prefix
from phalanx.data.layouts.split_folders import TRAIN_NAMES
from phalanx.errors import suggest

_NO_CLASS_FOLDER = "outside class folders"


@dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """How to read a folder, as far as its layout does not show it."""

    rule: int = NEWEST_RULE  # the version of the rules for listing files; older runs keep theirs
    valid_split: str | None = None  # the name of the validation split
    class_from: str | None = None  # "prefix": of file names
    labels: str | None = None  # the file that has a label for each image
    scoring: bool = False  # without training: data without splits is scored as a whole

    @property
    def key(self) -> str:
        """A suffix for the name of an index made with these options; empty for the defaults."""
        given = replace(self, scoring=False)  # the index is the same for both
        if given == DEFAULT_LAYOUT:
            return ""
        if given == LayoutOptions(rule=self.rule):
            return f"-rule{self.rule}"
        text = repr(given).encode(errors="backslashreplace")
        return f"-{hashlib.sha256(text).hexdigest()[:8]}"


DEFAULT_LAYOUT = LayoutOptions()


@dataclass(kw_only=True)
class Listing:
    """The images of a split by class, as paths from the root, and what is ignored or wrong."""

    classes: tuple[str, ...]
    images: dict[str, list[str]] = field(default_factory=dict)
    ignored: Ignored = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)  # problems that must be fixed first


def relative_prefix(root: Path, folder: Path) -> str:
    """The path from the root to the folder, as a prefix for paths in it."""
    return "" if folder == root else f"{folder.relative_to(root).as_posix()}/"


def count_outside_class_folders(root: Path, folder: Path) -> Ignored:
    """The images and broken links beside the class folders of a split, by reason."""
    # those next to the split folders are counted once, with those of training
    places = {folder, root} if folder.name.lower() in TRAIN_NAMES else {folder}
    ignored = Counter({_NO_CLASS_FOLDER: sum(map(count_loose_images, places))})
    for place in places:  # a link's folder would be a class there
        start = relative_prefix(root, place)
        ignored.update(f"broken link {start}{name}" for name in list_broken_links(place))
    return +ignored


def list_by_folder(
    root: Path,
    folder: Path,
    classes: tuple[str, ...],
    *,
    outside: Ignored,
    rule: int = NEWEST_RULE,
) -> Listing:
    """Images in class folders; findings for folders of unknown classes and empty ones.

    outside: what is ignored beside the class folders.
    """
    found, prefix = Listing(classes=classes, ignored=+outside), relative_prefix(root, folder)
    for name in list_folders(folder):
        files = list_images(folder / name, rule=rule)
        found.ignored += files.ignored
        if name not in classes:
            found.findings.append(
                f"{folder / name}: the training data has no such class; {suggest(name, classes)}"
            )
        elif not files.images:
            why = describe_ignored(files.ignored)
            found.findings.append(
                f"{folder / name}: no image in this class folder{f' ({why})' * bool(why)}"
            )
        else:
            found.images[name] = [f"{prefix}{name}/{file}" for file in files.images]
    if not found.images and not found.findings:
        found.findings.append(f"{folder}: has no class folders")
    return found


def list_by_prefix(
    root: Path, folder: Path, classes: tuple[str, ...] | None, *, rule: int = NEWEST_RULE
) -> Listing:
    """Images whose file names start with their class; classes: None for all that are found."""
    files, prefix = list_images(folder, rule=max(rule, 2)), relative_prefix(root, folder)
    images: dict[str, list[str]] = {}
    ignored = files.ignored
    for file in files.images:
        name = find_prefix(file)
        if name is None:
            ignored["without a class prefix"] += 1
        else:
            images.setdefault(name, []).append(f"{prefix}{file}")
    known = tuple(sorted(images)) if classes is None else classes
    found = Listing(classes=known, images={n: images[n] for n in sorted(images)}, ignored=ignored)
    if len(known) < 2:
        one = f"of only one class, {known[0]!r}" if known else "without any class"
        found.findings.append(
            f"{folder}: --class-from prefix finds images {one}; it takes what comes before the "
            "first dot, underscore or hyphen of a file's name, as in cat.1.jpg"
        )
    found.findings += [
        f"{folder}: no training image is of class {name!r} ({images[name][0]}); "
        f"{suggest(name, known)}"
        for name in sorted(images)
        if name not in known
    ]
    return found


def list_by_table(
    root: Path,
    folder: Path,
    labels: Mapping[str, str],
    *,
    classes: Sequence[str],
    table: Path,
    others: Collection[str] = (),
) -> Listing:
    """The images in a table, with their classes; its paths are relative to the root.

    others: images that the table lists for another split.
    """
    found = Listing(classes=tuple(classes))
    files, prefix = list_images(folder), relative_prefix(root, folder)
    found.ignored += files.ignored
    if table.absolute().is_relative_to(folder.absolute()):  # not ignored: the table was read
        found.ignored[describe_reason(table.name)] -= 1
    there = {f"{prefix}{file}" for file in files.images}
    found.ignored[f"not in {table.name}"] += len(there - labels.keys() - {*others})
    suffixes = find_image_suffixes()
    for path in sorted(labels):
        if path in there:
            found.images.setdefault(labels[path], []).append(path)
        elif not path.lower().endswith(suffixes) and (root / path).is_file():
            found.ignored[f"in {table.name}, {PurePosixPath(path).suffix or 'no suffix'}"] += 1
        else:
            is_skipped = os.path.lexists(root / path) and any(map(is_hidden, path.split("/")))
            why = "hidden files are not read" if is_skipped else "there is no such file"
            found.findings.append(f"{root / path}: listed in {table.name}, but {why}")
    found.ignored = +found.ignored
    found.images = {name: found.images[name] for name in classes if name in found.images}
    return found
