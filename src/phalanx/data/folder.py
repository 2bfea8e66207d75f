"""Folders of JPEG and PNG files, one folder a class."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.data.pixels import BadImage, decode
from phalanx.errors import DataError, suggest

ENDINGS = (".jpg", ".jpeg", ".png")
SPLIT_NAMES = {"train": ("train",), "valid": ("val", "validation")}
FINDINGS_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class FolderSource:
    """Random access to image files."""

    root: Path
    paths: list[str]  # relative to root, in the order of classes, then of file names
    labels: NDArray[np.int64]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> NDArray[np.uint8]:
        """The image as RGB; raises BadImage when the file cannot be read or decoded."""
        path = self.paths[index]
        try:
            data = (self.root / path).read_bytes()
        except OSError as cause:
            raise BadImage(path, cause.strerror or str(cause)) from None
        return decode(data, path)

    def name(self, index: int) -> str:
        """The file's path relative to the data folder."""
        return self.paths[index]

    def fingerprint(self) -> dict[str, Any]:
        """Counts, and a hash over paths, sizes and labels; no image is opened."""
        digest = hashlib.sha256()
        for path, label in zip(self.paths, self.labels, strict=True):
            try:
                size = os.stat(self.root / path).st_size
            except OSError:  # a dangling link is a bad image, to be named when it is read
                size = -1
            digest.update(f"{path}\0{size}\0{label}\n".encode(errors="surrogateescape"))
        return {
            "images": len(self),
            "classes": len(self.classes),
            "sha256": digest.hexdigest(),
        }


def open_folder(root: Path, split: str) -> FolderSource:
    """One split of a data folder; all that is wrong with it is said at once."""
    folders = {name: find_split(root, name) for name in SPLIT_NAMES}
    if split == "valid" and folders["train"] is None:
        alone = folders["valid"] or root  # nothing to train on: the folder is there to be scored
        return _scan(root, alone, tuple(_subfolders(alone)))
    missing = [name for name in {"train", split} if folders[name] is None]
    if missing:
        raise DataError(_describe_missing(root, missing))
    train, wanted = folders["train"], folders[split]
    assert train is not None and wanted is not None
    return _scan(root, wanted, _class_names(train))


def find_split(root: Path, split: str) -> Path | None:
    """The folder of a split, where there is one."""
    return next((root / name for name in SPLIT_NAMES[split] if (root / name).is_dir()), None)


def _describe_missing(root: Path, missing: list[str]) -> str:
    wanted = " and no ".join("/ or ".join(SPLIT_NAMES[name]) + "/" for name in sorted(missing))
    found = ", ".join(_subfolders(root)[:FINDINGS_SHOWN]) or "no folders at all"
    return (
        f"{root}: no {wanted} folder (found {found}); put images under train/CLASS/ and "
        "val/CLASS/, or point --data-dir at the folder that holds train/ and val/"
    )


def _subfolders(folder: Path) -> list[str]:
    with _readable(folder), os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as cause:
        raise DataError(f"{folder}: cannot be read ({cause.strerror}); mend its rights") from cause


def _class_names(folder: Path) -> tuple[str, ...]:
    names = tuple(_subfolders(folder))
    if len(names) < 2:
        found = f"only one class folder, {names[0]}/" if names else "no class folders"
        raise DataError(f"{folder}: has {found}; a classifier needs two, as folders of images")
    return names


def _scan(root: Path, folder: Path, classes: tuple[str, ...]) -> FolderSource:
    known = {name: label for label, name in enumerate(classes)}
    findings: list[str] = []
    paths: list[str] = []
    labels: list[int] = []
    for name in _subfolders(folder):
        files = _image_files(folder / name)
        if name not in known:
            findings.append(f"{folder / name}: train/ has no such class; {suggest(name, known)}")
        elif not files:
            findings.append(f"{folder / name}: no {', '.join(ENDINGS)} file in this class folder")
        else:
            home = (folder / name).relative_to(root).as_posix()
            paths += [f"{home}/{file}" for file in files]
            labels += [known[name]] * len(files)
    if not paths and not findings:
        findings.append(f"{folder}: has no class folders")
    if findings:
        raise DataError(_describe_findings(findings))
    return FolderSource(
        root=root, paths=paths, labels=np.array(labels, dtype=np.int64), classes=classes
    )


def _describe_findings(findings: list[str]) -> str:
    shown = findings[:FINDINGS_SHOWN]
    if len(findings) > len(shown):
        shown.append(f"and {len(findings) - len(shown)} more")
    return "\n".join([*shown, "add images to these folders, rename them or remove them"])


def _image_files(folder: Path) -> list[str]:
    with _readable(folder), os.scandir(folder) as entries:
        names = [e.name for e in entries if e.name.lower().endswith(ENDINGS) and not e.is_dir()]
    return sorted(name for name in names if not name.startswith("."))
