"""A model for scoring, batch norms folded; on a GPU in 16 bits, one CUDA graph per batch size."""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.inference.cpu_layers import CPU_LAYERS, has_onednn
from phalanx.inference.fold import FoldedUnit, fold_unit, has_hooks
from phalanx.inference.gpu_layers import choose_gpu_layers
from phalanx.inference.layers import LayerTypes, NotFoldable
from phalanx.kernels.choices import CHOICES
from phalanx.kernels.gpu import find_gpu_problem, use_device
from phalanx.models.units import UnitModel

_MOST_GRAPHS = 8  # input shapes whose graphs are kept
_FEW_IMAGES, _FEW_PIXELS = 8, 2**16  # that a thread of a CPU scores at once, at least
_MOST_IMAGES = 2**15  # that a GPU scores at once: grids of kernels have 65,535 rows at most
_Size = tuple[tuple[int, ...], torch.dtype]
# a graph has one static input and output, and cuDNN's flags are global: one thread at a time
_ONE_THREAD = threading.Lock()


@dataclass(frozen=True)
class _CapturedGraph:
    graph: torch.cuda.CUDAGraph
    images: Tensor  # as the stem reads them
    logits: Tensor


class FoldedModel(nn.Module):
    """Scores like a model in evaluation mode, with folded weights.

    The model's weights are copied by `refresh` and not read otherwise. Units that cannot be folded
    run as plain modules, and then nothing is captured; `unfolded_units` says why. The first batch
    of a shape compiles kernels, which takes some seconds. Several threads may call it, on the same
    stream.
    """

    @torch.inference_mode(mode=False)  # `refresh` writes to its tensors in either mode
    @torch.no_grad()
    def __init__(self, model: UnitModel, types: LayerTypes) -> None:
        super().__init__()
        self._dtype, self._original = types.dtype, (model,)  # in a tuple: not a submodule
        self._structure = _list_structure(model)
        self._units: dict[str, FoldedUnit] = {}
        self.unfolded_units: dict[str, str] = {}
        for unit, paths in model.units.items():
            try:
                modules = [model.get_submodule(path) for path in paths]
                self._units[unit] = fold_unit(modules, types)
            except NotFoldable as found:
                self.unfolded_units[unit] = str(found)
        # None: there was no memory for a graph of this size
        self._graphs: OrderedDict[_Size, _CapturedGraph | None] = OrderedDict()
        self._pool: Any = None  # the memory pool that the graphs share: one runs at a time

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the model's weights and statistics as they are now."""
        self._original[0].eval()
        with _ONE_THREAD:
            for unit in self._units.values():
                for layer in unit.layers:
                    layer.refresh()

    @property
    def is_current(self) -> bool:
        """Whether the model still has the modules and hooks that it was folded with."""
        return self._structure == _list_structure(self._original[0])

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a normalised batch."""
        device = images.device
        is_captured = device.type == "cuda" and not self.unfolded_units
        run = self._replay if is_captured else self._run
        with _ONE_THREAD, use_device(device), torch.autocast(device.type, enabled=False):
            if len(images) <= (most := _count_images_at_once(images)):
                return run(images)
            return torch.cat([run(part) for part in images.split(most)])

    def _run(self, x: Tensor) -> Tensor:
        model = self._original[0]
        for unit in model.units:
            if unit in self._units:
                x = self._units[unit].run(x)
                continue
            in_half = self._dtype != torch.float32
            with torch.autocast(x.device.type, dtype=self._dtype, enabled=in_half):
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
        self._prepare_images(images, found.images)
        found.graph.replay()
        return found.logits.clone()

    def _prepare_images(self, images: Tensor, out: Tensor | None = None) -> Tensor:
        prepare_images = next(iter(self._units.values())).prepare_images
        if prepare_images is not None:
            return prepare_images(images, out)
        return images.clone() if out is None else out.copy_(images)

    @torch.inference_mode(mode=False)  # the images are written to in either mode
    @torch.no_grad()
    def _capture(self, images: Tensor) -> _CapturedGraph | None:
        """A graph for images of this shape; None if there is no memory for one."""
        with torch.backends.cudnn.flags(enabled=True, benchmark=True):
            CHOICES.compile_all(lambda: self._run(images))
            self._run(images)  # in this thread: cuDNN's benchmarks are cached per thread
            try:
                static, graph = self._prepare_images(images), torch.cuda.CUDAGraph()
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
        return _CapturedGraph(graph, static, logits)


def _list_structure(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    return [(module, has_hooks(module)) for module in model.modules()]


@cache
def _capturing_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of this device: torch's default capture stream is of the device used first."""
    return torch.cuda.Stream(device)


def _count_images_at_once(images: Tensor) -> int:
    """The largest batch to score at once: on a CPU, activations of more would leave its caches."""
    if images.device.type != "cpu":
        return _MOST_IMAGES
    pixels = images.shape[2] * images.shape[3]
    return torch.get_num_threads() * max(_FEW_IMAGES, _FEW_PIXELS // pixels)


def fold_model(model: nn.Module, half: torch.dtype | None) -> FoldedModel | None:
    """The model folded for scoring; None if it cannot be folded or gains nothing."""
    if not isinstance(model, UnitModel) or _runs_otherwise(model):
        return None
    types = _choose_layers(next(model.parameters()), half)
    if types is None:
        return None
    folded = FoldedModel(model, types)
    return folded if len(folded.unfolded_units) < len(model.units) else None


def _runs_otherwise(model: UnitModel) -> bool:
    """Whether a plugin's model does more than run its units in sequence."""
    kind = type(model)
    is_plain = kind.forward is UnitModel.forward and kind.run_unit is UnitModel.run_unit
    return not is_plain or has_hooks(model)


def _choose_layers(weight: Tensor, half: torch.dtype | None) -> LayerTypes | None:
    """The layers for a model with this weight, which computes in `half`, or in 32 bits if None."""
    device = weight.device
    if half is not None and device.type == "cuda":
        return choose_gpu_layers(half) if find_gpu_problem(device) is None else None
    is_plain = half is None and device.type == "cpu" and weight.dtype == torch.float32
    return CPU_LAYERS if is_plain and has_onednn() else None
