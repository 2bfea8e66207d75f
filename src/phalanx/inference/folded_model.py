"""A model that scores: batch norms folded, in 16 bits, one CUDA graph for each batch size."""

from collections import Counter, OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.inference.conv_ways import measuring
from phalanx.inference.fold import FoldedUnit, NotFoldable, fold_unit
from phalanx.kernels.choices import CHOICES
from phalanx.kernels.fused import find_fused
from phalanx.models.units import UnitModel

_MOST_GRAPHS = 8  # sizes of images that are remembered
_PATIENCE = 16  # batches of a size before it is worth compiling kernels for it
_Size = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    images: Tensor  # as the stem reads them
    logits: Tensor


class FoldedModel(nn.Module):
    """Scores as a model does in evaluation, by weights that are folded and in 16 bits.

    The model's weights are taken over by `refresh`, never looked at otherwise. Units that folding
    does not know are run by their own modules, and then nothing is captured. `plain` says why.
    measures: whether the fastest kernels are found by timing them, which takes some seconds for
    each size of images. patience: how many batches of a size are left to the modules, because
    kernels must be compiled for those that follow, and a few images do not wait for that.
    """

    @torch.inference_mode(mode=False)  # what it keeps is written to wherever it is refreshed
    @torch.no_grad()
    def __init__(
        self, model: UnitModel, half: torch.dtype, *, measures: bool = False, patience: int = 0
    ) -> None:
        super().__init__()
        self._choosing = measuring if measures else nullcontext
        self._patience = patience
        self._seen: Counter[_Size] = Counter()
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
        self._versions = self._find_versions()

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the model's weights and statistics as they are now."""
        self._live[0].eval()
        for unit in self._units.values():
            for layer in unit.layers:
                layer.refresh()
        self._versions = self._find_versions()

    def refresh_if_changed(self) -> None:
        """`refresh` where torch has written to a weight since; writes of graphs are not seen."""
        if self._versions != self._find_versions():
            self.refresh()

    def _find_versions(self) -> list[int]:
        model = self._live[0]
        tensors = (*model.parameters(), *model.buffers())
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]

    @torch.inference_mode()
    def forward(self, images: Tensor) -> Tensor:
        """Logits of a normalised batch."""
        size = (tuple(images.shape), images.dtype)
        self._seen[size] += 1
        with torch.autocast(images.device.type, enabled=False):
            if self._seen[size] <= self._patience:
                return self._run_modules(images)
            if self.plain or not images.is_cuda:
                return self._run(images)
            return self._replay(images, size)

    def _run_modules(self, images: Tensor) -> Tensor:
        model = self._live[0]
        if model.training:
            model.eval()
        with torch.autocast(images.device.type, dtype=self._half):
            logits: Tensor = model(images)
        return logits

    def _run(self, x: Tensor) -> Tensor:
        model = self._live[0]
        for unit in model.units:
            if unit in self._units:
                x = self._units[unit].run(x)
                continue
            with torch.autocast(x.device.type, dtype=self._half):
                x = model.run_unit(unit, x)
        return x

    def _replay(self, images: Tensor, size: _Size) -> Tensor:
        """Run the first batch of a size as it comes, capture the second, then replay."""
        if self._seen[size] == self._patience + 1:
            with torch.backends.cudnn.flags(enabled=True, benchmark=True), self._choosing():
                CHOICES.compile_all(lambda: self._run(images))
                return self._run(images)
        if size not in self._graphs:
            self._graphs[size] = self._capture(images)
        self._graphs.move_to_end(size)
        if len(self._graphs) > _MOST_GRAPHS:
            self._graphs.popitem(last=False)
        found = self._graphs[size]
        if found is None:
            return self._run(images)
        self._take(images, found.images)
        found.graph.replay()
        return found.logits.clone()

    def _take(self, images: Tensor, out: Tensor | None) -> Tensor:
        take = next(iter(self._units.values())).take
        if take is not None:
            return take(images, out)
        return images.clone() if out is None else out.copy_(images)

    def _capture(self, images: Tensor) -> _Captured | None:
        static, graph = self._take(images, None), torch.cuda.CUDAGraph()
        # other threads write checkpoints and watch ranks meanwhile
        try:
            with (
                torch.backends.cudnn.flags(enabled=True, benchmark=True),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                logits = self._run(static)
        except torch.OutOfMemoryError:  # a graph's memory is its own, whatever else is free
            return None
        self._pool = graph.pool()
        return _Captured(graph, static, logits)


def fold_model(
    model: nn.Module,
    half: torch.dtype | None,
    *,
    measures: bool = False,
    patience: int = _PATIENCE,
) -> FoldedModel | None:
    """The model as it scores; None where its own modules are as good."""
    if half is None or not isinstance(model, UnitModel) or not next(model.parameters()).is_cuda:
        return None
    has_kernels = find_fused("phalanx.inference.layers_fused.convolve") is not None
    if type(model).forward is not UnitModel.forward or not has_kernels:
        return None
    folded = FoldedModel(model, half, measures=measures, patience=patience)
    return folded if len(folded.plain) < len(model.units) else None
