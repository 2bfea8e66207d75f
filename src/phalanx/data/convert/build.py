"""Data from one form into another: on all cores, in index order, the same bytes every time.

What is being built into a folder is noted in .phalanx/build.json there, with the fingerprint of
the source. The same command goes on where it stopped; another one is refused.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.data.convert.folder_writer import file_name
from phalanx.data.convert.image import Change, convert_task
from phalanx.data.convert.origin import TASK_IMAGES, Part, find_parts, make_tasks, own_name
from phalanx.data.convert.sample import Sample
from phalanx.data.convert.targets import OUTPUT_FORMATS, WriteJob, take_away
from phalanx.data.formats.index import PHALANX_FOLDER
from phalanx.data.process_pool import ProcessPool
from phalanx.disk import file_lock, out_errors, write_atomically
from phalanx.errors import ConfigError, DataError, suggest
from phalanx.plan.machine import count_cores
from phalanx.plan.plan import LEAST_MAX_BAD
from phalanx.units import parse_share

_NOTE = "build.json"
_FORMAT = 1  # of the note; raise it when what is written for the same options changes
_QUALITIES = {True: 90, False: 95}  # of images that are shrunk, of those only made a JPEG
_BAD_SHOWN = 5
_ANOTHER = "choose another --out, or remove this folder to begin anew"
_AGAIN = "then run the same command again: it goes on where it stopped"

_Tell = Callable[[str, int, int], None]  # split, images done, of how many


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """What is asked of a build."""

    to: str
    short_side: int | None = None
    quality: int | None = None
    shards: int | None = None
    raw: bool = False

    def __post_init__(self) -> None:
        if self.to not in OUTPUT_FORMATS:
            raise ConfigError(f"--to: no such form {self.to!r}; {suggest(self.to, OUTPUT_FORMATS)}")
        if self.raw and self.to != "packed":
            raise ConfigError(f"--raw: only --to packed holds raw pixels, not {self.to}")
        if self.shards is not None and not OUTPUT_FORMATS[self.to].has_shards:
            raise ConfigError(f"--shards: {self.to} has none; leave the option out")
        if self.quality is not None and self.is_lossless:
            raise ConfigError(
                f"--quality: --to {self.to} encodes nothing anew without --short-side; "
                "give both or neither"
            )

    @property
    def is_lossless(self) -> bool:
        """Whether every image stays as it is, byte for byte or pixel for pixel."""
        return self.short_side is None and (self.raw or OUTPUT_FORMATS[self.to].any_form)

    @property
    def change(self) -> Change:
        """What happens to each image."""
        return Change(
            any_form=OUTPUT_FORMATS[self.to].any_form,
            short_side=self.short_side,
            quality=self.quality or _QUALITIES[self.short_side is not None],
            raw=self.raw,
        )


@dataclass(kw_only=True)
class _Outcome:
    """What a build has done to one split."""

    images: int
    written: int = 0  # by this run; the others lay there already
    encoded: int = 0  # of those, not copied byte for byte
    bad: list[str] = field(default_factory=list)


class _FoundBad(Exception):
    """Images turned out to be bad after the writer was promised them."""

    def __init__(self, bad: dict[int, str]):
        super().__init__(len(bad))
        self.bad = bad


def build(
    src: Path,
    out: Path,
    options: BuildOptions,
    *,
    max_bad: str | None = None,
    workers: int | None = None,
    tell: _Tell | None = None,
) -> dict[str, _Outcome]:
    """Write the data in `src` to `out` in another form; what comes back is told by split."""
    with out_errors(out, _AGAIN):
        _refuse_foreign(out)
    parts = find_parts(src)
    workers = _choose_workers(parts, workers)
    with out_errors(out, _AGAIN), _alone(out), ProcessPool(workers) as crew:
        note = _open_note(out, parts, options)
        job = _Job(parts, out=out, options=options, note=note, crew=crew, tell=tell)
        limits = {part.split: _count_max_bad(max_bad, part.images) for part in parts}
        return {part.split: job.build_split(part, limits[part.split]) for part in parts}


def _count_max_bad(asked: str | None, images: int) -> int:
    """Bad images of a split to put up with: as asked, else as many as training does."""
    return max(LEAST_MAX_BAD, images // 100) if asked is None else parse_share(asked, images)


def _choose_workers(parts: list[Part], asked: int | None) -> int:
    """Processes: one a core, and no more than there are tasks."""
    images = sum(part.images for part in parts)
    return min(count_cores() if asked is None else asked, images // TASK_IMAGES)


# --- the note ---


def _refuse_foreign(out: Path) -> None:
    """Raise DataError for a place where something lies that no build has put there."""
    if not out.exists() or (out / PHALANX_FOLDER / _NOTE).is_file():
        return
    if not out.is_dir():
        raise DataError(f"{out}: is a file, not a folder; choose another --out")
    others = sorted(entry.name for entry in out.iterdir() if entry.name != PHALANX_FOLDER)
    if others:
        told = f"is not empty ({', '.join(others[:3])}) and nothing was built there"
        raise DataError(f"{out}: {told}; {_ANOTHER}")


def _open_note(out: Path, parts: list[Part], options: BuildOptions) -> dict[str, Any]:
    """The note of a build that broke off or is done, or a new one; another build is refused."""
    path = out / PHALANX_FOLDER / _NOTE
    wanted = {
        "format": _FORMAT,
        "options": asdict(options),
        "source": {part.split: {"data": part.data, **part.fingerprint} for part in parts},
    }
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        note = {**wanted, "bad": {part.split: {} for part in parts}}
        write_note(out, note)
        return note
    except ValueError:
        raise DataError(f"{path}: cannot be read; {_ANOTHER}") from None
    differing = [name for name in wanted if found.get(name) != wanted[name]]
    if differing:
        raise DataError(f"{out}: {_describe_difference(found, wanted)}; {_ANOTHER}")
    return dict(found)


def _describe_difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    old, new = found.get("options", {}), wanted["options"]
    changed = [name for name in new if old.get(name) != new[name]]
    if changed:
        flag = f"--{changed[0].replace('_', '-')}"
        before, now = (_describe_option(options.get(changed[0])) for options in (old, new))
        return f"was built {before.format(flag)}, now {now.format(flag)}"
    if found.get("format") != wanted["format"]:
        return "was built by another version of Phalanx"
    return "holds images of another source, or the source has changed since"


def _describe_option(value: Any) -> str:
    if value in (None, False):
        return "without {}"
    return "with {}" if value is True else f"with {{}} {value}"


def write_note(out: Path, note: dict[str, Any]) -> None:
    """Keep what is being built; no times and no paths, so that it is the same every time."""
    write_atomically(
        out / PHALANX_FOLDER / _NOTE, json.dumps(note, indent=1, sort_keys=True) + "\n"
    )


def _alone(out: Path) -> AbstractContextManager[int]:
    """A block during which no other build writes to the folder; it ends with the process."""
    (out / PHALANX_FOLDER).mkdir(parents=True, exist_ok=True)
    busy = f"{out}: another build is at work there; wait for it"
    return file_lock(out / PHALANX_FOLDER, lambda: DataError(busy))


# --- the work ---


class _Job:
    """A build that is under way."""

    def __init__(
        self,
        parts: list[Part],
        *,
        out: Path,
        options: BuildOptions,
        note: dict[str, Any],
        crew: ProcessPool,
        tell: _Tell | None,
    ):
        self.parts, self.out, self.options, self.note = parts, out, options, note
        self.target, self.crew, self.tell = OUTPUT_FORMATS[options.to], crew, tell

    def build_split(self, part: Part, max_bad: int) -> _Outcome:
        """Write one split; when images turn out to be bad, once more without them."""
        while True:
            _check_bad(self.bad(part), part, max_bad)
            bad = self.bad(part)
            outcome = _Outcome(images=self.count(part), bad=[bad[number] for number in sorted(bad)])
            try:
                self._write(part, outcome, max_bad)
                return outcome
            except _FoundBad as found:
                take_away(self.target, self.out, part.split)
                known = {**self.bad(part), **found.bad}
                self.note["bad"][part.split] = {str(n): known[n] for n in sorted(known)}
                write_note(self.out, self.note)

    def bad(self, part: Part) -> dict[int, str]:
        """The images of a split that are known to be bad."""
        return {int(number): text for number, text in self.note["bad"][part.split].items()}

    def count(self, part: Part) -> int:
        """How many images of a split are written."""
        return part.images - len(self.bad(part))

    def _write(self, part: Part, outcome: _Outcome, max_bad: int) -> None:
        leg = self.leg(part)
        if self.target.is_whole(leg):
            self._say(part, leg.count, leg.count)
            return
        start = self.target.written(leg)
        bad = self.bad(part)
        numbers = np.arange(part.images, dtype=np.int64)
        numbers = numbers[~np.isin(numbers, list(bad))][start:]
        self.target.write(self._samples(part, numbers, outcome, max_bad), leg, start)

    def leg(self, part: Part) -> WriteJob:
        """What the writer of a split has to know."""
        if self.options.to == "folder":
            _refuse_missing_classes(part, self.bad(part))
        return WriteJob(
            out=self.out,
            split=part.split,
            count=self.count(part),
            classes=part.classes,
            fingerprint={"data": part.data, **part.fingerprint},
            shards=self.options.shards,
            short_side=self.options.short_side,
            raw=self.options.raw,
            numbered=self.options.to == "folder" and _names_clash(part),
            lengths={each.split: self.count(each) for each in self.parts},
        )

    def _samples(
        self, part: Part, numbers: Any, outcome: _Outcome, max_bad: int
    ) -> Iterator[Sample]:
        """The images for the writer; after the first bad one the others are only looked at."""
        tasks = ((task, self.options.change) for task in make_tasks(part, numbers))
        found: dict[int, str] = {}
        done = self.count(part) - len(numbers)
        for made in self.crew.map(convert_task, tasks):
            for number, sample, changed in made:
                done += 1
                self._say(part, done, self.count(part))
                if isinstance(sample, str):
                    found[number] = sample
                    _check_bad({**self.bad(part), **found}, part, max_bad)
                elif not found:
                    outcome.written += 1
                    outcome.encoded += changed
                    yield sample
        if found:
            raise _FoundBad(found)

    def _say(self, part: Part, done: int, count: int) -> None:
        if self.tell is not None:
            self.tell(part.split, done, count)


def _check_bad(bad: dict[int, str], part: Part, max_bad: int) -> None:
    """Raise DataError when more images of a split are bad than is put up with, or all of them."""
    if len(bad) <= max_bad and len(bad) < part.images:
        return
    many = f"more than {max_bad} images" if len(bad) > max_bad else "none of the images"
    can = "cannot" if len(bad) > max_bad else "can"
    first = "\n".join(bad[number] for number in sorted(bad)[:_BAD_SHOWN])
    raise DataError(
        f"{part.split}: {many} {can} be read, the first are:\n{first}\n"
        "mend or remove them, or allow more with --max-bad"
    )


def _refuse_missing_classes(part: Part, bad: dict[int, str]) -> None:
    """Raise DataError when a training class has no images: in folders, others took its number."""
    if part.labels is None or part.split != "train":
        return
    kept = np.delete(part.labels, list(bad)) if bad else part.labels
    kept = kept[(kept >= 0) & (kept < len(part.classes))]  # others are yet to be found bad
    counts = np.bincount(kept, minlength=len(part.classes))
    if not counts.all():
        name = part.classes[int(counts.argmin())]
        raise DataError(
            f"{part.folder}: no training image is of class {name!r}, which folders cannot tell; "
            "choose --to tar, tfrecord or packed"
        )


def _names_clash(part: Part) -> bool:
    """Whether two images of a class would get the same file name."""
    if part.labels is None:  # ImageNet names each image once
        return False
    seen = np.empty(part.images, "S16")
    for number in range(part.images):
        sample = Sample(name=own_name(part.source, number), data=b"", label=0)
        name = file_name(sample, number, numbered=False)
        key = f"{part.labels[number]}/{name}".encode(errors="surrogateescape")
        seen[number] = hashlib.blake2b(key, digest_size=8).hexdigest().encode()
    return len(np.unique(seen)) < part.images
