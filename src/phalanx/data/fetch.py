"""Downloads published datasets, checks them, and continues interrupted downloads.

A file is downloaded under the name FILE.part, checked, and only then given its own name.
"""

import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO

from phalanx.data.formats.arrays import compute_md5
from phalanx.data.formats.cifar import CIFAR_LAYOUTS
from phalanx.data.formats.idx import IDX_FOLDERS, IDX_MD5
from phalanx.disk import describe_free_space, expand_home, remove_quietly, sync_folder
from phalanx.errors import ConfigError, DataError, DiskError, suggest

_MAX_FAILURES = 5  # connections in a row without a new byte
_TIMEOUT_S = 30
_BLOCK = 1 << 18
_PARTIAL_CONTENT = 206
_RANGE_NOT_SATISFIABLE = 416  # the part already has the full length

_OnProgress = Callable[[str, int, int | None], None]  # file, bytes so far, total bytes if known


@dataclass(frozen=True, kw_only=True)
class _PublishedFiles:
    """Where a dataset is published, its files, and where they go in a data folder."""

    url: str
    md5: dict[str, str]  # by file
    gzipped: bool = False  # files are published as NAME.gz; md5 is that of the unzipped contents
    subfolder: str = ""  # of --data-dir, for downloaded files
    folders: tuple[str, ...] = ("",)  # of --data-dir, where the files may already be
    package: str | None = None  # the folder of a system package that holds them

    def find_intact(self, folder: Path, name: str) -> Path | None:
        """The file, plain or gzipped, if it exists and its checksum is right."""
        for path in sorted({folder / name, folder / self.published_name(name)}):
            gunzip = self.gzipped and path.suffix == ".gz"
            if path.is_file() and compute_md5(path, gunzip=gunzip) == self.md5[name]:
                return path
        return None

    def is_in(self, folder: Path) -> bool:
        """Whether all files of the dataset exist with the right checksum."""
        return all(self.find_intact(folder, name) for name in self.md5)

    def published_name(self, name: str) -> str:
        """The name of a file where it is published."""
        return f"{name}.gz" if self.gzipped else name


_CIFAR_URL = "https://www.cs.toronto.edu/~kriz/"
PUBLISHED_FILES: dict[str, _PublishedFiles] = {
    **{
        data: _PublishedFiles(url=_CIFAR_URL, md5={layout.archive: layout.archive_md5})
        for data, layout in CIFAR_LAYOUTS.items()
    },
    "mnist": _PublishedFiles(
        url="https://ossci-datasets.s3.amazonaws.com/mnist/",
        md5=IDX_MD5["mnist"],
        gzipped=True,
        subfolder="MNIST",
        folders=IDX_FOLDERS["mnist"],
    ),
    "fashion-mnist": _PublishedFiles(
        url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        md5=IDX_MD5["fashion-mnist"],
        gzipped=True,
        subfolder="fashion-mnist",
        folders=IDX_FOLDERS["fashion-mnist"],
        package="/usr/share/datasets/fashion-mnist",
    ),
}


@dataclass(frozen=True, kw_only=True)
class _FetchResult:
    """The folder of a dataset, and which of its files were downloaded."""

    folder: Path
    downloaded: tuple[str, ...] = ()


def fetch_dataset(
    data: str, data_dir: Path | None, *, on_progress: _OnProgress = lambda *_: None
) -> _FetchResult:
    """Make sure that a dataset is in a folder: copied from a system package, or downloaded.

    Without data_dir, a system package is used in place, and anything else goes to data/NAME.
    """
    if data not in PUBLISHED_FILES:
        raise ConfigError(f"{data!r} cannot be fetched; {suggest(data, PUBLISHED_FILES)}")
    published = PUBLISHED_FILES[data]
    package = Path(published.package) if published.package else None
    if data_dir is None and package and published.is_in(package):
        return _FetchResult(folder=package)
    root = Path("data") / data if data_dir is None else expand_home(data_dir)
    if any(published.is_in(root / folder) for folder in published.folders):
        return _FetchResult(folder=root)
    target = root / published.subfolder
    missing_folders = [folder for folder in (target, root, *root.parents) if not folder.exists()]
    with _convert_disk_errors(target):
        target.mkdir(parents=True, exist_ok=True)
    downloaded = []
    try:
        for name in published.md5:
            if published.find_intact(target, name):
                continue
            packaged = published.find_intact(package, name) if package else None
            if packaged:
                _copy_file(packaged, target)
                continue
            _download(published, name, target, on_progress)
            downloaded.append(published.published_name(name))
    except DataError:
        for folder in missing_folders:
            with suppress(OSError):  # not empty: it has a part that the next attempt continues
                folder.rmdir()
        raise
    return _FetchResult(folder=root, downloaded=tuple(downloaded))


def _copy_file(source: Path, target: Path) -> None:
    part = target / f"{source.name}.part"
    with _convert_disk_errors(part):
        shutil.copyfile(source, part)
        _name_whole_file(part)


def _download(
    published: _PublishedFiles, name: str, target: Path, on_progress: _OnProgress
) -> None:
    """Download one file, continuing an existing part, and check it."""
    file = published.published_name(name)
    url, part = f"{published.url.rstrip('/')}/{file}", target / f"{file}.part"
    failures = 0
    while why := _download_part(url, part, before := _read_size(part), on_progress):
        failures = failures + 1 if _read_size(part) <= before else 0
        if failures == _MAX_FAILURES:
            raise DataError(
                f"{url}: the connection broke {_MAX_FAILURES} times without a new byte "
                f"({why}); {_hint(part)}"
            )
        time.sleep(failures)
    if compute_md5(part, gunzip=published.gzipped) != published.md5[name]:
        remove_quietly(part)
        raise DataError(
            f"{url}: wrong checksum: the download is not {file} as published, and was removed; "
            "fetch it again or get it elsewhere"
        )
    with _convert_disk_errors(part):
        _name_whole_file(part)


def _download_part(url: str, part: Path, received: int, on_progress: _OnProgress) -> str:
    """Download over one connection; returns why it ended early, or "" if the file is complete."""
    try:
        missing = _receive(url, part, received, on_progress)
        return f"{missing:,} bytes are missing" if missing else ""
    except urllib.error.HTTPError as answer:
        with answer:
            if answer.code == _RANGE_NOT_SATISFIABLE and received:
                return ""
            status = f"{answer.code} {answer.reason}"
            raise DataError(f"{url}: the server answered {status}; {_hint(part)}") from None
    except urllib.error.URLError as cause:
        raise DataError(f"{url}: cannot be reached ({cause.reason}); {_hint(part)}") from None
    except (OSError, HTTPException) as cause:
        return str(cause) or type(cause).__name__


def _receive(url: str, part: Path, received: int, on_progress: _OnProgress) -> int:
    """Write what the server sends; returns the bytes still missing at the end."""
    headers = {"Range": f"bytes={received}-"} if received else {}
    request = urllib.request.Request(url, headers=headers)
    with (
        urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer,
        _open_part(part, append=answer.status == _PARTIAL_CONTENT) as file,
    ):
        if answer.status != _PARTIAL_CONTENT:  # the server does not support ranges and starts again
            received = 0
        length = answer.headers.get("Content-Length")
        total = received + int(length) if length else None
        while block := answer.read(_BLOCK):
            with _convert_disk_errors(part):
                received += file.write(block)
            on_progress(part.name.removesuffix(".part"), received, total)
    return total - received if total else 0


def _open_part(part: Path, *, append: bool) -> BinaryIO:
    with _convert_disk_errors(part):
        return part.open("ab") if append else part.open("wb")


def _read_size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _hint(part: Path) -> str:
    file = part.name.removesuffix(".part")
    return (
        f"check the network and fetch again, which continues where it stopped, or put {file} into "
        f"{part.parent} by hand"
    )


@contextmanager
def _convert_disk_errors(path: Path) -> Iterator[None]:
    """Context that turns an OSError into a DiskError with the path and what to do."""
    try:
        yield
    except OSError as cause:
        raise DiskError(
            f"{path}: {cause.strerror or cause}{describe_free_space(path)}; free some space or "
            "make it writable, or choose another --data-dir"
        ) from cause


def _name_whole_file(part: Path) -> None:
    """Give a complete file its name once it is on disk."""
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    part.replace(part.with_name(part.name.removesuffix(".part")))
    sync_folder(part.parent)
