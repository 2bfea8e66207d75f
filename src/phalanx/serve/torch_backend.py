"""A run or checkpoint, run by torch as `validate` does: folded, and on a GPU as CUDA graphs.

On a CPU it is the network that would be exported, which has the activation map, too.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from phalanx import __version__
from phalanx.assemble.build import build_normaliser
from phalanx.assemble.score import open_checkpoint
from phalanx.assemble.session import Session
from phalanx.engine.step import compute_logits
from phalanx.export.metadata import ACTIVATION_MAP, LOGITS, ModelMetadata
from phalanx.export.network import ExportNetwork, copy_network, find_head
from phalanx.export.options import read_scorable_checkpoint
from phalanx.models.units import UnitModel
from phalanx.serve.backend import BackendOptions
from phalanx.serve.batching import Outputs, Rows
from phalanx.serve.onnx_backend import list_batch_sizes


class TorchBackend:
    """A session's model, with the weights of its best checkpoint."""

    input_kinds = ("tensor", "image")

    def __init__(self, path: Path, options: BackendOptions) -> None:
        self.path = path
        flags = {**options.flags, "device": options.device, "threads": str(options.threads)}
        checkpoint = read_scorable_checkpoint(
            path, flags, selection=options.checkpoint, averaged=options.averaged
        )
        session = open_checkpoint(checkpoint)
        facts, network = checkpoint.start.facts, _copy_with_head(session)
        self.metadata = ModelMetadata(
            name=facts["run"],
            model=session.config.model.model,
            classes=session.classes,
            preprocessing=session.preprocessing,
            preprocessing_fingerprint=session.preprocessing.fingerprint,
            has_activation_map=network is not None,
            averaged=checkpoint.start.use == "score average" or "averaged" in facts,
            run=facts["run"],
            step=facts["state"]["step"],
            phalanx=__version__,
        )
        self._session = session
        self._model: nn.Module = session.find_scoring_model()
        if network is not None:
            folded = ExportNetwork(network, self.metadata, fold=True)
            self._model = folded.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._normaliser = build_normaliser(session.preprocessing, session.device)
        self.runtime = f"torch {torch.__version__}, {options.device}"
        # each size is captured as a graph of its own
        self.batch_sizes = (
            list_batch_sizes(options.max_batch) if session.device.type == "cuda" else ()
        )

    @torch.inference_mode()
    def run(self, rows: Rows) -> Outputs:
        """The outputs for a batch."""
        images = self._to_device(np.ascontiguousarray(rows))
        if not self.metadata.has_activation_map:
            logits = compute_logits(self._model, images, self._session.options)
            return {LOGITS: logits.cpu().numpy()}  # waits for the device
        logits, seen = self._model(images)
        return {LOGITS: logits.numpy(), ACTIVATION_MAP: seen.numpy()}

    def _to_device(self, rows: Rows) -> Tensor:
        if rows.dtype == np.uint8:
            return self._normaliser(rows)
        images = torch.from_numpy(rows).to(self._session.device)
        return images.contiguous(memory_format=torch.channels_last)


def _copy_with_head(session: Session) -> UnitModel | None:
    """The exported network, if it has an activation map and no faster model exists."""
    if session.device.type != "cpu" or session.options.flip or session.options.half is not None:
        return None
    network = copy_network(session)
    return network if find_head(network) is not None else None
