"""Recognises kinds of files: our exports by their metadata, others by their first bytes."""

import zipfile
from pathlib import Path

from phalanx.catalog.variant import METADATA_KEY
from phalanx.export.metadata import PT2_METADATA

_MAGIC_BYTES = {  # the first bytes of files that are mistaken for models
    b"PK\x03\x04": "a zip archive, as torch's .pth and .pt2 files are",
    b"\x80": "a pickle, as older .pth files are",
    b"\xff\xd8\xff": "a JPEG image",
    b"\x89PNG": "a PNG image",
    b"GIF8": "a GIF image",
    b"%PDF": "a PDF document",
    b"\x7fELF": "a program",
    b"#!": "a script",
    b"{": "JSON text",
    b"\x89HDF": "an HDF5 file, as Keras writes",
    b"<!DOCTYPE": "a web page",
    b"<html": "a web page",
    b"version https://git-lfs": "a pointer of Git LFS, not the file itself: git lfs pull",
    b"\x1f\x8b": "a gzip archive",
}
_SUFFIXES = {
    ".onnx": "an ONNX model, which is exported already",
    ".safetensors": "weights alone",
    ".yaml": "a config",
    ".yml": "a config",
}


def describe_magic_bytes(first: bytes) -> str:
    """The kind of a file that begins with these bytes; empty if it is not known."""
    return next((what for start, what in _MAGIC_BYTES.items() if first.startswith(start)), "")


def describe_file(path: Path) -> str:
    """The kind of a file, from its first bytes and its name."""
    try:
        with path.open("rb") as file:
            first = file.read(32)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not first:
        return "it is empty"
    return describe_magic_bytes(first) or _SUFFIXES.get(
        path.suffix, f"it begins with {first[:8]!r}"
    )


def is_own_export(path: Path) -> bool:
    """Whether a model file itself contains an export's metadata."""
    if not path.is_file():
        return False
    return _CARRIES_METADATA[path.suffix](path)


def _onnx_has_metadata(path: Path) -> bool:
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError:
        return False
    return any(entry.key == METADATA_KEY for entry in model.metadata_props)


def _pt2_has_metadata(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(f"extra/{PT2_METADATA}") for name in archive.namelist())
    except zipfile.BadZipFile:
        return False


def _safetensors_has_metadata(path: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return METADATA_KEY in (file.metadata() or {})
    except SafetensorError:
        return False


_CARRIES_METADATA = {
    ".onnx": _onnx_has_metadata,
    ".pt2": _pt2_has_metadata,
    ".safetensors": _safetensors_has_metadata,
}
