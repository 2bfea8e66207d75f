"""Every image of a set looked at: what is wrong, what lies there twice, and its manifest."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.data.convert.origin import TASK_IMAGES, Part, find_parts, make_tasks
from phalanx.data.formats.imagenet import SEQUENTIAL_FORMATS
from phalanx.data.process_pool import ProcessPool
from phalanx.data.verify.examine import (
    BIT,
    KINDS,
    OUT_OF_RANGE,
    Facts,
    Key,
    compare_pairs,
    empty_facts,
    examine_task,
)
from phalanx.data.verify.near_duplicates import find_near_duplicates, group_equal, group_pairs
from phalanx.errors import DataError
from phalanx.plan.machine import count_cores

_WORDS = {"train": "training", "valid": "validation"}
NOTES = ("greyscale",)  # worth knowing, not wrong
_UNSEEN = BIT["zero-size"] | BIT["undecodable"] | BIT["truncated"] | BIT[OUT_OF_RANGE]
EXACT, NEAR = "exact duplicates", "near duplicates"
SHARED, NEARLY_SHARED = "in both splits", "nearly the same in both splits"
MISSING = "class missing in a split"

_Tell = Callable[[str, int, int], None]  # split, images done, of how many


@dataclass(frozen=True)
class ImageLocation:
    """One image by its split and number, with its name, its class, and what is to be said of it."""

    split: str
    number: int
    name: str
    label: str
    why: str = ""


_Groups = dict[str, list[list[ImageLocation]]]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found in a set."""

    folder: str
    data: str
    images: dict[str, int]  # by split
    classes: tuple[str, ...]
    counts: dict[str, list[int]]  # by split, the images of each class
    single: dict[str, list[ImageLocation]]  # by kind, the images it is true of
    groups: _Groups  # by kind, images that are the same
    missing: list[str]  # a line for each class that a split does without
    manifest: str
    fingerprints: dict[str, Any]  # by split, of what was looked at

    @property
    def totals(self) -> dict[str, int]:
        """How often each kind was found."""
        found: dict[str, int] = {kind: len(places) for kind, places in self.single.items()}
        found |= {kind: len(groups) for kind, groups in self.groups.items()}
        return {**found, MISSING: len(self.missing)}

    @property
    def wrong(self) -> int:
        """How many things are wrong; notes do not count."""
        return sum(count for kind, count in self.totals.items() if kind not in NOTES)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "folder": self.folder,
            "data": self.data,
            "images": self.images,
            "manifest": self.manifest,
            "wrong": self.wrong,
            "totals": self.totals,
            "single": {kind: [vars(p) for p in places] for kind, places in self.single.items()},
            "groups": {
                kind: [[vars(place) for place in group] for group in groups]
                for kind, groups in self.groups.items()
            },
            "missing": self.missing,
            "classes": {
                name: {split: counts[label] for split, counts in self.counts.items()}
                for label, name in enumerate(self.classes)
            },
        }


def count_wrong(wrong: int) -> str:
    """How much is wrong, in words."""
    words = {0: "nothing is wrong", 1: "1 thing is wrong"}
    return words.get(wrong, f"{wrong:,} things are wrong")


def verify(root: Path, *, workers: int | None = None, tell: _Tell | None = None) -> Verdict:
    """Look at every image of both splits of the set in a folder."""
    parts = find_parts(root)
    handed = [part for part in parts if part.data in SEQUENTIAL_FORMATS]
    if handed:
        raise DataError(
            f"{root}: {handed[0].data} as it is handed out; `phalanx data build` looks at every "
            "image while it converts, verify what it writes"
        )
    images = sum(part.images for part in parts)
    wanted = count_cores() if workers is None else workers
    with ProcessPool(min(wanted, images // TASK_IMAGES)) as crew:
        facts = [_examine_part(part, crew, tell) for part in parts]
        groups = _find_groups(parts, facts, crew)
    return _judge(root, parts, facts, groups=groups)


def _examine_part(part: Part, crew: ProcessPool, tell: _Tell | None) -> Facts:
    """The facts of every image of a split."""
    whole, done = empty_facts(part.images), 0
    for facts in crew.map(examine_task, make_tasks(part, range(part.images))):
        rows = slice(done, done + len(facts.numbers))
        for name in ("numbers", "flags", "content", "lines", "outlines", "colours"):
            getattr(whole, name)[rows] = getattr(facts, name)
        whole.whys.update(facts.whys)
        done = rows.stop
        if tell is not None:
            tell(part.split, done, part.images)
    return whole


def _judge(root: Path, parts: list[Part], facts: list[Facts], *, groups: _Groups) -> Verdict:
    """What the facts of all splits mean together."""
    single = {kind: list(_flagged(parts, facts, kind)) for kind in KINDS}
    for part, each in zip(parts, facts, strict=True):
        single[OUT_OF_RANGE] += _strange_labels(part, each)
    counts = {part.split: _count_classes(part) for part in parts}
    return Verdict(
        folder=str(root),
        data=parts[0].data,
        images={part.split: part.images for part in parts},
        classes=parts[0].classes,
        counts=counts,
        single=single,
        groups=groups,
        missing=_missing_classes(parts[0].classes, counts),
        manifest=manifest_id(parts[0].classes, facts),
        fingerprints={part.split: part.source.fingerprint() for part in parts},
    )


def manifest_id(classes: tuple[str, ...], facts: list[Facts]) -> str:
    """The sha256 of the class names and of all images, whatever their order and form.

    An image counts by its split, the last part of its name, the sha256 of its bytes and its label.
    """
    lines = np.concatenate([each.lines for each in facts])
    digest = hashlib.sha256("\n".join(classes).encode(errors="surrogateescape") + b"\n")
    digest.update(lines[np.lexsort(lines.T[::-1])].tobytes())
    return digest.hexdigest()


def _place_of(part: Part, number: int, why: str = "") -> ImageLocation:
    """An image as a person finds it."""
    label = int(part.labels[number]) if part.labels is not None else -1
    named = part.classes[label] if 0 <= label < len(part.classes) else "no class"
    return ImageLocation(part.split, int(number), part.source.name(number), named, why)


def _flagged(parts: list[Part], facts: list[Facts], kind: str) -> Iterator[ImageLocation]:
    for part, each in zip(parts, facts, strict=True):
        for number in np.flatnonzero(each.flags & BIT[kind]):
            yield _place_of(part, int(number), each.whys.get((int(number), kind), ""))


# --- labels ---


def _strange_labels(part: Part, facts: Facts) -> Iterator[ImageLocation]:
    """Images of no known class, but for those that an index has set aside and told of."""
    assert part.labels is not None
    strange = (part.labels < 0) | (part.labels >= len(part.classes))
    for number in np.flatnonzero(strange & (facts.flags & _UNSEEN == 0)):
        told = f"label {part.labels[number]}, but there are {len(part.classes)} classes"
        yield _place_of(part, int(number), told)


def _count_classes(part: Part) -> list[int]:
    assert part.labels is not None
    known = part.labels[(part.labels >= 0) & (part.labels < len(part.classes))]
    return [int(count) for count in np.bincount(known, minlength=len(part.classes))]


def _missing_classes(classes: tuple[str, ...], counts: dict[str, list[int]]) -> list[str]:
    return [
        f"{classes[label]}: no {_WORDS[split]} image"
        for split, found in counts.items()
        for label, count in enumerate(found)
        if not count
    ]


# --- duplicates ---


def _find_groups(parts: list[Part], facts: list[Facts], crew: ProcessPool) -> _Groups:
    """Images that are the same, or nearly, in a split or across both."""
    starts = np.cumsum([0, *(part.images for part in parts)])
    seen = np.flatnonzero(np.concatenate([each.flags for each in facts]) & _UNSEEN == 0)
    content = np.concatenate([each.content for each in facts])[seen]
    outlines = np.concatenate([each.outlines for each in facts])[seen]
    colours = np.concatenate([each.colours for each in facts])[seen]
    twins = find_near_duplicates(outlines, colours)
    twins = twins[(content[twins[:, 0]] != content[twins[:, 1]]).any(axis=1)]
    near = _keep_close(parts, starts, seen[twins], crew)
    exact = [[int(seen[member]) for member in group] for group in group_equal(content)]
    found: _Groups = {EXACT: [], SHARED: [], NEAR: [], NEARLY_SHARED: []}
    for groups, inside, across in ((exact, EXACT, SHARED), (near, NEAR, NEARLY_SHARED)):
        for group in groups:
            places = [_place_of(*_locate(parts, starts, member)) for member in group]
            crossing = len({place.split for place in places}) > 1
            found[across if crossing else inside].append(_with_labels(places))
    return found


def _keep_close(
    parts: list[Part], starts: NDArray[np.int64], pairs: NDArray[np.int64], crew: ProcessPool
) -> list[list[int]]:
    """Groups of those images that are still alike when they are looked at again, larger."""
    keys: list[tuple[Key, Key]] = []
    for left, right in pairs:
        ends = [_locate(parts, starts, int(end)) for end in (left, right)]
        first, second = ((part.data, part.folder, part.split, number) for part, number in ends)
        keys.append((first, second))
    tasks = (keys[start : start + TASK_IMAGES] for start in range(0, len(keys), TASK_IMAGES))
    close = np.array([alike for some in crew.map(compare_pairs, tasks) for alike in some], bool)
    return group_pairs((int(left), int(right)) for left, right in pairs[close])


def _locate(parts: list[Part], starts: NDArray[np.int64], place: int) -> tuple[Part, int]:
    at = int(np.searchsorted(starts, place, side="right")) - 1
    return parts[at], place - int(starts[at])


def _with_labels(group: list[ImageLocation]) -> list[ImageLocation]:
    """The same images, which say so where their labels disagree."""
    if len({place.label for place in group}) == 1:
        return group
    return [replace(place, why="the same picture has another label") for place in group]
