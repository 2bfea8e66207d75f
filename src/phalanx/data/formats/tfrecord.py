"""ImageNet as TFRecord shards, train-00000-of-01024 and validation-00000-of-00128.

Every checksum is verified when the index is built; training then reads each JPEG with one call,
from its offset inside the record. A record with damaged data or an impossible label is one bad
image; so is the lost rest of a shard that is truncated, or damaged at the length of a record.
"""

import re
from pathlib import Path

from phalanx.data.formats.index import BAD_CHECKSUM, Box, IndexedSource, enclosing_box
from phalanx.data.formats.shards import (
    MAX_CLASSES,
    SHARD_PREFIX,
    ScannedImage,
    ShardFiles,
    ShardFormat,
    ShardScan,
    UnreadableShard,
    pack_scan,
    read_class_names,
    refuse_unusable,
)
from phalanx.data.formats.tfrecord_wire import (
    RECORD_HEADER,
    Field,
    Record,
    read_example,
    read_floats,
    read_integers,
    read_records,
    read_spans,
)
from phalanx.errors import DataError

SHARD_FILES = ShardFiles(r"-of-(?P<total>\d+)(?:\.tfrecords?)?")
LABELS_FILE = "labels.txt"
SHARDS = {"train": 1024, "valid": 128}
_FIRST_LABEL = 1
_MIN_INTEGER = -(2**63)
BOX_SIDES = ("xmin", "ymin", "xmax", "ymax")
_NUMBERED_LINE = re.compile(r"(\d+)[:\t](.+)")


def open_tfrecord(root: Path, split: str) -> IndexedSource:
    """One split of a dataset in shards; class names are from labels.txt, else from the records."""
    index = _FORMAT.open_index(root, split)
    if index is None:
        raise DataError(
            f"{root}: no shard such as {SHARD_PREFIX[split]}-00000-of-{SHARDS[split]:05}; point "
            "--data-dir at the folder with the TFRecord files"
        )
    index = _FORMAT.assign_classes(index, root, split, _read_labels(root / LABELS_FILE))
    source = IndexedSource(root, index, first_label=_FIRST_LABEL)
    refuse_unusable(source)
    return source


def _read_labels(path: Path) -> tuple[str, ...] | None:
    """The class names in labels.txt, as "name" or "0:name"; a background class is left out."""
    lines = read_class_names(path)
    matches = [_NUMBERED_LINE.fullmatch(line) for line in lines or ()]
    names = tuple(match[2].strip() for match in matches if match)
    if lines is None or len(names) < len(lines):
        return lines
    return names[1:] if names and names[0] in ("background", "dummy") else names


def number_labels(names: tuple[str, ...]) -> tuple[str, ...]:
    """The lines of labels.txt; with numbers if names such as "1:cat" would lose their own."""
    if not all(map(_NUMBERED_LINE.fullmatch, names)):
        return names
    return tuple(f"{number}:{name}" for number, name in enumerate(names))


def scan_shard(path: Path) -> ShardScan:
    """The images of one shard; the checksum of every record is verified."""
    images: list[ScannedImage] = []
    class_names: dict[int, str] = {}
    try:
        for number, record in enumerate(read_records(path)):
            where = f"{path}: record {number} at byte {record.begin:,}"
            if not record.intact:  # a bad image, which is reported when it is read
                name = f"record {number} at byte {record.begin - RECORD_HEADER:,}"
                images.append(
                    ScannedImage(name=name, offset=record.begin, size=BAD_CHECKSUM, label=0)
                )
                continue
            image, class_name = _read_record(record, where)
            images.append(image)
            if class_name and 0 <= image.label < MAX_CLASSES:
                _add_class_name(class_names, image.label, class_name, where)
    except UnreadableShard as error:
        images.append(error.to_image(path))
    return pack_scan(images, class_names)


def _add_class_name(known: dict[int, str], label: int, name: str, where: str) -> None:
    if known.setdefault(label, name) != name:
        raise DataError(
            f"{where}: calls class {label} {name!r}, but it was {known[label]!r} before"
        )


def _read_record(record: Record, where: str) -> tuple[ScannedImage, str]:
    """The image of one record, and the name of its class, or "" if it is not given."""
    data = record.data
    try:
        features = read_example(data)
        spans = read_spans(data, features.get("image/encoded"))
        labels = read_integers(data, features.get("image/class/label"))
        if len(spans) != 1 or len(labels) != 1:
            raise DataError(
                f"{where}: needs one image/encoded and one image/class/label, has {len(spans)} and "
                f"{len(labels)}; these are not ImageNet's keys"
            )
        begin, end = spans[0]
        image = ScannedImage(
            name=_read_text(data, features.get("image/filename")) or f"{record.begin}",
            offset=record.begin + begin,
            size=end - begin,
            label=max(labels[0] - _FIRST_LABEL, _MIN_INTEGER),
            box=_read_box(data, features),
        )
        synset = _read_text(data, features.get("image/class/synset"))
        return image, synset or _read_text(data, features.get("image/class/text"))
    except ValueError as cause:
        raise DataError(f"{where}: not an Example message ({cause}); is this ImageNet?") from None


def _read_text(data: bytes, values: Field | None) -> str:
    spans = read_spans(data, values)
    return data[slice(*spans[0])].decode(errors="surrogateescape") if spans else ""


def _read_box(data: bytes, features: dict[str, Field]) -> Box | None:
    columns = [read_floats(data, features.get(f"image/object/bbox/{side}")) for side in BOX_SIDES]
    if len({len(column) for column in columns}) > 1:
        raise ValueError("a box lacks a side")
    return enclosing_box(zip(*columns, strict=True)) if columns[0] else None


_FORMAT = ShardFormat(key="tfrecord", find=SHARD_FILES.find, scan=scan_shard)
