"""A model that scores: batch norms folded, in 16 bits, one CUDA graph for each batch size."""

import threading
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.inference.fold import FoldedUnit, NotFoldable, fold_unit
from phalanx.kernels.choices import CHOICES
from phalanx.kernels.gpu import find_gpu_problem
from phalanx.models.units import UnitModel

_MOST_GRAPHS = 8  # sizes of images that are remembered
_Size = tuple[tuple[int, ...], torch.dtype]
# a graph has one input and one output, and cuDNN's flags are the process's: one thread at a time
_ONE_THREAD = threading.Lock()


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    images: Tensor  # as the stem reads them
    logits: Tensor


class FoldedModel(nn.Module):
    """Scores as a model does in evaluation, by weights that are folded and in 16 bits.

    The model's weights are taken over by `refresh`, never looked at otherwise. Units that folding
    does not know are run by their own modules, and then nothing is captured. `plain` says why.
    For the first batch of a size kernels are compiled, which takes some seconds. It may be called
    by several threads, on the same stream.
    """

    @torch.inference_mode(mode=False)  # what it keeps is written to wherever it is refreshed
    @torch.no_grad()
    def __init__(self, model: UnitModel, half: torch.dtype) -> None:
        super().__init__()
        self._half, self._live = half, (model,)  # in a tuple: it is not a part of this one
        self._units: dict[str, FoldedUnit] = {}
        self.plain: dict[str, str] = {}
        for unit, paths in model.units.items():
            try:
                modules = [model.get_submodule(path) for path in paths]
                self._units[unit] = fold_unit(modules, half)
            except NotFoldable as found:
                self.plain[unit] = str(found)
        self._graphs: OrderedDict[_Size, _Captured | None] = OrderedDict()  # None: no memory for it
        self._pool: Any = None  # of memory, which the graphs share: one runs at a time

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the model's weights and statistics as they are now."""
        self._live[0].eval()
        with _ONE_THREAD:
            for unit in self._units.values():
                for layer in unit.layers:
                    layer.refresh()

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a normalised batch."""
        device = images.device
        with _ONE_THREAD, _enter(device), torch.autocast(device.type, enabled=False):
            if self.plain or not images.is_cuda:
                return self._run(images)
            return self._replay(images)

    def _run(self, x: Tensor) -> Tensor:
        model = self._live[0]
        for unit in model.units:
            if unit in self._units:
                x = self._units[unit].run(x)
                continue
            with torch.autocast(x.device.type, dtype=self._half):
                x = model.run_unit(unit, x)
        return x

    def _replay(self, images: Tensor) -> Tensor:
        size = (tuple(images.shape), images.dtype)
        if size not in self._graphs:
            self._graphs[size] = self._capture(images)
        self._graphs.move_to_end(size)
        if len(self._graphs) > _MOST_GRAPHS:
            self._graphs.popitem(last=False)
        found = self._graphs[size]
        if found is None:
            with torch.backends.cudnn.flags(enabled=True, benchmark=True):
                return self._run(images)
        self._take(images, found.images)
        found.graph.replay()
        return found.logits.clone()

    def _take(self, images: Tensor, out: Tensor | None = None) -> Tensor:
        take = next(iter(self._units.values())).take
        if take is not None:
            return take(images, out)
        return images.clone() if out is None else out.copy_(images)

    @torch.inference_mode(mode=False)  # the images are written to in either mode
    @torch.no_grad()
    def _capture(self, images: Tensor) -> _Captured | None:
        """A graph for images of this size; None where there is no memory for one."""
        with torch.backends.cudnn.flags(enabled=True, benchmark=True):
            CHOICES.compile_all(lambda: self._run(images))
            self._run(images)  # in this thread: cuDNN keeps what it measured for each
            try:
                static, graph = self._take(images), torch.cuda.CUDAGraph()
                # other threads write checkpoints and watch ranks meanwhile
                with torch.cuda.graph(
                    graph,
                    pool=self._pool,
                    stream=_capturing_stream(images.device),
                    capture_error_mode="thread_local",
                ):
                    logits = self._run(static)
            except torch.OutOfMemoryError:  # a graph's memory is its own, whatever else is free
                return None
        self._pool = graph.pool()
        return _Captured(graph, static, logits)


def _enter(device: torch.device) -> AbstractContextManager[object]:
    """A block that launches and captures on this device: neither looks where the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def _capturing_stream(device: torch.device) -> torch.cuda.Stream:
    """One of the device's own: torch captures on a stream of whichever it captured on first."""
    return torch.cuda.Stream(device)


def fold_model(model: nn.Module, half: torch.dtype | None) -> FoldedModel | None:
    """The model as it scores; None where its own modules are as good."""
    if half is None or not isinstance(model, UnitModel) or not next(model.parameters()).is_cuda:
        return None
    if type(model).forward is not UnitModel.forward or find_gpu_problem() is not None:
        return None
    folded = FoldedModel(model, half)
    return folded if len(folded.plain) < len(model.units) else None
