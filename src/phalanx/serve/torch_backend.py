"""A run or checkpoint by torch: the model as `validate` scores it, folded and captured on a GPU."""

from pathlib import Path

import numpy as np
import torch

from phalanx import __version__
from phalanx.assemble.feed import build_normaliser
from phalanx.assemble.scorable import read_checkpoint
from phalanx.assemble.score import open_checkpoint
from phalanx.engine.step import compute_logits
from phalanx.export.metadata import LOGITS, ModelMetadata
from phalanx.serve.backend import BackendOptions
from phalanx.serve.batching import Outputs, Rows
from phalanx.serve.onnx_backend import list_sizes


class TorchBackend:
    """A session's model, with the weights of its best checkpoint."""

    kinds = ("tensor", "image")

    def __init__(self, path: Path, options: BackendOptions) -> None:
        self.where = path
        flags = {**options.flags, "device": options.device, "threads": str(options.threads)}
        checkpoint = read_checkpoint(path, flags, wanted=options.checkpoint)
        self.choice = checkpoint.choice
        session = open_checkpoint(checkpoint)
        facts = checkpoint.start.facts
        self.metadata = ModelMetadata(
            name=facts["run"],
            model=session.config.model.model,
            classes=session.classes,
            preprocessing=session.preprocessing,
            preprocessing_fingerprint=session.preprocessing.fingerprint,
            input="tensor",
            run=facts["run"],
            step=facts["state"]["step"],
            phalanx=__version__,
        )
        self._session, self._model = session, session.find_scoring_model()
        self._normaliser = build_normaliser(session.preprocessing, session.device)
        self.runtime = f"torch {torch.__version__}, {options.device}"
        # each size is captured as a graph of its own
        self.sizes = list_sizes(options.max_batch) if session.device.type == "cuda" else ()

    @torch.inference_mode()
    def run(self, rows: Rows) -> Outputs:
        """The outputs for a batch."""
        if rows.dtype == np.uint8:
            images = self._normaliser(np.ascontiguousarray(rows))
        else:
            images = torch.from_numpy(np.ascontiguousarray(rows)).to(self._session.device)
            images = images.contiguous(memory_format=torch.channels_last)
        logits = compute_logits(self._model, images, self._session.options)
        return {LOGITS: logits.cpu().numpy()}  # waits for the device
