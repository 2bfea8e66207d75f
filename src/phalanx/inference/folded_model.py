"""A model that scores: batch norms folded, in 16 bits, one CUDA graph for each batch size."""

from collections import OrderedDict
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
    each size of images.
    """

    @torch.inference_mode(mode=False)  # what it keeps is written to wherever it is refreshed
    @torch.no_grad()
    def __init__(self, model: UnitModel, half: torch.dtype, *, measures: bool = False) -> None:
        super().__init__()
        self._choosing = measuring if measures else nullcontext
        self._half, self._live = half, (model,)  # in a tuple: it is not a part of this one
        self._units: dict[str, FoldedUnit] = {}
        self.plain: dict[str, str] = {}
        for unit, paths in model.units.items():
            try:
                modules = [model.get_submodule(path) for path in paths]
                self._units[unit] = fold_unit(modules, half)
            except NotFoldable as found:
                self.plain[unit] = str(found)
        self._graphs: OrderedDict[_Size, _Captured | None] = OrderedDict()
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
        with torch.autocast(images.device.type, enabled=False):
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
        """Run the first batch of a size as it comes, capture the second, then replay."""
        size = (tuple(images.shape), images.dtype)
        if size not in self._graphs:
            with torch.backends.cudnn.flags(enabled=True, benchmark=True), self._choosing():
                CHOICES.compile_all(lambda: self._run(images))
                logits = self._run(images)
            self._remember(size, None)
            return logits
        found = self._graphs[size]
        if found is None:
            found = self._capture(images)
        self._remember(size, found)
        self._take(images, found.images)
        found.graph.replay()
        return found.logits.clone()

    def _take(self, images: Tensor, out: Tensor | None) -> Tensor:
        take = next(iter(self._units.values())).take
        if take is not None:
            return take(images, out)
        return images.clone() if out is None else out.copy_(images)

    def _remember(self, size: _Size, found: _Captured | None) -> None:
        self._graphs[size] = found
        self._graphs.move_to_end(size)
        if len(self._graphs) > _MOST_GRAPHS:
            self._graphs.popitem(last=False)

    def _capture(self, images: Tensor) -> _Captured:
        static, graph = self._take(images, None), torch.cuda.CUDAGraph()
        # other threads write checkpoints and watch ranks meanwhile
        with (
            torch.backends.cudnn.flags(enabled=True, benchmark=True),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            logits = self._run(static)
        self._pool = graph.pool()
        return _Captured(graph, static, logits)


def fold_model(
    model: nn.Module, half: torch.dtype | None, *, measures: bool = False
) -> FoldedModel | None:
    """The model as it scores; None where its own modules are as good."""
    if half is None or not isinstance(model, UnitModel) or not next(model.parameters()).is_cuda:
        return None
    has_kernels = find_fused("phalanx.inference.layers_fused.convolve") is not None
    if type(model).forward is not UnitModel.forward or not has_kernels:
        return None
    folded = FoldedModel(model, half, measures=measures)
    return folded if len(folded.plain) < len(model.units) else None
