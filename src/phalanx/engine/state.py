"""The training state: what changes while training, and nothing else."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from phalanx.engine.dynamic_loss_scale import DynamicLossScale
from phalanx.engine.fused_update import DeviceLossScale, FusedUpdate
from phalanx.engine.replica_statistics import ReplicaStatistics
from phalanx.engine.tensor_bytes import view_bytes
from phalanx.engine.weight_average import WeightAverage
from phalanx.kernels.rounding import COUNTS
from phalanx.models.units import ModelPart
from phalanx.optim.half_weights import HalfWeights
from phalanx.optim.offload import OffloadedState


class StepMetrics(NamedTuple):
    """The metrics of one step. Top-1 is None if metrics are off."""

    loss: float
    grad_norm: float
    top1: float | None

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradients are finite."""
        return isfinite(self.loss) and isfinite(self.grad_norm)

    @property
    def reported_grad_norm(self) -> float | None:
        """The gradient norm if metrics are on or the norm is not finite, else None."""
        reported = self.top1 is not None or not isfinite(self.grad_norm)
        return self.grad_norm if reported else None


@dataclass
class MetricSums:
    """Sums since the last log point; part of the state, so that a resume loses no step.

    None if a step was not measured: a mean over the others would not be that of the interval.
    """

    steps: int = 0
    loss: float = 0.0
    grad_norm: float | None = 0.0
    top1: float | None = 0.0

    def add(self, row: StepMetrics) -> None:
        """Add one step."""
        self.steps += 1
        self.loss += row.loss
        self.grad_norm = _add_known(self.grad_norm, row.reported_grad_norm)
        self.top1 = _add_known(self.top1, row.top1)

    def mean(self, total: float | None) -> float | None:
        """A sum divided by the number of steps, or None."""
        return None if total is None else total / self.steps


def _add_known(total: float | None, number: float | None) -> float | None:
    return None if total is None or number is None else total + number


@dataclass
class Throughput:
    """Time spent training: waiting for data counts, evaluation and saving do not."""

    images: int = 0
    busy_s: float = 0.0
    wait_s: float = 0.0

    def add(self, *, images: int, busy_s: float, wait_s: float) -> None:
        """Add the images and times of some steps."""
        self.images += images
        self.busy_s += busy_s
        self.wait_s += wait_s

    @staticmethod
    def combine(ranks: Sequence["Throughput"]) -> "Throughput":
        """The throughput of ranks that train together: their images, with the longest times."""
        busy, wait = max(r.busy_s for r in ranks), max(r.wait_s for r in ranks)
        return Throughput(ranks[0].images, busy, wait)

    @property
    def images_per_second(self) -> float | None:
        """The mean rate, or None if nothing was measured."""
        return self.images / self.busy_s if self.busy_s else None

    @property
    def data_wait(self) -> float | None:
        """Share of the time spent waiting for data, or None if nothing was measured."""
        return self.wait_s / self.busy_s if self.busy_s else None


@dataclass
class TrainState:
    """Everything that a checkpoint must restore.

    The model is the bare one, under its own parameter names: whatever wraps it for a step (DDP,
    compilation, a CUDA graph) lives inside the step's forward_backward and is never saved.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0
    scores: dict[int, float] = field(default_factory=dict)  # step to validation top-1
    sums: MetricSums = field(default_factory=MetricSums)
    throughput: Throughput = field(default_factory=Throughput)
    bad_images: dict[str, str] = field(default_factory=dict)  # name to reason
    records: dict[str, tuple[int, int]] = field(default_factory=dict)  # size, CRC-32 of each file
    # checksums of the images that were read, by split
    image_checksums: dict[str, NDArray[np.uint32]] = field(default_factory=dict)
    image_check: dict[str, Any] | None = None  # fields of an ImageCheck, if images are checked
    # if the loss scale is adaptive
    scaler: DynamicLossScale | DeviceLossScale | None = None
    fused_update: FusedUpdate | None = None  # if kernels do everything after the backward pass
    half: HalfWeights | None = None  # if the weights are 16-bit
    offload: OffloadedState | None = None  # if the optimizer state is in host memory
    replica_statistics: ReplicaStatistics | None = None  # if there are several replicas
    average: WeightAverage | None = None  # the moving average of the weights, if there is one
    rounding_counts: Tensor | None = None  # over all updates of 16-bit weights, named by COUNTS
    # if the model is one stage: merges the tensors of all stages into one dict, in the first stage
    gather_to_first: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None = None

    @contextmanager
    def update_context(self) -> Iterator[Tensor | None]:
        """Context in which weights are float32 and the optimizer state is on their device.

        Yields the tensor of rounding counts, or None if weights are not 16-bit.
        """
        with ExitStack() as stack:
            if self.offload is not None:
                stack.enter_context(self.offload.on_device())
            half = self.half
            yield None if half is None else stack.enter_context(half.in_float32(self.step))

    def record_update(self, counts: Tensor | None) -> None:
        """Add an update to the weight average and the rounding counts, without waiting for it."""
        if self.average is not None:
            self.average.update(self.step)
            if self.replica_statistics is not None:
                self.replica_statistics.update_average(self.step)
        if counts is not None:
            so_far = self.rounding_counts
            self.rounding_counts = counts if so_far is None else so_far + counts

    def load_mean_statistics(self) -> None:
        """Give the model its replicas' mean statistics, to score or save; all ranks call it."""
        if self.replica_statistics is not None:
            self.replica_statistics.load_mean_statistics()

    def sum_rounding_counts(self) -> Tensor | None:
        """The rounding counts of the whole model, in the first stage; all stages must call it."""
        own = self.rounding_counts
        if self.gather_to_first is None or self.half is None:
            return own
        name = next(name for name, _ in self.model.named_parameters())
        counts = torch.zeros(len(COUNTS), dtype=torch.float64) if own is None else own.cpu()
        found = self.gather_to_first({name: counts})
        return torch.stack([*found.values()]).sum(0) if found else None

    def to_dict(self) -> dict[str, Any]:
        """What is not a tensor, under the names that checkpoints have always had.

        If the model has stages, all of them must call it.
        """
        counts = self.sum_rounding_counts()
        return {
            "step": self.step,
            "scores": {str(step): top1 for step, top1 in self.scores.items()},
            "sums": asdict(self.sums),
            "clock": asdict(self.throughput),
            "bad_images": self.bad_images,
            "image_check": self.image_check,
            "scaler": None if self.scaler is None else self.scaler.to_dict(),
            "counts": None if counts is None else counts.tolist(),
            "records": self.records,
        }

    def load_dict(self, values: dict[str, Any]) -> None:
        """Restore what `to_dict` returned; a missing entry is an error, never a default.

        Except those that earlier releases did not have.
        """
        self.step = values["step"]
        self.scores = {int(step): top1 for step, top1 in values["scores"].items()}
        self.sums = MetricSums(**values["sums"])
        self.throughput = Throughput(**values["clock"])
        self.bad_images = dict(values["bad_images"])
        self.image_check = values.get("image_check")
        scale = values["scaler"]
        if self.scaler is not None and scale is not None:  # a fork may differ from its parent here
            self._load_scale(DynamicLossScale.from_dict(scale))
        is_later_stage = isinstance(self.model, ModelPart) and not self.model.is_first
        if values.get("counts") is not None and not is_later_stage:
            device = next(self.model.parameters()).device
            missing = len(COUNTS) - len(values["counts"])  # the first release counted fewer
            counts = [*values["counts"], *[0.0] * missing]
            self.rounding_counts = torch.tensor(counts, dtype=torch.float64, device=device)

    def restart_counts(self) -> None:
        """Count skipped steps, changes of the loss scale and rounding from this step on."""
        self.rounding_counts = None
        if self.scaler is not None:
            scale = DynamicLossScale.from_dict(self.scaler.to_dict())
            scale.skipped, scale.history = 0, [(self.step, scale.scale)]
            self._load_scale(scale)

    def _load_scale(self, scale: DynamicLossScale) -> None:
        """Continue with a loss scale, on the device if the current one is there."""
        if isinstance(self.scaler, DeviceLossScale):
            self.scaler.load(scale)
        else:
            self.scaler = scale


def hash_weights(tensors: dict[str, Tensor]) -> str:
    """sha256 over name, dtype, shape and bytes of all parameters and buffers, sorted by name."""
    digest = sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(f"{name}\0{dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(view_bytes(tensor))
    return digest.hexdigest()


@torch.no_grad()
def checksum_weights(model: nn.Module) -> int:
    """A quick checksum of a model's weights, on any device. Waits for the device."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [w.view(integers[w.element_size()]).sum(dtype=torch.int64) for w in model.parameters()]
    return int(torch.stack(sums).sum())
