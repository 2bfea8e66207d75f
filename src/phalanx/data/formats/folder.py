"""Folders of image files, whose class is in the folder name, the file name or a table."""

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from phalanx.data.formats.decode import BadImage
from phalanx.data.formats.image_file import read_data_file
from phalanx.data.formats.index import (
    Index,
    IndexedSource,
    Snapshot,
    convert_read_errors,
    load_or_build_index,
    snapshot_files,
)
from phalanx.data.layouts import labels_file
from phalanx.data.layouts.image_files import find_image_suffixes, list_folders
from phalanx.data.layouts.listing import (
    DEFAULT_LAYOUT,
    LayoutOptions,
    Listing,
    count_outside_class_folders,
    list_by_folder,
    list_by_prefix,
    list_by_table,
    relative_prefix,
)
from phalanx.data.layouts.snapshot import SMALL_SET, hash_files, snapshot_folder
from phalanx.data.layouts.split_folders import (
    SplitFolders,
    describe_split_folders,
    find_split_folders,
)
from phalanx.data.layouts.tiny_imagenet import find_annotations, parse_annotations
from phalanx.data.layouts.val_split import choose_by_first_rule
from phalanx.data.string_array import join_strings, pack_strings
from phalanx.disk import expand_home
from phalanx.errors import ConfigError, DataError

_FINDINGS_SHOWN = 10
_SMALL_TABLE = 2**21  # bytes of a table of labels up to which all its images are checked
NO_VALID_SPLIT = "hold some out with --val-split 10%"


class FolderSource(IndexedSource):
    """Random access to image files, whose sizes must be as when they were indexed."""

    def read_encoded(self, index: int) -> bytes:
        """The bytes of the image's file; raises BadImage if it is gone or its size has changed."""
        data = super().read_encoded(index)
        size = int(self.index.sizes[index])
        if 0 <= size != len(data):  # below zero: it was a broken link when the folder was indexed
            why = f"has changed: {len(data):,} bytes, {size:,} when the folder was opened"
            raise BadImage(self.name(index), why)
        return data

    def find_resized(self) -> int | None:
        """The first image whose file is gone or has another size than in the index.

        A small dataset was checked when it was opened; of a large one only a sample was.
        """
        if len(self.index.files) <= SMALL_SET:  # the index of a subset still lists all files
            return None
        sizes = self.index.sizes
        return next((i for i in range(len(self)) if _read_size(self._path(i)) != sizes[i]), None)

    def _path(self, index: int) -> Path:
        return self.root / self.index.files[int(self.index.file_numbers[index])]


@dataclass(frozen=True, kw_only=True)
class _SplitPlan:
    """How the images of a split are found."""

    root: Path
    folder: Path  # contains the images
    key: str  # the name under which the index is stored
    marks: Snapshot  # what the index depends on besides the folder
    make_listing: Callable[[], Listing]
    rule: int
    by_class_folder: bool = True
    walks: bool = True  # all images below the folder are used; if False, a table names them
    tables: tuple[Path, ...] = ()  # other files that the index depends on


def open_folder(
    root: Path,
    split: str,
    layout: LayoutOptions = DEFAULT_LAYOUT,
    *,
    form: str = "folder",
    tables: Iterable[Path] = (),
    complete: Callable[[Index], Index] = lambda index: index,
) -> FolderSource:
    """One split of a data folder; DataError lists everything that is wrong with it.

    tables: files besides the images that the index depends on. complete: adds their contents to
    a new index.
    """
    plan = _make_plan(root, split, layout, form)
    plan = replace(plan, tables=(*plan.tables, *tables))
    return FolderSource(
        root, _open_index(plan, lambda: complete(_to_index(root, plan.make_listing())))
    )


def describe_layout(root: Path, layout: LayoutOptions = DEFAULT_LAYOUT) -> str:
    """A line on how a folder is read."""
    with convert_read_errors(root):
        if layout.labels is not None:
            table = _read_label_table(root, layout)
            return labels_file.describe_table(table, Path(layout.labels).name)
        found = _find_folders(root, layout)
        text = describe_split_folders(root, found)
        if layout.class_from is not None:
            how = "classes from the prefixes of file names"
            text = text.replace("with class folders", f"with {how}")
            return f"{how}, without splits" if found.flat else text
        if find_annotations(found.valid):
            return f"Tiny-ImageNet: {text.replace('class folders', 'folders of synsets')}"
        return text


def has_split(root: Path, split: str, layout: LayoutOptions) -> bool:
    """Whether a folder has a split."""
    with convert_read_errors(root):
        if layout.labels is not None:
            return split in _read_label_table(root, layout).splits
        return _find_folders(root, layout).find(split) is not None


# --- how the images of a split are found ---


def _make_plan(root: Path, split: str, layout: LayoutOptions, form: str) -> _SplitPlan:
    """How the images of a split are found; raises DataError if the folder lacks the split."""
    key = f"{form}-{split}{layout.key}"
    with convert_read_errors(root):
        if layout.labels is not None:
            return _plan_by_table(root, split, layout, key)
        folders = _find_folders(root, layout)
        folder = folders.find(split)
        if folder is None:
            raise DataError(_describe_missing(root, split, folders, layout))
        if layout.class_from is not None:
            return _plan_by_prefix(root, folders, layout, key, folder)
        return _plan_by_folder(root, folders, layout, key, folder)


def _find_folders(root: Path, layout: LayoutOptions) -> SplitFolders:
    found = find_split_folders(
        root,
        rule=layout.rule,
        valid_split=layout.valid_split,
        loose=layout.class_from is not None,
    )
    if found.flat and layout.scoring:
        return replace(found, train=None, valid=root, flat=False)
    return found


def _describe_missing(root: Path, split: str, found: SplitFolders, layout: LayoutOptions) -> str:
    names = ", ".join(f"{name}/" for name in list_folders(root)[:_FINDINGS_SHOWN])
    there = f"found {names}" if names else "it holds no folders"
    if split == "train":
        return (
            f"{root}: no training data ({there}); put images under train/CLASS/ and val/CLASS/, or "
            "just into class folders"
        )
    if found.flat and not names and layout.class_from is None:
        return (
            f"{root}: no class folders; give the folder that holds them, or give the classes with "
            "--labels FILE, or --class-from prefix for names such as cat.1.jpg"
        )
    unused = [name for name in found.unused_folders if list_folders(root / name)]
    other = f", or score {unused[0]}/ with --valid-split {unused[0]}" if unused else ""
    return f"{root}: no validation data ({there}); {NO_VALID_SPLIT}, or add val/CLASS/{other}"


def _plan_by_folder(
    root: Path, found: SplitFolders, layout: LayoutOptions, key: str, folder: Path
) -> _SplitPlan:
    annotations = find_annotations(found.valid) if folder == found.valid else None
    classes = _read_classes(found.train) if found.train else tuple(list_folders(folder))
    marks: Snapshot = [[folder.relative_to(root).as_posix(), *classes]]
    outside = count_outside_class_folders(root, folder) if layout.rule > 1 else Counter[str]()
    if outside:  # adding a file there changes the time of no class folder
        marks.append(["outside", *(f"{count} {why}" for why, count in sorted(outside.items()))])
    plan = _SplitPlan(
        root=root,
        folder=folder,
        key=key,
        marks=marks,
        make_listing=partial(
            list_by_folder, root, folder, classes, outside=outside, rule=layout.rule
        ),
        rule=layout.rule,
    )
    if annotations is None or layout.rule == 1:
        return plan
    make_listing = partial(_list_annotated, root, folder, annotations, classes)
    return replace(plan, make_listing=make_listing, by_class_folder=False, tables=(annotations,))


def _list_annotated(root: Path, folder: Path, table: Path, classes: tuple[str, ...]) -> Listing:
    """Tiny-ImageNet's validation images."""
    labels = parse_annotations(_read_text(table), table, prefix=relative_prefix(root, folder))
    unknown = sorted({*labels.values()} - {*classes})
    if unknown:
        raise DataError(
            f"{table}: the training data has no class {unknown[0]!r}; download both again"
        )
    return list_by_table(root, folder, labels, classes=classes, table=table)


def _plan_by_prefix(
    root: Path, found: SplitFolders, layout: LayoutOptions, key: str, folder: Path
) -> _SplitPlan:
    classes = None
    if found.train is not None and folder != found.train:
        classes = open_folder(root, "train", layout).classes
    return _SplitPlan(
        root=root,
        folder=folder,
        key=key,
        marks=[[folder.relative_to(root).as_posix(), *(classes or ())]],
        make_listing=partial(list_by_prefix, root, folder, classes, rule=layout.rule),
        rule=max(layout.rule, 2),
        by_class_folder=False,
    )


def _plan_by_table(root: Path, split: str, layout: LayoutOptions, key: str) -> _SplitPlan:
    path = _find_label_file(layout)
    status = path.stat()
    marks: Snapshot = [[str(path), status.st_size, status.st_mtime_ns]]
    if status.st_size <= _SMALL_TABLE:
        labels = _read_label_table(root, layout).splits.get(split, {})
        marks.append(["files", hash_files(root, sorted(labels))])

    def make_listing() -> Listing:
        table = _read_label_table(root, layout)
        if split not in table.splits:
            way_out = NO_VALID_SPLIT if split == "valid" else "mark some rows as train"
            what = {"train": "training", "valid": "validation"}[split]
            raise DataError(f"{path}: has no {what} rows; {way_out}")
        labels, classes = table.splits[split], table.classes
        others = {*table.unused_paths}.union(*(table.splits[n] for n in table.splits if n != split))
        found = list_by_table(root, root, labels, classes=classes, table=path, others=others)
        if split == "valid" and "train" in table.splits:
            found.ignored.clear()  # counted with the training images
        elif table.unused_paths:
            found.ignored[f"in unused rows of {path.name}"] += len(table.unused_paths)
        unknown = sorted({*labels.values()} - {*classes})
        found.findings += [f"{path}: no training row is of class {name!r}" for name in unknown]
        return found

    return _SplitPlan(
        root=root,
        folder=root,
        key=key,
        marks=marks,
        make_listing=make_listing,
        rule=layout.rule,
        walks=False,
    )


def _find_label_file(layout: LayoutOptions) -> Path:
    path = expand_home(layout.labels or "")
    if path.is_dir() or not path.exists():
        what = "is a folder" if path.is_dir() else "no such file"
        raise DataError(f"--labels {path}: {what}; expected CSV or JSON Lines with path and label")
    return path


def _read_label_table(root: Path, layout: LayoutOptions) -> labels_file.LabelTable:
    path = _find_label_file(layout)
    table = labels_file.parse_labels(
        _read_text(path), path, root=root, valid_split=layout.valid_split
    )
    if layout.scoring and "valid" not in table.splits:
        return replace(table, splits={"valid": table.splits["train"]})
    return table


def _read_text(path: Path) -> str:
    with convert_read_errors(path):
        content = read_data_file(path)
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text; save it as UTF-8") from None


def _read_classes(folder: Path) -> tuple[str, ...]:
    names = tuple(list_folders(folder))
    if len(names) < 2:
        found = f"only one class folder, {names[0]}/" if names else "no class folders"
        raise DataError(
            f"{folder}: has {found}; a classifier needs two. Put images into folders named after "
            "their classes (train/CLASS/ and val/CLASS/, or just CLASS/), or give their classes "
            "with --labels FILE, or --class-from prefix for names such as cat.1.jpg"
        )
    return names


# --- the first rule of --val-split, which older runs keep ---


def open_with_first_val_split(root: Path, split: str, *, share: float, seed: int) -> FolderSource:
    """One side of a folder as split by rule 1: each image at random, from its name and the seed."""
    if not 0 < share < 1:
        raise ConfigError(f"--val-split: expected a share between 0% and 100%, got {share:.0%}")
    with convert_read_errors(root):
        folders = find_split_folders(root, rule=1)
        if folders.valid is not None:
            raise ConfigError(
                f"--val-split: the data has a validation split, {folders.valid}; leave the "
                "option out"
            )
        folder, layout = folders.train or root, LayoutOptions(rule=1)
        plan = _plan_by_folder(root, folders, layout, f"split-{split}-{share:g}-{seed}", folder)
    start = len(relative_prefix(root, folder))  # names are hashed without it

    def build() -> Index:
        listing = plan.make_listing()
        for name, files in listing.images.items():
            short = [file[start:] for file in files]
            valid = choose_by_first_rule(short, share=share, seed=seed)
            listing.images[name] = [f for f in files if (f[start:] in valid) == (split == "valid")]
        if split == "valid":
            listing.ignored.clear()  # counted with the training images
        return _to_index(root, listing)

    return FolderSource(root, _open_index(plan, build))


# --- the index ---


def _open_index(plan: _SplitPlan, build: Callable[[], Index]) -> Index:
    """The index of a split: the stored one if nothing has changed, else a new one."""

    def take_snapshot(known: Snapshot | None) -> Snapshot:
        # which files are images; rule 1 had no choice
        rule = [["rule", plan.rule, *find_image_suffixes(plan.rule)]] if plan.rule > 1 else []
        rows = [*plan.marks, *rule]
        if plan.walks:
            by_class = plan.by_class_folder
            known = None if known is None else known[len(rows) : -1 - len(plan.tables)]
            rows += snapshot_folder(plan.folder, known, rule=plan.rule, by_class_folder=by_class)
        return [*rows, *snapshot_files(plan.root, plan.tables)]

    with convert_read_errors(plan.folder):
        return load_or_build_index(plan.root, plan.key, snapshot=take_snapshot, build=build)


def _to_index(root: Path, listing: Listing) -> Index:
    """The index of a listing, in the order of classes, then of paths."""
    if not listing.images and not listing.findings:
        listing.findings.append(f"{root}: no image was found")
    if listing.findings:
        raise DataError(_describe_findings(listing.findings))
    numbers = {name: number for number, name in enumerate(listing.classes)}
    paths, sizes, labels = [], [], []
    for name, files in listing.images.items():
        paths.append(pack_strings(files))
        sizes.append(np.array([_read_size(root / file) for file in files], np.int64))
        labels.append(np.full(len(files), numbers[name], np.int64))
    count = sum(map(len, labels))
    return Index(
        classes=listing.classes,
        files=join_strings(paths),
        file_numbers=np.arange(count, dtype=np.int32),
        offsets=np.zeros(count, np.int64),
        sizes=np.concatenate(sizes),
        labels=np.concatenate(labels),
        ignored=dict(listing.ignored),
    )


def _read_size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # a broken link is a bad image, which is reported when it is read
        return -1


def _describe_findings(findings: list[str]) -> str:
    shown = findings[:_FINDINGS_SHOWN]
    if len(findings) > len(shown):
        shown.append(f"and {len(findings) - len(shown)} more")
    return "\n".join([*shown, "add what is missing, rename these or remove them"])
