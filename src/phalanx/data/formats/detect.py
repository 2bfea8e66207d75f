"""Recognises the dataset in a folder, mostly by the names of its files and folders."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.catalog.datasets import DATASETS
from phalanx.data.formats.folder import describe_layout
from phalanx.data.formats.index import IndexedSource, convert_read_errors
from phalanx.data.formats.sources import DATA_FORMATS, FOLDER_FORMS, Source, refuse_no_folder
from phalanx.data.layouts.image_files import (
    describe_ignored,
    describe_reason,
    has_images,
    has_loose_images,
    list_folders,
)
from phalanx.data.layouts.listing import DEFAULT_LAYOUT, LayoutOptions
from phalanx.data.layouts.split_folders import find_split_folders
from phalanx.disk import quote_path
from phalanx.errors import ConfigError, DataError

_MAX_DEPTH = 3
# folders below these may hold more datasets; folders of images are not searched
_SEARCHED_BELOW = {"packed", "cifar10", "cifar100", "mnist", "fashion-mnist"}
_IMAGENET_FORMS = (*FOLDER_FORMS, "tfrecord", "tar", "parquet", "packed")
_TABLES = (".csv", ".tsv", ".jsonl")  # may hold labels
_COMPRESSED_SHARD = re.compile(
    r"(\S+-)?(train|validation|valid|val)-\d+(-of-\d+)?(\.tfrecords?)?(\.tar)?\.(tgz|gz|bz2|xz|zst)"
)


@dataclass(frozen=True, kw_only=True)
class DetectedDataset:
    """A dataset that was found in a folder."""

    data: str
    folder: Path
    files: str  # a description of its files


def detect_datasets(root: Path, layout: LayoutOptions = DEFAULT_LAYOUT) -> list[DetectedDataset]:
    """Every dataset in a folder and up to three levels below it, the nearest first.

    If the layout says how images get their classes, the folder is one dataset of images.
    """
    refuse_no_folder(root, "give the folder that holds the data")
    if not os.access(root, os.R_OK | os.X_OK):
        raise DataError(f"{root}: cannot be read (Permission denied); check its permissions")
    if layout.labels is not None or layout.class_from is not None:
        folder = root if layout.labels else _descend(root)
        return [DetectedDataset(data="folder", folder=folder, files=DATA_FORMATS["folder"].files)]
    found: list[DetectedDataset] = []
    for folder, formats in _search(root):
        found += [
            DetectedDataset(data=data, folder=folder, files=DATA_FORMATS[data].files)
            for data in formats
            if not any(f.data == data and folder.is_relative_to(f.folder) for f in found)
        ]
    return found


def _descend(folder: Path) -> Path:
    """The folder with the images, below folders that contain only the next one."""
    with convert_read_errors(folder):
        for _ in range(_MAX_DEPTH):
            inner = list_folders(folder)
            is_way = len(inner) == 1 and find_split_folders(folder, loose=True).flat
            if not is_way or has_loose_images(folder):
                break
            folder = folder / inner[0]
    return folder


def detect_only_dataset(root: Path, layout: LayoutOptions) -> DetectedDataset:
    """The only dataset in a folder; raises DataError for none or several."""
    found = detect_datasets(root, layout)
    if not found:
        raise DataError(describe_no_dataset(root))
    if len(found) > 1:
        lines = [f"  {one.folder}: {one.data} ({one.files})" for one in found]
        first = f"{root}: there are several datasets here; give the folder of just one:"
        raise DataError("\n".join([first, *lines]))
    return found[0]


def locate_dataset(data: str, root: Path, layout: LayoutOptions) -> tuple[str, Path]:
    """The actual format and folder of a dataset, from its name and a folder that contains it.

    The folder itself if the dataset is there, else a folder below it. ImageNet may have any
    format. If nothing is found, both are returned unchanged, and opening it says why; DataError if
    there are photographs in another format.
    """
    if data not in DATA_FORMATS or data not in DATASETS or not root.is_dir():
        return data, root
    plain = layout.labels is None and layout.class_from is None
    with convert_read_errors(root):
        if plain and DATA_FORMATS[data].is_in(root):
            return data, root
        if not plain and data not in FOLDER_FORMS:
            _refuse_layout_option(data, root, layout)
    forms = {"imagenet": _IMAGENET_FORMS, "folder": FOLDER_FORMS}.get(data, (data,))
    there = detect_datasets(root, layout)
    found = [one for one in there if one.data in forms]
    if len(found) > 1:
        raise ConfigError(describe_several_datasets(root, found))
    if not found:
        if data in _IMAGENET_FORMS:
            _refuse_other_format(data, root, there)
        return data, root
    same_files = data in FOLDER_FORMS and found[0].data in FOLDER_FORMS
    return data if same_files else found[0].data, found[0].folder


def _refuse_layout_option(data: str, root: Path, layout: LayoutOptions) -> None:
    """Raise DataError if a dataset that holds its own labels is to be read by those of a folder."""
    if DATA_FORMATS[data].is_in(root):
        flag = "--labels" if layout.labels is not None else "--class-from"
        raise DataError(
            f"{root}: is in the format {data}, which holds its labels; {flag} is for images in "
            f"folders: give {flag} none"
        )


def _refuse_other_format(data: str, root: Path, there: list[DetectedDataset]) -> None:
    """Raise DataError if a folder without data of this format has photographs in another."""
    if any(map(_COMPRESSED_SHARD.fullmatch, os.listdir(root))):
        raise DataError(describe_no_dataset(root))
    photos = [one for one in there if one.data in DATASETS and DATASETS[one.data].any_size]
    if photos:
        first = f"{root}: not a dataset in the format {data}; what is here is read with:"
        raise DataError("\n".join([first, *_list_choices(photos)]))


def describe_data_layout(data: str, folder: Path, layout: LayoutOptions) -> str:
    """A line on how a folder of image files is read; empty for any other format."""
    return describe_layout(folder, layout) if data in FOLDER_FORMS else ""


def describe_similar_classes(classes: Iterable[str]) -> str:
    """The first two classes that somebody has probably meant to be one; empty if there are none."""
    known: dict[str, str] = {}
    for name in classes:
        other = known.setdefault("".join(name.casefold().split()), name)
        if other != name:
            return f"{other} and {name} differ only in case or spaces, and are two classes"
    return ""


def count_ignored(sources: Iterable[Source]) -> dict[str, int]:
    """The number of files in some splits that are ignored, by reason."""
    total: Counter[str] = Counter()
    for source in sources:
        if isinstance(source, IndexedSource):
            total += Counter(source.index.ignored)
    return dict(total)


def find_image_bytes(source: Source) -> float | None:
    """The mean size of a stored image, if there is an index; bad images have no size."""
    index = getattr(source, "index", None)
    known = None if index is None else index.sizes[index.sizes > 0]
    return float(known.mean()) if known is not None and len(known) else None


def has_boxes(source: Source) -> bool:
    """Whether any image has a bounding box."""
    index = getattr(source, "index", None)  # a plugin's source may have boxes without an index
    return hasattr(source, "box") if index is None else index.boxes is not None


def describe_files(sources: Iterable[Source]) -> str:
    """The files of some splits, the first and the last of each; empty where they are not known.

    Of a set whose images are files of their own that says nothing.
    """
    shown: dict[str, None] = {}
    for source in sources:
        if isinstance(source, IndexedSource):
            files = source.index.files
            last = f" to {files[len(files) - 1]}" if len(files) > 1 else ""
            shown[f"{files[0]}{last}"] = None  # once, if one set was split in two
    return " and ".join(shown)


def describe_no_dataset(root: Path) -> str:
    """The error message for a folder in which no dataset was found."""
    packed = sorted(filter(_COMPRESSED_SHARD.fullmatch, os.listdir(root)))
    if packed:
        return (
            f"{root / packed[0]}: is compressed, but images are read from anywhere in a shard; "
            "decompress this file and the others"
        )
    inner = _list_readable_folders(root)
    empty = [folder for folder in inner if not has_images(folder)]
    if empty and sum(map(has_loose_images, inner)) > 1:
        return (
            f"{empty[0]}: holds no image, but the folders beside it look like classes; add images, "
            "or move it elsewhere"
        )
    for folder in (root, *inner):
        if has_loose_images(folder):
            is_root = folder == root
            found = "images but no class folders" if is_root else "images in only one folder"
            needed = "" if is_root else ", but a classifier needs two classes"
            tables = [path for path in sorted(root.iterdir()) if path.suffix in _TABLES]
            table = tables[0] if tables else "FILE"
            return (
                f"{folder}: found {found}{needed}; move them into folders named after their "
                f"classes, or give their classes with --labels {table}, or --class-from prefix for "
                "names such as cat.1.jpg"
            )
    ignored = Counter(
        describe_reason(entry.name)
        for folder, _ in _search(root)
        for entry in os.scandir(folder)
        if entry.is_file() and not entry.name.startswith(".")
    )
    found = f" ({describe_ignored(ignored)})" if ignored else ""
    return (
        f"{root}: nothing readable here or up to {_MAX_DEPTH} folders below{found}; `phalanx data "
        "list` lists what can be read"
    )


def describe_conversion(found: DetectedDataset) -> str:
    """The error message for a dataset that must be converted before training."""
    return (
        f"{found.folder}: {found.data} as it is distributed ({found.files}); convert it with "
        f"`phalanx data build {quote_path(found.folder)} --to packed --out DIR`, then train on DIR"
    )


def describe_several_datasets(root: Path, found: list[DetectedDataset]) -> str:
    """The error message for a folder with several datasets: the options that name each."""
    first = f"{root}: there are several datasets here; choose one:"
    return "\n".join([first, *_list_choices(found)])


def _list_choices(found: list[DetectedDataset]) -> list[str]:
    return [f"  --data {f.data} --data-dir {quote_path(f.folder)}    ({f.files})" for f in found]


def _search(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Folders and the formats found in each, level by level."""
    level = [root]
    for depth in range(_MAX_DEPTH + 1):
        below: list[Path] = []
        for folder in level:
            with convert_read_errors(folder):
                formats = [name for name, kind in DATA_FORMATS.items() if kind.is_in(folder)]
            if "folder" in formats and "imagenet" in formats:
                formats.remove("folder")  # the same files; imagenet is more specific
            yield folder, formats
            if depth < _MAX_DEPTH and set(formats) <= _SEARCHED_BELOW:
                below += _list_readable_folders(folder)
        level = below


def _list_readable_folders(folder: Path) -> list[Path]:
    inner = (folder / name for name in list_folders(folder))
    return [path for path in inner if os.access(path, os.R_OK | os.X_OK)]
