"""The images of a request: their files, and the class of each if it is known."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from phalanx.assemble.dataset_summary import RANDOM_DATASETS, build_input_spec
from phalanx.assemble.scoring_target import get_settings, plan_target, read_target
from phalanx.catalog.datasets import DATASETS
from phalanx.client.connection import RequestFailed
from phalanx.config.read import Settings
from phalanx.data.formats.arrays import open_embedded
from phalanx.data.formats.decode import BadImage, EncodedImage, encode_png
from phalanx.data.formats.image_file import ReadLimits, read_image_file
from phalanx.data.formats.sources import Source
from phalanx.data.layouts.labels_file import parse_labels
from phalanx.data.loading.image_inputs import NamedImage, collect_images
from phalanx.data.loading.reader import open_image
from phalanx.errors import DataError


@dataclass(frozen=True)
class RequestImages:
    """Images that can be sent: their names, how to read their files, and known classes.

    folders: the names of the folders that each image is in, the innermost first, which may have
    nothing to do with classes. note: what a person should know of them.
    """

    names: Sequence[str]
    read_file: Callable[[int], bytes]  # raises BadImage
    labels: Sequence[str | None]
    folders: Sequence[Sequence[str]] = ()
    note: str = ""

    def __len__(self) -> int:
        return len(self.names)

    def read(self, place: int) -> tuple[str, bytes]:
        """The name and the bytes of an image; raises RequestFailed if it cannot be read."""
        try:
            return self.names[place], self.read_file(place)
        except BadImage as bad:
            raise RequestFailed(bad.reason) from None

    def find_labels(self, classes: Sequence[str]) -> Sequence[str | None]:
        """The class of each image; of folders, only those that are called like a class.

        Raises DataError for a label that no class of the model is called.
        """
        known = set(classes)
        if not known:
            return self.labels
        if self.folders:
            return [next((n for n in names if n in known), None) for names in self.folders]
        for name, label in zip(self.names, self.labels, strict=True):
            if label is not None and label not in known:
                raise DataError(
                    f"--labels: {name} is of class {label!r}, which the model does not have; it "
                    f"has {', '.join(classes[:5])}{', ...' * (len(classes) > 5)}"
                )
        return self.labels


def collect_files(
    paths: Sequence[str], *, labels: Path | None, limits: ReadLimits
) -> RequestImages:
    """The images of files and folders; their classes are from a table or the folders' names."""
    found, folders = list[NamedImage](), list[list[str]]()
    for path in paths:
        images = collect_images(path)
        found += images
        folders += [_list_folders(Path(one.name), Path(path)) for one in images]
    files = [Path(one.name) for one in found]
    classes: Sequence[str | None] = [names[0] for names in folders]
    if labels is not None:
        classes, folders = _read_labels(labels, files), []

    def read_file(place: int) -> bytes:
        return read_image_file(files[place], str(files[place]), limits)

    return RequestImages([one.name for one in found], read_file, classes, folders)


def _list_folders(file: Path, given: Path) -> list[str]:
    """The names of the folders of a file up to the given one, the innermost first.

    >>> _list_folders(Path("x/cat/may/1.jpg"), Path("x/cat"))
    ['may', 'cat']
    """
    inner, top = file.absolute().parent, given.absolute()
    depth = len(inner.relative_to(top).parts) if inner.is_relative_to(top) else 0
    return [folder.name for folder in (inner, *inner.parents)][: depth + 1]


def _read_labels(table: Path, files: Sequence[Path]) -> list[str | None]:
    """The class of each file from a table of paths, relative to the table or the current folder."""
    try:
        text = table.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise DataError(f"--labels {table}: {why}") from None
    root = table.absolute().parent
    parsed = parse_labels(text, table, root=root, valid_split=None, min_classes=1)
    by_path: dict[str, str] = {}
    for split in parsed.splits.values():
        by_path |= split
    found: list[str | None] = []
    for file in files:
        absolute = file.absolute()
        near = absolute.relative_to(root).as_posix() if absolute.is_relative_to(root) else ""
        found.append(by_path.get(near) or by_path.get(file.as_posix()))
    if not any(found):
        raise DataError(
            f"--labels {table}: names none of the images; its paths are relative to {root}"
        )
    return found


def collect_validation(name: str, flags: Mapping[str, str], *, count: int) -> RequestImages:
    """So many validation images of a run or preset, spread over the split, as files.

    Data that lies as pixels is sent as PNG, which loses nothing. In place of a preset's data that
    is not here, or is noise, images that come with Phalanx are sent.
    """
    target = read_target(name, flags)
    config = get_settings(target).config
    data = config.data.data
    is_missing = DATASETS[data].needs_folder and config.data.data_dir is None
    if isinstance(target, Settings) and (is_missing or data in RANDOM_DATASETS):
        found = _choose_images(open_embedded("valid"), count)
        why = "is noise" if data in RANDOM_DATASETS else "is not on this machine"
        note = f"{name}: its data ({data}) {why}: sending images that come with Phalanx"
        return replace(found, labels=[None] * len(found), note=note)
    if data in RANDOM_DATASETS:
        raise DataError(f"{name}: was trained on noise, which is not sent; name images of your own")
    return _choose_images(build_input_spec(config, plan_target(target)).open("valid"), count)


def _choose_images(source: Source, count: int) -> RequestImages:
    """So many images, spread evenly over all of them."""
    chosen = np.linspace(0, len(source) - 1, min(count, len(source))).astype(int).tolist()
    classes = source.classes

    def read_file(place: int) -> bytes:
        image = open_image(source, chosen[place])
        return image.data if isinstance(image, EncodedImage) else encode_png(image)

    labels = [classes[source.labels[index]] for index in chosen]
    return RequestImages([source.name(index) for index in chosen], read_file, labels)
