"""ImageNet as TFRecord shards, train-00000-of-01024 and validation-00000-of-00128.

Every checksum is verified when the index is built; training then reads each JPEG with one call,
from the place it has inside its record. A record whose data is damaged, or whose label no class
has, is one bad image; so is all that is lost of a shard that is cut off, or damaged where it tells
a length.
"""

import re
from pathlib import Path
from typing import Any

from phalanx.data.formats.index import Index
from phalanx.data.formats.indexed_source import BAD_CHECKSUM, IndexedSource
from phalanx.data.formats.record_framing import RECORD_HEADER, Record, read_records
from phalanx.data.formats.shards import (
    SHARD_PREFIX,
    ScannedImage,
    ShardFiles,
    ShardScan,
    UnreadableShard,
    assign_classes,
    assign_train_classes,
    enclosing_box,
    lost_rest,
    open_shards,
    pack_scan,
    read_class_names,
    refuse_unusable,
    size_or_fault,
)
from phalanx.data.formats.tf_example import (
    Feature,
    read_example,
    read_floats,
    read_integers,
    read_spans,
)
from phalanx.errors import DataError

SHARD_FILES = ShardFiles(r"-of-(?P<total>\d+)(?:\.tfrecords?)?")
LABELS_FILE = "labels.txt"
SHARDS = {"train": 1024, "valid": 128}
_FIRST_LABEL = 1
_LEAST_INTEGER = -(2**63)
BOX_SIDES = ("xmin", "ymin", "xmax", "ymax")
_NUMBERED_LINE = re.compile(r"(\d+)[:\t](.+)")


def has_tfrecord_shards(root: Path) -> bool:
    """Whether TFRecord shards lie in the folder."""
    return SHARD_FILES.looks_like(root)


def open_tfrecord(root: Path, split: str) -> IndexedSource:
    """One split of a set of shards; classes are named by labels.txt, else by the records."""
    index = _open_split(root, split)
    if index is None:
        raise DataError(
            f"{root}: no shard such as {SHARD_PREFIX[split]}-00000-of-{SHARDS[split]:05}; point "
            "--data-dir at the folder with the TFRecord files"
        )
    listed = _read_labels(root / LABELS_FILE)
    train = _open_split(root, "train") if split == "valid" and listed is None else None
    if listed is not None:
        index = assign_classes(index, listed)
    elif train is not None:
        index = assign_train_classes(index, train, where=root)
    source = IndexedSource(root, index, first_label=_FIRST_LABEL)
    refuse_unusable(source)
    return source


def _open_split(root: Path, split: str) -> Index | None:
    paths = SHARD_FILES.find(root, split)
    return open_shards(root, split, key="tfrecord", paths=paths, scan=scan_shard) if paths else None


def _read_labels(path: Path) -> tuple[str, ...] | None:
    """The class names in labels.txt, plain or as "0:name"; a background class is left out."""
    lines = read_class_names(path)
    matches = [_NUMBERED_LINE.fullmatch(line) for line in lines or ()]
    found = [match for match in matches if match is not None]
    if lines is None or len(found) < len(lines):
        return lines
    names = tuple(match[2].strip() for match in found)
    return names[1:] if names and names[0] in ("background", "dummy") else names


def scan_shard(path: Path) -> ShardScan:
    """Where the images of one shard lie; every record is checked."""
    images: list[ScannedImage] = []
    titles: dict[int, str] = {}
    try:
        for number, record in enumerate(read_records(path)):
            images.append(_scan_record(record, number, path, titles))
    except UnreadableShard as cut:
        images.append(lost_rest(cut))
    return pack_scan(images, titles)


def _scan_record(record: Record, number: int, path: Path, titles: dict[int, str]) -> ScannedImage:
    """The image of one record, whose class is added to the titles."""
    where = f"{path}: record {number} at byte {record.begin:,}"
    if not record.intact:  # one image is lost, and is named when it is its turn
        name = f"record {number} at byte {record.begin - RECORD_HEADER:,}"
        return ScannedImage(name=name, offset=record.begin, size=BAD_CHECKSUM, label=0)
    try:
        image, title = _find_image(record.data, record.begin, where)
    except ValueError as cause:
        raise DataError(f"{where}: no Example message ({cause}); is this ImageNet?") from None
    if title and image.size >= 0 and titles.setdefault(image.label, title) != title:
        known = titles[image.label]
        raise DataError(f"{where}: calls class {image.label} {title!r}, before {known!r}")
    return image


def _find_image(data: bytes, begin: int, where: str) -> tuple[ScannedImage, str]:
    """The image of one record and the name of its class, empty where it is not told."""
    features = read_example(data)
    spans = read_spans(data, features.get("image/encoded"))
    labels = read_integers(data, features.get("image/class/label"))
    if len(spans) != 1 or len(labels) != 1:
        raise DataError(
            f"{where}: needs one image/encoded and one image/class/label, has {len(spans)} and "
            f"{len(labels)}; these are not ImageNet's keys"
        )
    first, last = spans[0]
    label = max(labels[0] - _FIRST_LABEL, _LEAST_INTEGER)
    found = ScannedImage(
        name=_read_text(data, features.get("image/filename")) or f"{begin}",
        offset=begin + first,
        size=size_or_fault(last - first, label),
        label=label,
        box=_read_box(data, features),
    )
    title = _read_text(data, features.get("image/class/synset"))
    return found, title or _read_text(data, features.get("image/class/text"))


def _read_text(data: bytes, feature: Feature | None) -> str:
    spans = read_spans(data, feature)
    return data[slice(*spans[0])].decode(errors="surrogateescape") if spans else ""


def _read_box(data: bytes, features: dict[str, Any]) -> tuple[float, float, float, float] | None:
    columns = [read_floats(data, features.get(f"image/object/bbox/{side}")) for side in BOX_SIDES]
    if len({len(column) for column in columns}) > 1:
        raise ValueError("a box lacks a side")
    return enclosing_box(zip(*columns, strict=True))
