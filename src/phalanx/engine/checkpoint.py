"""From a training state to a checkpoint and back, and saving that training does not wait for."""

import json
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor, nn

from phalanx.engine.checkpoint_store import AVERAGES, FORMAT, prune, read_files, write_checkpoint
from phalanx.engine.state import TrainState, hash_weights
from phalanx.errors import DivergedError
from phalanx.models.weights import NORM_LAYOUT_KEY, load_tensors
from phalanx.optim.named_state import name_optimizer_state, restore_optimizer_state

WEIGHTS, _OPTIMIZER, FACTS = "weights.safetensors", "optimizer.safetensors", "facts.json"


@dataclass(frozen=True)
class _Snapshot:
    """A state at rest: copies that training no longer touches."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    averages: dict[str, Tensor]  # empty where none are made
    plain: dict[str, Any]

    @property
    def step(self) -> int:
        """The step it was taken at."""
        return int(self.plain["step"])


def take_snapshot(state: TrainState) -> _Snapshot:
    """Copy the state to host memory. Waits for the device."""

    def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}

    if state.offload is not None:
        state.offload.synchronize()
    plain = json.loads(json.dumps(state.plain()))
    optimizer = name_optimizer_state(state.model, state.optimizer)
    averages = {} if state.averages is None else state.averages.named_state()
    return _Snapshot(copied(state.model.state_dict()), copied(optimizer), copied(averages), plain)


def _pack(snapshot: _Snapshot, about: dict[str, Any]) -> dict[str, bytes]:
    """The files of a checkpoint; `about` is what travels with every checkpoint of a run."""
    facts = {
        "format": FORMAT,
        "state": snapshot.plain,
        "weights_sha256": hash_weights(snapshot.weights),
        **about,
    }
    files = {
        WEIGHTS: tensors_to_bytes(
            snapshot.weights, metadata={NORM_LAYOUT_KEY: about["norm_layout"]}
        ),
        _OPTIMIZER: tensors_to_bytes(snapshot.optimizer),
        FACTS: json.dumps(facts, indent=1).encode(),
    }
    if snapshot.averages:
        files[AVERAGES] = tensors_to_bytes(snapshot.averages)
    return files


class Saver:
    """Writes checkpoints in the background, one at a time; a failure is raised at the next call."""

    def __init__(self, shelf: Path, *, keep: int, about: dict[str, Any]) -> None:
        self._shelf, self._keep, self._about = shelf, keep, about
        self._thread: Thread | None = None
        self._failure: Exception | None = None

    def save(self, state: TrainState) -> None:
        """Copy the state now and write it while training goes on."""
        self.wait()
        snapshot = take_snapshot(state)
        self._thread = Thread(target=self._write, args=(snapshot,), name="saver")
        self._thread.start()

    def wait(self) -> None:
        """Return once everything handed over is on disk, or raise what prevented it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _write(self, snapshot: _Snapshot) -> None:
        try:
            _refuse_unsound(snapshot)
            write_checkpoint(self._shelf, snapshot.step, _pack(snapshot, self._about))
            scores = {int(step): top1 for step, top1 in snapshot.plain["scores"].items()}
            prune(self._shelf, keep=self._keep, scores=scores)
        except Exception as failure:  # noqa: BLE001 - carried to the training thread, raised there
            self._failure = failure


def _refuse_unsound(snapshot: _Snapshot) -> None:
    """A step of finite numbers may yet throw weights out of them; such weights are not saved."""
    for name, tensor in snapshot.weights.items():
        if not bool(tensor.isfinite().all()):
            raise DivergedError(
                f"step {snapshot.step:,}: {name} is not finite any more and was not saved; start "
                "again, or fork an earlier checkpoint, with a lower --lr or a longer --warmup-epoch"
            )


def restore(state: TrainState, checkpoint: Path) -> None:
    """Put a checkpoint's contents into a freshly built state."""
    files = read_files(checkpoint)
    load_weights(state.model, files[WEIGHTS], where=checkpoint / WEIGHTS)
    restore_optimizer_state(state.model, state.optimizer, tensors_from_bytes(files[_OPTIMIZER]))
    if state.offload is not None:
        state.offload.to_host()
    state.restore_plain(json.loads(files[FACTS])["state"])
    if state.averages is not None and AVERAGES in files:
        kept = tensors_from_bytes(files[AVERAGES])
        state.averages.restore(kept, where=str(checkpoint / AVERAGES))
    elif state.averages is not None:  # a fork that begins to average
        state.averages.begin_with(state.model)


def load_weights(model: nn.Module, content: bytes, *, where: Path) -> None:
    """Fill a model from a checkpoint's weights; names and shapes must be exactly its own."""
    load_tensors(model, tensors_from_bytes(content), where=str(where))
