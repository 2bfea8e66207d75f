"""The models that can be served: an exported file or a run; and what else a path may be."""

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from phalanx.catalog.models import MODELS
from phalanx.config.presets import is_preset
from phalanx.engine.checkpoint_store import AVERAGE_WEIGHTS
from phalanx.errors import CheckpointError
from phalanx.export.file_kind import describe_magic_bytes
from phalanx.export.metadata import LOGITS, ModelMetadata
from phalanx.serve.batching import Outputs, Rows

_DTYPES = {"tensor": np.float32, "image": np.uint8}
SHAPES = {"tensor": lambda size: (3, size, size), "image": lambda size: (size, size, 3)}


class Backend(Protocol):
    """A model that computes outputs; called by one thread at a time."""

    @property
    def path(self) -> Path:
        """The file or run, for messages."""

    @property
    def metadata(self) -> ModelMetadata:
        """Its inputs and outputs."""

    @property
    def runtime(self) -> str:
        """The library and device that run it: "onnxruntime 1.31.1, cpu"."""

    @property
    def batch_sizes(self) -> Sequence[int]:
        """The batch sizes at which it is fast; empty if all are."""

    @property
    def input_kinds(self) -> Sequence[str]:
        """The kinds of rows that it accepts, "tensor" or "image" as in the metadata."""

    def run(self, rows: Rows) -> Outputs:
        """The outputs for a batch of rows of one of these kinds."""
        ...


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """Where a model runs."""

    device: str  # "cpu", "cuda", "cuda:1"
    threads: int  # of each model
    max_batch: int
    flags: Mapping[str, str]  # as typed; only a run, which has options of its own, needs them
    checkpoint: str | None = None  # of a run: which one
    averaged: bool = False  # the moving average of its weights


def open_backends(path: Path, options: BackendOptions, *, count: int) -> list[Backend]:
    """Several instances of the model at a path; UserError if it is not a model."""
    _refuse_no_model(path)
    if not is_exported_model(path):
        from phalanx.serve.torch_backend import TorchBackend

        return [TorchBackend(path, options) for _ in range(count)]
    from phalanx.serve.onnx_backend import OnnxBackend

    return [OnnxBackend(path, options) for _ in range(count)]


def is_exported_model(path: Path) -> bool:
    """Whether a path is an exported model, rather than the weights of a run."""
    return path.is_file() and path.name != AVERAGE_WEIGHTS


class PaddedModel:
    """A backend whose batches are padded to sizes at which it is fast."""

    def __init__(self, backend: Backend, max_batch: int) -> None:
        self._backend, self._max_batch = backend, max_batch

    def run(self, rows: Rows) -> Outputs:
        """The outputs for a batch, without those of the padding."""
        count = len(rows)
        size = next((size for size in self._backend.batch_sizes if size >= count), count)
        if size == count:
            return self._backend.run(rows)
        padded = np.zeros((size, *rows.shape[1:]), rows.dtype)
        padded[:count] = rows
        return {name: values[:count] for name, values in self._backend.run(padded).items()}

    def warm_up(self) -> None:
        """Run a batch of each size, or of the smallest and largest, and check the outputs."""
        metadata = self._backend.metadata
        for kind in self._backend.input_kinds:
            shape, dtype = SHAPES[kind](metadata.preprocessing.image_size), _DTYPES[kind]
            for size in self._backend.batch_sizes or dict.fromkeys((1, self._max_batch)):
                outputs = self._backend.run(np.zeros((size, *shape), dtype))
                _refuse_outputs(self._backend.path, metadata, outputs, size)


def _refuse_outputs(where: object, metadata: ModelMetadata, outputs: Outputs, rows: int) -> None:
    """Raise CheckpointError if a model's outputs do not match its metadata."""
    logits = outputs.get(LOGITS)
    named = len(metadata.classes)
    if logits is None or logits.ndim != 2 or len(logits) != rows:
        shape = "none" if logits is None else f"{list(logits.shape)}"
        raise CheckpointError(
            f"{where}: expected an output {LOGITS} of [{rows}, classes], found {shape}; "
            "export it again"
        )
    if logits.shape[1] != named:
        raise CheckpointError(
            f"{where}: the model gives {logits.shape[1]:,} classes, and "
            f"its metadata names {named:,}; export it again from its run"
        )


# --- what kind of file it is ---

_WAY_OUT = "name a run, a checkpoint, or a file that `phalanx export RUN --format onnx` wrote"
_PT2 = "an exported program of torch (pt2), which the server does not run"
_SAFETENSORS = "a safetensors file: weights without a program to run them"
_ZIP, _SAFETENSORS_HEAD = b"PK\x03\x04", 8
_HEAD = 64  # bytes that identify a kind of file


def _refuse_no_model(path: Path) -> None:
    """Raise CheckpointError for anything but a run, a checkpoint or an ONNX file."""
    try:
        if not path.exists():
            if is_preset(str(path)) or str(path) in MODELS:
                raise CheckpointError(
                    f"{path}: is not a run but the name of a preset or model; export it, with "
                    f"random weights, and serve the file: phalanx export {path}"
                )
            raise CheckpointError(f"{path}: no such file or folder; {_WAY_OUT}")
        found = _describe_folder(path) if path.is_dir() else _describe_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    if found:
        raise CheckpointError(f"{path}: is {found}; {_WAY_OUT}")


def _describe_folder(path: Path) -> str:
    """What a folder is, if it cannot be a run; empty if it may be one."""
    inside = {entry.name for entry in path.iterdir()}
    if not inside:
        return "an empty folder"
    if "config.pbtxt" in inside or any(path.glob("*/config.pbtxt")):
        return "a repository for Triton, which serves it itself"
    if {"config.json", "model.safetensors"} <= inside:
        return "a folder for timm"
    if "saved_model.pb" in inside:
        return "a SavedModel of TensorFlow"
    is_run = {"run.json", "config.yaml", "manifest.json"} & inside
    return "" if is_run else "a folder that is neither a run nor a checkpoint"


def _describe_file(path: Path) -> str:
    """What a file is, if it cannot be an ONNX model; empty if it may be one."""
    if not path.is_file():
        return "not a regular file"
    if not is_exported_model(path):
        return ""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if head[_SAFETENSORS_HEAD : _SAFETENSORS_HEAD + 1] == b"{":
        return _SAFETENSORS
    if head.startswith(_ZIP) and path.suffix == ".pt2":
        return _PT2
    is_text = path.suffix != ".onnx" and _is_text(head)
    return describe_magic_bytes(head) or ("text" if is_text else "") if head else "an empty file"


def refuse_text(path: Path) -> None:
    """Raise CheckpointError for a file that cannot be loaded because it is text."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if _is_text(head):
        raise CheckpointError(f"{path}: is text; {_WAY_OUT}")


def _is_text(head: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # it may end within a character
    except UnicodeDecodeError:
        return False
    return all(byte >= 32 or byte in b"\t\r\n" for byte in head)
