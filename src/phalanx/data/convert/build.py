"""Converts a dataset to another format: on all cores, in index order, the same bytes every time.

What is being built in a folder is recorded in .phalanx/build.json there, with the fingerprint of
the source. The same command continues where it stopped; another one is refused, and so is a source
whose files have changed since: images that are done would not be read again.
"""

import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.data.convert.folder_writer import FolderWriter, has_name_clash, refuse_missing_classes
from phalanx.data.convert.packed_writer import PackedWriter
from phalanx.data.convert.parquet_writer import ParquetWriter
from phalanx.data.convert.sample import EncodeOptions, Sample, convert_sample
from phalanx.data.convert.shard_writers import TarWriter, TFRecordWriter
from phalanx.data.convert.source_splits import (
    DEFAULT_SOURCE_OPTIONS,
    ImageTask,
    OnProgress,
    SourceOptions,
    SourceSplit,
    choose_workers,
    find_source_splits,
    make_tasks,
    open_once,
    read_sample,
)
from phalanx.data.convert.writer import ShardWriter
from phalanx.data.formats.decode import BadImage
from phalanx.data.formats.image_file import DEFAULT_LIMITS
from phalanx.data.formats.imagenet import SEQUENTIAL_FORMATS
from phalanx.data.formats.index import PHALANX_FOLDER
from phalanx.data.formats.sources import refuse_output_in_data
from phalanx.data.process_pool import ProcessPool
from phalanx.disk import convert_out_errors, file_lock, write_atomically
from phalanx.errors import ConfigError, DataError, suggest
from phalanx.plan.plan import LEAST_MAX_BAD
from phalanx.units import parse_share

OUTPUT_FORMATS: dict[str, type[ShardWriter]] = {
    "folder": FolderWriter,
    "tar": TarWriter,
    "tfrecord": TFRecordWriter,
    "parquet": ParquetWriter,
    "packed": PackedWriter,
}
_RECORD = "build.json"
_RECORD_FORMAT = 2  # raise it when what is written for the same options changes
_QUALITY, _SHRUNK_QUALITY = 95, 90
_BAD_SHOWN = 5
_IMAGES_MEASURED = 64  # of a split, to estimate the size of its shards
_ANOTHER = "choose another --out, or remove this folder to start over"
_AGAIN = "then run the same command again; it continues where it stopped"

_BadImages = dict[int, str]  # what is wrong, by number of the image


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """The options of a build."""

    to: str
    short_side: int | None = None
    quality: int | None = None
    shards: int | None = None
    shard_mib: int | None = None
    raw: bool = False

    def __post_init__(self) -> None:
        if self.to not in OUTPUT_FORMATS:
            raise ConfigError(
                f"--to: no such format {self.to!r}; {suggest(self.to, OUTPUT_FORMATS)}"
            )
        writer = OUTPUT_FORMATS[self.to]
        if self.raw and self.to != "packed":
            raise ConfigError(f"--raw: only --to packed can hold raw pixels, not {self.to}")
        asked = {"--shards": self.shards, "--shard-mib": self.shard_mib}
        given = [flag for flag, value in asked.items() if value is not None]
        if given and not writer.takes_shards:
            raise ConfigError(f"{given[0]}: --to {self.to} writes no shards; leave the option out")
        if len(given) == 2:
            raise ConfigError("give --shards or --shard-mib, not both")
        encodes = self.short_side is not None or (writer.only_jpeg and not self.raw)
        if self.quality is not None and not encodes:
            raise ConfigError(
                f"--quality: --to {self.to} re-encodes nothing without --short-side; give both or "
                "neither"
            )

    @property
    def encoding(self) -> EncodeOptions:
        """How each image is stored."""
        default = _QUALITY if self.short_side is None else _SHRUNK_QUALITY
        return EncodeOptions(
            only_jpeg=OUTPUT_FORMATS[self.to].only_jpeg,
            short_side=self.short_side,
            quality=self.quality or default,
            raw=self.raw,
        )


@dataclass(kw_only=True)
class _SplitResult:
    """What a build has done for one split."""

    images: int
    written: int = 0  # by this command; the others were there already
    encoded: int = 0  # of those, how many were not copied byte for byte
    bad: list[str]


class _BadImagesFound(Exception):
    """Images turned out to be bad after they were announced to the writer."""

    def __init__(self, bad: _BadImages):
        super().__init__(len(bad))
        self.bad = bad


def build_dataset(
    src: Path,
    out: Path,
    options: BuildOptions,
    *,
    source_options: SourceOptions = DEFAULT_SOURCE_OPTIONS,
    max_bad: str | None = None,
    workers: int | None = None,
    on_progress: OnProgress = lambda *_: None,
) -> dict[str, _SplitResult]:
    """Write the data in `src` to `out` in another format; returns what was done by split."""
    with convert_out_errors(out, _AGAIN):
        _refuse_foreign(out)
    splits = find_source_splits(src, source_options)
    for split in splits:
        layout = source_options.layout
        refuse_output_in_data(out, "--out", data=split.data, root=split.folder, layout=layout)
    pool = ProcessPool(choose_workers(splits, workers))
    with convert_out_errors(out, _AGAIN), lock_output(out), pool:
        for folder in (out, out / PHALANX_FOLDER):
            for leftover in folder.glob(".*.*.part"):  # from a killed process
                leftover.unlink()
        record = _open_record(
            out, splits, {**asdict(options), **_list_changed_source_options(source_options)}
        )
        running = _Build(splits, out, options, pool, record, max_bad, on_progress)
        return {split.name: running.build_split(split) for split in splits}


# --- the record ---


def _refuse_foreign(out: Path) -> None:
    """Raise DataError if `out` contains anything that was not written by a build."""
    if not out.exists() or (out / PHALANX_FOLDER / _RECORD).is_file():
        return
    if not out.is_dir():
        raise DataError(f"{out}: is a file, not a folder; choose another --out")
    others = sorted(entry.name for entry in out.iterdir() if entry.name != PHALANX_FOLDER)
    if others:
        names = ", ".join(others[:3])
        raise DataError(f"{out}: is not empty ({names}) and has no build in it; {_ANOTHER}")


def _list_changed_source_options(source_options: SourceOptions) -> dict[str, Any]:
    """The options of reading that are not the default; older records have none of them."""
    usual, limits = asdict(DEFAULT_LIMITS), asdict(source_options.limits)
    layout, val_split = source_options.layout, source_options.val_split
    options = {
        "val_split": val_split and val_split.wanted,
        "valid_split": layout.valid_split,
        "class_from": layout.class_from,
        "labels": layout.labels and Path(layout.labels).name,
    }
    return {name: value for name, value in limits.items() if value != usual[name]} | {
        name: value for name, value in options.items() if value is not None
    }


def _open_record(out: Path, splits: list[SourceSplit], options: dict[str, Any]) -> dict[str, Any]:
    """The record of this build, old or new; DataError if another build wrote to the folder."""
    path = out / PHALANX_FOLDER / _RECORD
    wanted = {
        "format": _RECORD_FORMAT,
        "options": options,
        "source": {split.name: {"data": split.data, **split.fingerprint} for split in splits},
        "file_times": {split.name: split.file_times for split in splits},
    }
    try:
        found = json.loads(path.read_bytes())
        found.setdefault("file_times", wanted["file_times"])  # which older records lack
    except FileNotFoundError:
        record = {**wanted, "bad": {split.name: {} for split in splits}}
        write_build_record(out, record)
        return record
    except (ValueError, AttributeError):
        raise DataError(f"{path}: cannot be read; {_ANOTHER}") from None
    if any(found.get(name) != wanted[name] for name in wanted):
        raise DataError(f"{out}: {_describe_difference(found, wanted)}; {_ANOTHER}")
    return dict(found)


def _describe_difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Why this build cannot continue the recorded one."""
    old, new = found.get("options", {}), wanted["options"]
    for name in {**new, **old}:
        if old.get(name) != new.get(name):
            flag = f"--{name.replace('_', '-')}"
            before, now = (_describe_option(flag, each.get(name)) for each in (old, new))
            return f"was built {before}, now {now}"
    if found.get("format") != wanted["format"]:
        return "was built by another version of Phalanx"
    if found.get("source") == wanted["source"]:
        return "files of the source were written or copied since it was built"
    return "was built from another source, or the source has changed since"


def _describe_option(flag: str, value: Any) -> str:
    if value in (None, False):
        return f"without {flag}"
    return f"with {flag}" if value is True else f"with {flag} {value}"


def write_build_record(out: Path, record: dict[str, Any]) -> None:
    """Write build.json; without paths, and with times as a hash, so that it stays the same."""
    text = json.dumps(record, indent=1, sort_keys=True)
    write_atomically(out / PHALANX_FOLDER / _RECORD, f"{text}\n")


def lock_output(out: Path) -> AbstractContextManager[int]:
    """Context in which no other build may write to the folder; the lock ends with the process."""
    (out / PHALANX_FOLDER).mkdir(parents=True, exist_ok=True)
    busy = f"{out}: another build is writing there; wait for it to finish"
    return file_lock(out / PHALANX_FOLDER, lambda: DataError(busy))


# --- the work ---


@dataclass
class _Build:
    """A running build."""

    splits: list[SourceSplit]
    out: Path
    options: BuildOptions
    pool: ProcessPool
    record: dict[str, Any]  # the contents of build.json
    max_bad: str | None
    on_progress: OnProgress

    def build_split(self, split: SourceSplit) -> _SplitResult:
        """Write one split; if images turn out to be bad, write it again without them."""
        while True:
            bad = self._known_bad(split)
            self._refuse_bad(split, bad)
            result = _SplitResult(images=split.images - len(bad), bad=[bad[n] for n in sorted(bad)])
            writer = self._build_writer(split)
            try:
                writer.write(partial(self._convert_from, split, result))
            except _BadImagesFound as found:
                writer.remove()
                bad |= found.bad
                self.record["bad"][split.name] = {str(n): bad[n] for n in sorted(bad)}
                write_build_record(self.out, self.record)
                continue
            if not result.written:
                self.on_progress(split.name, result.images, result.images)
            return result

    def _known_bad(self, split: SourceSplit) -> _BadImages:
        return {int(number): why for number, why in self.record["bad"][split.name].items()}

    def _refuse_bad(self, split: SourceSplit, bad: _BadImages) -> None:
        """Raise DataError if more images of a split are bad than is tolerated, or all of them."""
        limit = max(LEAST_MAX_BAD, split.images // 100)  # as in training
        if self.max_bad is not None:
            limit = parse_share(self.max_bad, split.images)
        if len(bad) <= limit and len(bad) < split.images:
            return
        what = "none of the images can"
        if len(bad) > limit:
            what = f"more than {limit} images cannot"
        first = "\n".join(bad[number] for number in sorted(bad)[:_BAD_SHOWN])
        raise DataError(
            f"{split.name}: {what} be read, the first are:\n{first}\n"
            "fix or remove them, or allow more with --max-bad"
        )

    def _build_writer(self, split: SourceSplit) -> ShardWriter:
        """The writer of a split, for all images that are not known to be bad."""
        is_folder, shrinks = self.options.to == "folder", self.options.short_side is not None
        if is_folder:
            refuse_missing_classes(split, self._known_bad(split))
        lengths = {each.name: each.images - len(self._known_bad(each)) for each in self.splits}
        return OUTPUT_FORMATS[self.options.to](
            out=self.out,
            split=split.name,
            count=lengths[split.name],
            classes=split.classes,
            source={"data": split.data, **split.fingerprint},
            lengths=lengths,
            shards=self._choose_shards(split),
            short_side=self.options.short_side,
            raw=self.options.raw,
            number_files=is_folder and has_name_clash(split, shrinks=shrinks),
        )

    def _choose_shards(self, split: SourceSplit) -> int | None:
        """The number of shards of a split, by option or by size; None if the format has none."""
        options, writer = self.options, OUTPUT_FORMATS[self.options.to]
        if not writer.takes_shards:
            return None
        if options.shards is not None:
            return writer.split_shards(options.shards, split.name)
        known: dict[str, int] = self.record.setdefault("shards", {})
        if split.name not in known:  # stored, since a continued build must use the same number
            size = split.images * (self._estimate_bytes(split) + writer.image_overhead)
            if options.shard_mib is None:
                known[split.name] = writer.count_shards(size, split.name)
            else:
                known[split.name] = max(1, math.ceil(size / (options.shard_mib * 2**20)))
            write_build_record(self.out, self.record)
        return known[split.name]

    def _estimate_bytes(self, split: SourceSplit) -> float:
        """The mean size of a converted image of a split, from a sample."""
        step = max(1, -(-split.images // _IMAGES_MEASURED))
        if split.data in SEQUENTIAL_FORMATS:  # a spread sample would read almost everything
            step = 1
        numbers = range(0, split.images, step)[:_IMAGES_MEASURED]
        tasks = ((task, self.options.encoding) for task in make_tasks(split, numbers))
        converted = [image for some in self.pool.map(_convert_task, tasks) for image in some]
        sizes = [len(image.data) for _, image, _ in converted if isinstance(image, Sample)]
        return sum(sizes) / max(1, len(sizes))

    def _convert_from(
        self, split: SourceSplit, result: _SplitResult, first: int
    ) -> Iterator[Sample]:
        """The converted images from `first` on; after a bad one the rest are only checked."""
        bad, found = self._known_bad(split), dict[int, str]()
        numbers = np.setdiff1d(np.arange(split.images), list(bad))[first:]
        tasks = ((task, self.options.encoding) for task in make_tasks(split, numbers))
        done = first
        for converted in self.pool.map(_convert_task, tasks):
            for number, sample, changed in converted:
                done += 1
                self.on_progress(split.name, done, result.images)
                if isinstance(sample, str):
                    found[number] = sample
                    self._refuse_bad(split, {**bad, **found})
                elif not found:
                    result.written += 1
                    result.encoded += changed
                    yield sample
        if found:
            raise _BadImagesFound(found)


def _convert_task(work: tuple[ImageTask, EncodeOptions]) -> list[tuple[int, Sample | str, bool]]:
    """For each image of a task: number, the sample or what is wrong, and whether it changed."""
    task, options = work
    max_pixels = task.split.source_options.limits.max_pixels
    converted: list[tuple[int, Sample | str, bool]] = []
    for place, number in enumerate(task.numbers):
        try:
            given = None if task.samples is None else task.samples[place]
            sample = read_sample(open_once(task.split), number) if given is None else given
            after = sample
            if isinstance(sample, Sample):
                after = convert_sample(sample, options, max_pixels=max_pixels)
            converted.append((number, after, after is not sample))
        except BadImage as bad:
            # as the source names it: with its split or shard, wherever it turned out to be bad
            name = bad.name if task.samples is not None else open_once(task.split).name(number)
            converted.append((number, f"{name}: {bad.reason}", False))
    return converted
