"""The forms that data can be built into: how each is written, gone on with and taken away."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phalanx.data.convert.folder_writer import (
    boxes_path,
    growing_folder,
    note_path,
    split_folder,
    write_folder,
    written_folder,
)
from phalanx.data.convert.packed_index import journal_path, part_path
from phalanx.data.convert.packed_index import note_path as packed_note
from phalanx.data.convert.packed_writer import PackedForm, write_packed, written_packed
from phalanx.data.convert.sample import Sample
from phalanx.data.formats.packed import packed_path
from phalanx.data.formats.shards import SHARD_PREFIX
from phalanx.data.formats.tfrecord import SHARDS, write_tfrecord, written_tfrecord
from phalanx.data.formats.webdataset import METADATA, SHARD_IMAGES, write_tar, written_tar
from phalanx.disk import write_atomically


@dataclass(frozen=True, kw_only=True)
class WriteJob:
    """One split on its way into a form."""

    out: Path
    split: str
    count: int
    classes: tuple[str, ...]
    fingerprint: dict[str, Any]
    shards: int | None = None
    short_side: int | None = None
    raw: bool = False
    numbered: bool = False
    lengths: dict[str, int]  # images of every split


@dataclass(frozen=True, kw_only=True)
class _OutputFormat:
    """A form that can be written."""

    any_form: bool  # whether images may lie in it as they come, or only as plain JPEG
    has_shards: bool
    written: Callable[[WriteJob], int]  # how many images need not be written again
    is_whole: Callable[[WriteJob], bool]
    write: Callable[[Iterator[Sample], WriteJob, int], None]  # from a number on
    files: Callable[[Path, str], list[Path]]  # all it has written for a split


def take_away(target: _OutputFormat, out: Path, split: str) -> None:
    """Remove what was written for a split."""
    for path in target.files(out, split):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


# --- TFRecord ---


def _record_shards(leg: WriteJob) -> int | None:
    """So many shards; validation gets its usual share of what training has."""
    if leg.shards is None or leg.split == "train":
        return leg.shards
    return max(1, leg.shards * SHARDS["valid"] // SHARDS["train"])


def _written_records(leg: WriteJob) -> int:
    return written_tfrecord(leg.out, leg.split, count=leg.count, shards=_record_shards(leg))


def _write_records(samples: Iterator[Sample], leg: WriteJob, start: int) -> None:
    write_tfrecord(
        samples,
        leg.out,
        leg.split,
        count=leg.count,
        classes=leg.classes,
        shards=_record_shards(leg),
        start=start,
    )


# --- tar ---


def _shard_images(leg: WriteJob) -> int:
    return SHARD_IMAGES if leg.shards is None else max(1, -(-leg.count // leg.shards))


def _written_tar(leg: WriteJob) -> int:
    return written_tar(leg.out, leg.split, count=leg.count, shard_images=_shard_images(leg))


def _write_tar(samples: Iterator[Sample], leg: WriteJob, start: int) -> None:
    promised = {f"{SHARD_PREFIX[split]}_length": images for split, images in leg.lengths.items()}
    text = "".join(f'  "{name}": {images}' + ",\n" for name, images in sorted(promised.items()))
    # the reader refuses shards that are fewer than was promised: a build that broke off
    write_atomically(leg.out / METADATA, "{\n" + text.removesuffix(",\n") + "\n}\n")
    write_tar(
        samples,
        leg.out,
        leg.split,
        count=leg.count,
        classes=leg.classes,
        shard_images=_shard_images(leg),
        start=start,
    )


# --- packed ---


def _packed_form(leg: WriteJob) -> PackedForm:
    encoding: Literal["jpeg", "raw"] = "raw" if leg.raw else "jpeg"
    return PackedForm(encoding=encoding, short_side=leg.short_side, source=leg.fingerprint)


def _written_packed(leg: WriteJob) -> int:
    form = _packed_form(leg)
    return written_packed(leg.out, leg.split, count=leg.count, classes=leg.classes, form=form)


def _write_packed(samples: Iterator[Sample], leg: WriteJob, start: int) -> None:
    write_packed(
        samples,
        leg.out,
        leg.split,
        count=leg.count,
        classes=leg.classes,
        form=_packed_form(leg),
        start=start,
    )


# --- folder ---


def _write_folder(samples: Iterator[Sample], leg: WriteJob, start: int) -> None:
    write_folder(
        samples,
        leg.out,
        leg.split,
        count=leg.count,
        classes=leg.classes,
        numbered=leg.numbered,
        start=start,
    )


OUTPUT_FORMATS: dict[str, _OutputFormat] = {
    "folder": _OutputFormat(
        any_form=True,
        has_shards=False,
        written=lambda leg: written_folder(leg.out, leg.split, count=leg.count),
        is_whole=lambda leg: split_folder(leg.out, leg.split).is_dir(),
        write=_write_folder,
        files=lambda out, split: [
            place(out, split)
            for place in (note_path, boxes_path, growing_folder, split_folder)
            if place(out, split).exists()
        ],
    ),
    "tar": _OutputFormat(
        any_form=True,
        has_shards=True,
        written=_written_tar,
        is_whole=lambda leg: _written_tar(leg) == leg.count,
        write=_write_tar,
        files=lambda out, split: sorted(out.glob(f"{SHARD_PREFIX[split]}-*.tar")),
    ),
    "tfrecord": _OutputFormat(
        any_form=False,
        has_shards=True,
        written=_written_records,
        is_whole=lambda leg: _written_records(leg) == leg.count,
        write=_write_records,
        files=lambda out, split: sorted(out.glob(f"{SHARD_PREFIX[split]}-*-of-*")),
    ),
    "packed": _OutputFormat(
        any_form=False,
        has_shards=False,
        written=_written_packed,
        is_whole=lambda leg: packed_path(leg.out, leg.split).is_file(),
        write=_write_packed,
        files=lambda out, split: [
            place(out, split)
            for place in (packed_note, journal_path, part_path, packed_path)
            if place(out, split).exists()
        ],
    ),
}
