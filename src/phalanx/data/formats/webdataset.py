"""WebDataset shards: tar files train-000000.tar on, the files of one image named alike.

An image (jpg, jpeg, png) comes with its class as cls, a number in text, or inside json as "label"
or "cls"; json may also hold "bbox" (left, top, right, bottom in 0..1, or a list of such) and
"filename". Names of classes come from classes.txt beside the shards.
"""

import json
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from phalanx.data.formats.index import Index
from phalanx.data.formats.indexed_source import (
    DAMAGED_SHARD,
    NO_LABEL,
    TRUNCATED_SHARD,
    IndexedSource,
)
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
from phalanx.data.formats.tar_members import Member, read_members
from phalanx.errors import DataError

SHARD_FILES = ShardFiles(r"(?:-of-(?P<total>\d+))?\.tar")
CLASSES_FILE, METADATA = "classes.txt", "metadata.json"
_IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif")
_FACTS = ("cls", "json")
_FACTS_LIMIT = 2**20  # bytes of a cls or json member
_MOST_DIGITS = 18  # of a label: so many fit into the index
_TOLD_SHOWN = 40  # letters of a class that is no number

_Parts = dict[str, Member]  # the files of one image, by ending


def has_tar_shards(root: Path) -> bool:
    """Whether tar shards lie in the folder."""
    return SHARD_FILES.looks_like(root)


def open_tar(root: Path, split: str) -> IndexedSource:
    """One split of a set of tar shards."""
    index = _open_split(root, split)
    if index is None:
        raise DataError(
            f"{root}: no shard such as {SHARD_PREFIX[split]}-000000.tar; point --data-dir at the "
            "folder with the tar files"
        )
    metadata = _read_metadata(root / METADATA)
    promised = metadata.get(f"{SHARD_PREFIX[split]}_length")
    if isinstance(promised, int) and promised != len(index):
        raise DataError(
            f"{root / METADATA}: promises {promised:,} images where the shards of {split} hold "
            f"{len(index):,}{_describe_lost(index)}; fetch the shards that are missing"
        )
    listed = read_class_names(root / CLASSES_FILE) or tuple(map(str, metadata.get("classes") or ()))
    train = _open_split(root, "train") if split == "valid" and not listed else None
    if listed:
        index = assign_classes(index, listed)
    elif train is not None:
        index = assign_train_classes(index, train, where=root)
    source = IndexedSource(root, index)
    refuse_unusable(source)
    return source


def _describe_lost(index: Index) -> str:
    """Where the first shard that is cut off or damaged is so; empty where all are whole."""
    lost = np.flatnonzero(np.isin(index.sizes, (TRUNCATED_SHARD, DAMAGED_SHARD)))
    return f" ({index.name(int(lost[0]))} it is lost)" if len(lost) else ""


def _open_split(root: Path, split: str) -> Index | None:
    paths = SHARD_FILES.find(root, split)
    return open_shards(root, split, key="tar", paths=paths, scan=_scan_shard) if paths else None


def _read_metadata(path: Path) -> dict[str, Any]:
    """What metadata.json says, as some tools put it beside their shards; empty where it is not."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as cause:
        raise DataError(f"{path}: cannot be read ({cause}); mend or remove it") from None
    return found if isinstance(found, dict) else {}


def _scan_shard(path: Path) -> ShardScan:
    """Where the images of one shard lie."""
    groups: dict[str, _Parts] = {}
    rest: list[ScannedImage] = []
    with path.open("rb") as file:
        try:
            for member in read_members(file, path):
                _add_member(groups, member, path)
        except UnreadableShard as cut:
            rest = [lost_rest(cut)]
            groups = {key: parts for key, parts in groups.items() if _is_whole(parts)}
        found = [_find_image(file, path, key, parts) for key, parts in groups.items()]
    return pack_scan(found + rest)


def _add_member(groups: dict[str, _Parts], member: Member, path: Path) -> None:
    """Put a file to those of its image."""
    folder, slash, base = member.name.rpartition("/")
    stem, _, ending = base.partition(".")
    if not stem:
        return  # ._files of another system's tar
    parts = groups.setdefault(f"{folder}{slash}{stem}", {})
    ending = ending.lower().rpartition(".")[2]
    if ending in parts:
        raise DataError(f"{path}: member {member.name!r} comes twice; write the file anew")
    parts[ending] = member


def _is_whole(parts: _Parts) -> bool:
    """Whether an image and its class came before the shard broke off."""
    return any(ending in parts for ending in _IMAGES) and not parts.keys().isdisjoint(_FACTS)


def _find_image(file: BinaryIO, path: Path, key: str, parts: _Parts) -> ScannedImage:
    where = f"{path}: sample {key!r}"
    image = next((parts[ending] for ending in _IMAGES if ending in parts), None)
    if image is None:
        has = ", ".join(sorted(parts))
        raise DataError(f"{where}: has no image, only {has}; {', '.join(_IMAGES)} can be read")
    facts = _read_json(file, parts["json"], where) if "json" in parts else {}
    told = facts.get("label", facts.get("cls"))
    if "cls" in parts:
        told = _read_small(file, parts["cls"], where).decode(errors="replace").strip()
    name, label = str(facts.get("filename") or image.name), _read_label(told)
    return ScannedImage(
        name=name if label is not None else f"{name} (class {told!r:.{_TOLD_SHOWN}})",
        offset=image.offset,
        size=NO_LABEL if label is None else size_or_fault(image.size, label),
        label=-1 if label is None else label,
        box=_read_box(facts.get("bbox"), where),
    )


def _read_label(told: Any) -> int | None:
    """The number of a class; None for what is no whole number, or one beyond all measure."""
    digits = str(told).removeprefix("-")
    return int(str(told)) if digits.isdecimal() and len(digits) <= _MOST_DIGITS else None


def _read_json(file: BinaryIO, member: Member, where: str) -> dict[str, Any]:
    try:
        facts = json.loads(_read_small(file, member, where))
    except ValueError:
        raise DataError(f"{where}: its json cannot be read; write the file anew") from None
    return facts if isinstance(facts, dict) else {"label": facts}


def _read_small(file: BinaryIO, member: Member, where: str) -> bytes:
    if member.size > _FACTS_LIMIT:
        raise DataError(f"{where}: {member.name!r} has {member.size:,} bytes, too long for facts")
    file.seek(member.offset)
    return file.read(member.size)


def _read_box(found: Any, where: str) -> tuple[float, float, float, float] | None:
    if not found:
        return None
    try:
        boxes = found if isinstance(found[0], list) else [found]
        return enclosing_box(
            [[float(left), float(t), float(r), float(b)] for left, t, r, b in boxes]
        )
    except (TypeError, ValueError, KeyError):
        raise DataError(f"{where}: its bbox is {found!r}, wants left, top, right, bottom") from None
