"""The splits of a folder: train/ and val/, or only class folders."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.catalog.datasets import NEWEST_LISTING_RULE as NEWEST_RULE
from phalanx.data.layouts.image_files import (
    has_images,
    has_loose_images,
    list_folders,
)
from phalanx.data.layouts.prefixes import has_prefixes
from phalanx.errors import ConfigError, suggest

TRAIN_NAMES = ("train", "training")
VALID_NAMES = ("val", "valid", "validation", "dev", "eval", "test")  # the first that exists
_OFTEN_UNLABELLED = ("dev", "eval", "test")  # used as a split only if images have classes
_FIRST_NAMES = {"train": ("train",), "valid": ("val", "validation", "valid")}  # of rule 1
_FOLDERS_TRIED = 3  # how many folders are checked for images


@dataclass(frozen=True, kw_only=True)
class SplitFolders:
    """The folders of the splits, None for one that is missing; and the unused folders."""

    train: Path | None
    valid: Path | None
    unused_folders: tuple[str, ...] = ()
    flat: bool = False  # train is the folder itself, which contains only class folders

    def find(self, split: str) -> Path | None:
        """The folder of train or valid."""
        return self.train if split == "train" else self.valid


def find_split_folders(
    root: Path,
    *,
    rule: int = NEWEST_RULE,
    valid_split: str | None = None,
    loose: bool = False,
) -> SplitFolders:
    """The folders of the splits; class folders without splits are training data.

    loose: images need no class folders, because their classes are given in another way.
    """
    if rule == 1:
        return _find_by_first_rule(root)
    folders = list_folders(root)
    by_name: dict[str, str] = {}
    for name in folders:  # if two differ only in case, take the lower-case one
        if name.lower() not in by_name or name == name.lower():
            by_name[name.lower()] = name
    train = next((by_name[name] for name in TRAIN_NAMES if name in by_name), None)
    if train is not None and not _is_split(root, train, folders, loose=loose):
        train = None
    valid = _choose_valid(root, by_name, valid_split, loose=loose)
    if train is None and valid is None:
        return SplitFolders(train=root, valid=None, flat=True)
    if train is None and valid_split is None and not _is_split(root, valid, folders, loose=loose):
        return SplitFolders(train=root, valid=None, flat=True)
    return SplitFolders(
        train=root / train if train else None,
        valid=root / valid if valid else None,
        unused_folders=tuple(
            name for name in folders if name not in (train, valid) and _shows_images(root / name)
        ),
    )


def _find_by_first_rule(root: Path) -> SplitFolders:
    found = {
        split: next((root / name for name in names if (root / name).is_dir()), None)
        for split, names in _FIRST_NAMES.items()
    }
    if found["train"] is None and found["valid"] is None:
        return SplitFolders(train=root, valid=None, flat=True)
    return SplitFolders(train=found["train"], valid=found["valid"])


def _is_split(root: Path, name: str | None, folders: Sequence[str], *, loose: bool) -> bool:
    """Whether a folder of that name is a split and not a class, such as pictures of trains."""
    if name is None:
        return False
    if loose or list_folders(root / name) or not has_loose_images(root / name):
        return True
    known = {*TRAIN_NAMES, *VALID_NAMES}
    return all(other.lower() in known for other in folders)


def _shows_images(folder: Path) -> bool:
    """Whether images are in a folder or the first few below it; a full search may take long."""
    inner = [folder / name for name in list_folders(folder)[:_FOLDERS_TRIED]]
    return any(has_loose_images(each) for each in (folder, *inner))


def _choose_valid(
    root: Path, by_name: dict[str, str], valid_split: str | None, *, loose: bool
) -> str | None:
    """The validation folder: that of the option, else the first of the usual names."""
    if valid_split is not None:
        wanted = valid_split.strip("/").lower()
        if wanted not in by_name or wanted in TRAIN_NAMES:
            others = [name for low, name in by_name.items() if low not in TRAIN_NAMES]
            way_out = suggest(valid_split, others) if others else "it holds no other folder"
            raise ConfigError(f"--valid-split {valid_split}: no such folder in {root}; {way_out}")
        return by_name[wanted]
    for name in VALID_NAMES:
        if name in by_name:
            folder = root / by_name[name]
            has_labels = has_prefixes(folder) if loose else list_folders(folder)
            if has_labels or name not in _OFTEN_UNLABELLED:
                return by_name[name]
    return None


def has_class_folders(root: Path) -> bool:
    """Whether a folder has class folders, or a training or validation folder that has some."""
    found = find_split_folders(root)
    if not found.flat:
        return any(folder and list_folders(folder) for folder in (found.train, found.valid))
    names = list_folders(root)
    if len(names) < 2:
        return False
    tried = names[:_FOLDERS_TRIED]
    return all(has_loose_images(root / name) for name in tried) or _are_deep_classes(root, names)


def _are_deep_classes(root: Path, names: Sequence[str]) -> bool:
    """Whether folders with images deeper down are classes, and not several datasets.

    They are if one of them has images directly in it, or if all have the same structure: one
    folder each, or folders of the same names.
    """
    if not all(has_images(root / name) for name in names[:_FOLDERS_TRIED]):
        return False
    if any(not find_split_folders(root / name).flat for name in names):
        return False
    if any(has_loose_images(root / name) for name in names):
        return True
    inner = [list_folders(root / name) for name in names]
    return all(len(folders) == 1 for folders in inner) or all(f == inner[0] for f in inner)


def describe_split_folders(root: Path, found: SplitFolders) -> str:
    """A line on the layout of a folder."""
    if found.flat:
        return "class folders without splits"
    folders = [folder for folder in (found.train, found.valid) if folder]
    names = " and ".join(f"{folder.relative_to(root).as_posix()}/" for folder in folders)
    text = f"{names} with class folders"
    if found.unused_folders:
        left = ", ".join(f"{name}/" for name in found.unused_folders)
        choices = [name for name in found.unused_folders if len(list_folders(root / name)) > 1]
        how = f" (--valid-split {choices[0]} would validate on it)" if choices else ""
        text += f"; {left} not used{how}"
    return text
