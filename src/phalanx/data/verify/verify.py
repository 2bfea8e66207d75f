"""Checks every image of a dataset: errors, duplicates and the manifest."""

import hashlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.data.convert.source_splits import (
    DEFAULT_SOURCE_OPTIONS,
    TASK_IMAGES,
    OnProgress,
    SourceOptions,
    SourceSplit,
    choose_workers,
    find_source_splits,
    make_tasks,
)
from phalanx.data.formats.detect import count_ignored, describe_data_layout
from phalanx.data.formats.imagenet import SEQUENTIAL_FORMATS
from phalanx.data.process_pool import ProcessPool
from phalanx.data.verify.image_checks import (
    CHECK,
    KIND_BITS,
    KINDS,
    OUT_OF_RANGE,
    TURNED,
    Checks,
    ImageKey,
    Reasons,
    check_task,
    compare_pairs,
)
from phalanx.data.verify.near_duplicates import find_near_duplicates, group_equal, group_pairs
from phalanx.errors import DataError

_ADJECTIVES = {"train": "training", "valid": "validation"}
NOTE_KINDS = ("greyscale", TURNED)  # worth knowing, but not errors
_UNUSABLE = sum(KIND_BITS[kind] for kind in ("zero-size", "undecodable", "truncated", OUT_OF_RANGE))
EXACT_DUPLICATES, NEAR_DUPLICATES = "exact duplicates", "near duplicates"
IN_BOTH_SPLITS, NEARLY_IN_BOTH_SPLITS = "in both splits", "nearly the same in both splits"
MISSING_CLASS = "class missing in a split"
_JSON_KEYS = (
    *("folder", "data", "images", "manifest", "wrong", "totals"),
    *("single", "groups", "missing", "classes", "layout", "ignored"),
)


@dataclass(frozen=True)
class ImageLocation:
    """One image by split and number, with its name, its class, and what was found."""

    split: str
    number: int
    name: str
    label: str
    why: str


_Groups = dict[str, list[list[ImageLocation]]]


@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """What was found in a dataset."""

    folder: str
    data: str
    images: dict[str, int]  # by split
    classes: tuple[str, ...]
    counts: dict[str, list[int]]  # by split, the images of each class
    single: dict[str, list[ImageLocation]]  # images by kind of finding
    groups: _Groups  # groups of duplicates, by kind
    missing: list[str]  # a line for each class without images in a split
    manifest: str
    fingerprints: dict[str, Any]  # by split, of what was checked
    layout: str  # how the folder was read
    ignored: dict[str, int]  # files that were not read, by reason

    @property
    def totals(self) -> dict[str, int]:
        """How often each kind was found."""
        found = {kind: len(images) for kind, images in self.single.items()}
        found |= {kind: len(groups) for kind, groups in self.groups.items()}
        return {**found, MISSING_CLASS: len(self.missing)}

    @property
    def wrong(self) -> int:
        """The number of problems; notes do not count."""
        return sum(count for kind, count in self.totals.items() if kind not in NOTE_KINDS)

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values."""
        values = asdict(self) | {"wrong": self.wrong, "totals": self.totals}
        values["classes"] = {
            name: {split: counts[label] for split, counts in self.counts.items()}
            for label, name in enumerate(self.classes)
        }
        return {key: values[key] for key in _JSON_KEYS}


def describe_problems(wrong: int) -> str:
    """The number of problems, in words."""
    words = {0: "no problems found", 1: "1 problem found"}
    return words.get(wrong, f"{wrong:,} problems found")


def verify_dataset(
    root: Path,
    *,
    source_options: SourceOptions = DEFAULT_SOURCE_OPTIONS,
    workers: int | None = None,
    on_progress: OnProgress = lambda *_: None,
) -> VerifyResult:
    """Check every image of both splits of the dataset in a folder."""
    splits = find_source_splits(root, source_options)
    data, classes = splits[0].data, splits[0].classes
    if data in SEQUENTIAL_FORMATS:
        raise DataError(
            f"{root}: {data} as it is distributed; `phalanx data build` checks every image as it "
            "converts, then verify what it writes"
        )
    all_images = _AllImages(splits)
    with ProcessPool(choose_workers(splits, workers)) as pool:
        checks, reasons = _check_images(splits, pool, on_progress)
        groups = _find_groups(all_images, checks, pool)
    counts = _count_usable(splits, checks["flags"])
    return VerifyResult(
        folder=str(root),
        data=data,
        images={split.name: split.images for split in splits},
        classes=classes,
        counts=counts,
        single=_find_single(all_images, checks["flags"], reasons),
        groups=groups,
        missing=[
            f"{classes[label]}: no {_ADJECTIVES[split]} image"
            for split, found in counts.items()
            for label, count in enumerate(found)
            if not count
        ],
        manifest=compute_manifest(classes, checks["identity"]),
        fingerprints={split.name: split.source.fingerprint() for split in splits},
        layout=describe_data_layout(data, splits[0].folder, source_options.layout),
        ignored=count_ignored(split.source for split in splits),
    )


class _AllImages:
    """The images of all splits, numbered consecutively."""

    def __init__(self, splits: list[SourceSplit]):
        self.splits, self.classes = splits, splits[0].classes
        self.labels = np.concatenate([split.source.labels for split in splits])

    def find(self, row: int) -> tuple[SourceSplit, int]:
        """The split of an image, and its number there."""
        for split in self.splits:
            if row < split.images:
                return split, row
            row -= split.images
        raise IndexError(row)

    def locate(self, row: int, why: str = "") -> ImageLocation:
        """The location of an image, by which the user can find it."""
        (split, number), label = self.find(row), int(self.labels[row])
        class_name = self.classes[label] if 0 <= label < len(self.classes) else "no class"
        return ImageLocation(split.name, number, split.source.name(number), class_name, why)


def _check_images(
    splits: list[SourceSplit], pool: ProcessPool, on_progress: OnProgress
) -> tuple[Checks, Reasons]:
    """The checks of every image of all splits."""
    checks, reasons, row = np.zeros(sum(split.images for split in splits), CHECK), Reasons(), 0
    for split in splits:
        start = row
        for some, why in pool.map(check_task, make_tasks(split, range(split.images))):
            checks[row : row + len(some)] = some
            reasons |= {(row + place, kind): reason for (place, kind), reason in why.items()}
            row += len(some)
            on_progress(split.name, row - start, split.images)
    return checks, reasons


def _count_usable(splits: list[SourceSplit], flags: NDArray[np.uint16]) -> dict[str, list[int]]:
    """The number of images of each class in each split, without those that cannot be read."""
    ends = np.cumsum([split.images for split in splits])
    unusable = [np.flatnonzero(some & _UNUSABLE) for some in np.split(flags, ends[:-1])]
    return {
        split.name: split.count_classes(bad.tolist()).tolist()
        for split, bad in zip(splits, unusable, strict=True)
    }


def compute_manifest(classes: tuple[str, ...], identities: NDArray[np.uint8]) -> str:
    """The sha256 of the class names and all images, independent of their order and format.

    Of an image, its split, the last part of its name, the sha256 of its bytes and its label count.
    """
    digest = hashlib.sha256("\n".join(classes).encode(errors="surrogateescape") + b"\n")
    digest.update(identities[np.lexsort(identities.T[::-1])].tobytes())
    return digest.hexdigest()


def _find_single(
    all_images: _AllImages, flags: NDArray[np.uint16], reasons: Reasons
) -> dict[str, list[ImageLocation]]:
    """The images by kind of finding."""
    found = {
        kind: [
            all_images.locate(int(row), reasons.get((int(row), kind), ""))
            for row in np.flatnonzero(flags & KIND_BITS[kind])
        ]
        for kind in KINDS
    }
    unknown = (all_images.labels < 0) | (all_images.labels >= len(all_images.classes))
    for row in np.flatnonzero(unknown & (flags & _UNUSABLE == 0)):
        why = f"label {all_images.labels[row]}, but there are {len(all_images.classes)} classes"
        found[OUT_OF_RANGE].append(all_images.locate(int(row), why))
    return found


# --- duplicates ---


def _find_groups(all_images: _AllImages, checks: Checks, pool: ProcessPool) -> _Groups:
    """Images that are the same, or nearly, in a split or across both."""
    usable = np.flatnonzero(checks["flags"] & _UNUSABLE == 0)
    content = checks["content"][usable]
    pairs = find_near_duplicates(checks["hash"][usable], checks["thumbnail"][usable])
    pairs = pairs[(content[pairs[:, 0]] != content[pairs[:, 1]]).any(axis=1)]
    near = _group_same_pictures(all_images, usable[pairs], pool)
    exact = [[int(usable[place]) for place in group] for group in group_equal(content)]
    found: _Groups = {
        EXACT_DUPLICATES: [],
        IN_BOTH_SPLITS: [],
        NEAR_DUPLICATES: [],
        NEARLY_IN_BOTH_SPLITS: [],
    }
    for groups, inside, across in (
        (exact, EXACT_DUPLICATES, IN_BOTH_SPLITS),
        (near, NEAR_DUPLICATES, NEARLY_IN_BOTH_SPLITS),
    ):
        for group in groups:
            images = [all_images.locate(row) for row in group]
            if len({image.label for image in images}) > 1:
                why = "the same picture has another label"
                images = [replace(image, why=why) for image in images]
            is_shared = len({image.split for image in images}) > 1
            found[across if is_shared else inside].append(images)
    return found


def _group_same_pictures(
    all_images: _AllImages, pairs: NDArray[np.int64], pool: ProcessPool
) -> list[list[int]]:
    """Groups of images with similar hashes that are still similar at a larger size."""

    def make_key(row: int) -> ImageKey:
        split, number = all_images.find(row)
        return split.key, number

    keys = [(make_key(int(left)), make_key(int(right))) for left, right in pairs]
    tasks = (keys[start : start + TASK_IMAGES] for start in range(0, len(keys), TASK_IMAGES))
    same = np.array([answer for some in pool.map(compare_pairs, tasks) for answer in some], bool)
    return group_pairs((int(left), int(right)) for left, right in pairs[same])
