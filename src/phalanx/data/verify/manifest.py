"""The id of a dataset's content, as computed by `data verify` and stored for later runs."""

import json
from pathlib import Path
from typing import Any

from phalanx.data.formats.index import find_record_folders, make_record_folder
from phalanx.disk import write_atomically
from phalanx.errors import DiskError

_NAME = "manifest.json"
_Fingerprints = dict[str, Any]  # by split


def save_manifest(root: Path, manifest: str, fingerprints: _Fingerprints) -> None:
    """Store the id of a dataset's content in its folder, or if that is read-only in the cache."""
    content = json.dumps({"manifest": manifest, "fingerprints": fingerprints}, indent=1)
    for folder in find_record_folders(root):
        try:
            make_record_folder(folder)
            write_atomically(folder / _NAME, content)
        except (OSError, DiskError):
            continue
        return


def find_manifest(root: Path, fingerprints: _Fingerprints) -> str | None:
    """The stored id, if the dataset has not changed since."""
    for folder in find_record_folders(root):
        try:
            kept = json.loads((folder / _NAME).read_bytes())
            if _is_older(folder / _NAME, folder):  # the index was rebuilt: a file has changed
                continue
            if kept["fingerprints"] == json.loads(json.dumps(fingerprints)):
                return str(kept["manifest"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _is_older(path: Path, folder: Path) -> bool:
    """Whether an index in the folder was written after the path."""
    written = path.stat().st_mtime_ns
    return any(index.stat().st_mtime_ns > written for index in folder.glob("*.index"))
