"""Saves training states to checkpoints, in the background, and loads them."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as arrays_from_bytes
from safetensors.torch import load as tensors_from_bytes
from torch import Tensor, nn

from phalanx.catalog.variant import NORM_LAYOUT_KEY
from phalanx.engine.checkpoint_store import (
    AVERAGE_WEIGHTS,
    FACTS,
    FORMAT,
    OPTIMIZER,
    REPLICAS,
    WEIGHTS,
    FileContent,
    prune_checkpoints,
    read_files,
    read_optional_file,
    write_checkpoint,
)
from phalanx.engine.consensus import Consensus
from phalanx.engine.state import TrainState, hash_weights
from phalanx.engine.tensor_bytes import iterate_safetensors
from phalanx.errors import CheckpointError, DivergedError
from phalanx.models.units import select_own_tensors
from phalanx.models.weights import load_tensors
from phalanx.optim.half_weights import HALF_TYPES
from phalanx.optim.named_state import name_optimizer_state, restore_optimizer_state

_CHECKSUMS = "seen.safetensors"
_PIECE = 1 << 20  # elements


@dataclass(frozen=True)
class _Snapshot:
    """A copy of a training state that later steps do not change."""

    values: dict[str, Any]  # what is not a tensor
    tensors: dict[str, dict[str, Tensor]]  # by the file that they are written to

    @property
    def step(self) -> int:
        """The step it was taken at."""
        return int(self.values["step"])


def take_snapshot(state: TrainState) -> _Snapshot:
    """Copy the state to host memory. Waits for the device.

    If the model has stages, all of them must call it, and the first gets everything.
    """
    if state.offload is not None:
        state.offload.synchronize()
    values = json.loads(json.dumps(state.to_dict()))
    found: dict[str, Mapping[str, Tensor]] = {
        WEIGHTS: state.model.state_dict(),
        OPTIMIZER: name_optimizer_state(state.model, state.optimizer),
    }
    if state.average is not None:
        found[AVERAGE_WEIGHTS] = state.average.tensors()
    if state.replica_statistics is not None:
        found[REPLICAS] = state.replica_statistics.tensors()
    gather = state.gather_to_first or dict
    tensors = {file: gather(_copy_to_host(named)) for file, named in found.items()}
    if state.image_checksums:
        checksums = state.image_checksums.items()
        tensors[_CHECKSUMS] = {split: torch.from_numpy(array.copy()) for split, array in checksums}
    return _Snapshot(values, tensors)


def _copy_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()) for n, t in tensors.items()}


class CheckpointSaver:
    """Writes checkpoints in the background, one at a time; a failure is raised at the next call.

    run_facts: what is written to every checkpoint of the run, besides the state.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        run_facts: dict[str, Any],
        writes: bool = True,
        consensus: Consensus,
    ) -> None:
        self._folder, self._keep, self._run_facts = folder, keep, run_facts
        self._writes, self._consensus = writes, consensus
        self._thread: Thread | None = None
        self._failure: Exception | None = None

    def save(self, state: TrainState) -> None:
        """Copy the state now, and write it in the background."""
        self.wait()
        if not self._writes and state.gather_to_first is None:
            return
        snapshot = take_snapshot(state)
        if self._writes:
            thread = Thread(target=self._write, args=(snapshot,), name="saver")
            thread.start()
            self._thread = thread  # only now: a thread that could not start cannot be joined

    def wait(self) -> None:
        """Wait until the last save is on disk; if it failed in any process, raise in all."""
        self.join()
        failure, self._failure = self._failure, None
        self._consensus.raise_any(failure)

    def join(self) -> None:
        """Wait until nothing is being written any more."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, snapshot: _Snapshot) -> None:
        try:
            _refuse_nonfinite(snapshot)
            files = _to_files(snapshot, self._run_facts)
            write_checkpoint(self._folder, snapshot.step, files)
            scores = {int(step): top1 for step, top1 in snapshot.values["scores"].items()}
            prune_checkpoints(self._folder, keep=self._keep, scores=scores)
        except Exception as failure:  # noqa: BLE001 - raised in the training thread
            self._failure = failure


def _refuse_nonfinite(snapshot: _Snapshot) -> None:
    """Raise if a weight is not finite, which can happen although loss and gradients were finite."""
    for name, tensor in snapshot.tensors[WEIGHTS].items():
        pieces = tensor.reshape(-1).split(_PIECE)  # isfinite copies what it tests
        if not all(bool(piece.isfinite().all()) for piece in pieces):
            raise DivergedError(
                f"step {snapshot.step:,}: {name} is no longer finite and was not saved; start "
                "again, or fork an earlier checkpoint, with a lower --lr or a longer --warmup-epoch"
            )


def _to_files(snapshot: _Snapshot, run_facts: dict[str, Any]) -> dict[str, FileContent]:
    """The files of a checkpoint by name; those of tensors are views of the snapshot."""
    facts = {
        "format": FORMAT,
        "state": snapshot.values,
        "weights_sha256": hash_weights(snapshot.tensors[WEIGHTS]),
        **run_facts,
    }
    metadata = {WEIGHTS: {NORM_LAYOUT_KEY: run_facts["norm_layout"]}}
    files: dict[str, FileContent] = {
        file: iterate_safetensors(named, metadata.get(file))
        for file, named in snapshot.tensors.items()
    }
    return {**files, FACTS: json.dumps(facts, indent=1).encode()}


def read_image_checksums(checkpoint: Path) -> dict[str, NDArray[np.uint32]]:
    """The checksums of the images that the run of a checkpoint has read, by split."""
    content = read_optional_file(checkpoint, _CHECKSUMS)
    with convert_content_errors(checkpoint / _CHECKSUMS):
        return arrays_from_bytes(content) if content is not None else {}


def load_checkpoint(state: TrainState, checkpoint: Path, *, with_optimizer: bool = True) -> None:
    """Load a checkpoint into a freshly built state.

    with_optimizer: whether the optimizer continues with its saved state, or starts without any.
    """
    files = read_files(checkpoint, WEIGHTS, OPTIMIZER, FACTS)
    load_weights(state.model, files[WEIGHTS], where=checkpoint / WEIGHTS)
    with convert_content_errors(checkpoint / OPTIMIZER):
        kept = select_own_tensors(state.model, tensors_from_bytes(files[OPTIMIZER]))
        if state.half is None:  # a fork's parent may have had 16-bit weights
            kept = {n: t.float() if t.dtype in HALF_TYPES.values() else t for n, t in kept.items()}
        if with_optimizer:
            restore_optimizer_state(state.model, state.optimizer, kept)
    if state.offload is not None:
        state.offload.to_host()
    with convert_content_errors(checkpoint / FACTS):
        state.load_dict(json.loads(files[FACTS])["state"])
    with convert_content_errors(checkpoint / _CHECKSUMS):
        state.image_checksums = arrays_from_bytes(files[_CHECKSUMS]) if _CHECKSUMS in files else {}
    if state.average is not None and AVERAGE_WEIGHTS in files:
        with convert_content_errors(checkpoint / AVERAGE_WEIGHTS):
            averages = select_own_tensors(state.model, tensors_from_bytes(files[AVERAGE_WEIGHTS]))
            state.average.load(averages, where=str(checkpoint / AVERAGE_WEIGHTS))
    elif state.average is not None:  # a fork that starts to average
        state.average.reset()
    # last: without statistics of their own, replicas copy the model's
    if state.replica_statistics is not None:
        where, content = checkpoint / REPLICAS, files.get(REPLICAS)
        with convert_content_errors(where):
            statistics = None if content is None else tensors_from_bytes(content)
            state.replica_statistics.load(statistics, where=str(where))


def load_weights(model: nn.Module, content: bytes, *, where: Path) -> None:
    """Load a checkpoint's weights into a model; names and shapes must match exactly."""
    with convert_content_errors(where):
        tensors = select_own_tensors(model, tensors_from_bytes(content))
    load_tensors(model, tensors, where=str(where))


@contextmanager
def convert_content_errors(where: Path) -> Iterator[None]:
    """Context that turns the errors of a file with unexpected contents into a CheckpointError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, SafetensorError) as cause:
        raise CheckpointError(
            f"{where}: is damaged, or was not written by Phalanx ({type(cause).__name__}: {cause})"
        ) from cause
