"""Tiny-ImageNet's validation images: one folder, and a table of their classes."""

from pathlib import Path

from phalanx.errors import DataError

_ANNOTATIONS, _IMAGES = "val_annotations.txt", "images"


def find_annotations(valid_folder: Path | None) -> Path | None:
    """The table in Tiny-ImageNet's validation folder; None for any other folder.

    Many people have moved its images into class folders, and left the table in place.
    """
    if valid_folder is None or not (valid_folder / _IMAGES).is_dir():
        return None
    table = valid_folder / _ANNOTATIONS
    return table if table.is_file() else None


def parse_annotations(text: str, table: Path, *, prefix: str) -> dict[str, str]:
    """The class of each image by its path; lines are file, class and box, separated by tabs.

    prefix: of the paths of images, such as "val/".
    """
    labels = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("\t")
        if not line.strip():
            continue
        if len(words) < 2 or not words[0] or not words[1]:
            raise DataError(
                f"{table}, line {number}: expected a file and its class with a tab between them, "
                f"got {line[:60]!r}; download it again"
            )
        labels[f"{prefix}{_IMAGES}/{words[0]}"] = words[1]
    return labels
