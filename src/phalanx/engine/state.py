"""What changes while training, and nothing else."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phalanx.engine.dynamic_loss_scale import DynamicLossScale
from phalanx.engine.weight_average import Averages
from phalanx.kernels.rounding import COUNTS
from phalanx.optim.half_weights import HalfWeights
from phalanx.optim.offload import Offload


class StepNumbers(NamedTuple):
    """What one step gave. Without top-1, no metrics are kept: its norm only shows soundness."""

    loss: float
    grad_norm: float
    top1: float | None

    @property
    def sound(self) -> bool:
        """Whether loss and gradients are finite."""
        return isfinite(self.loss) and isfinite(self.grad_norm)

    @property
    def told_norm(self) -> float | None:
        """The norm to write down: where metrics are kept, or where it is the trouble."""
        wanted = self.top1 is not None or not isfinite(self.grad_norm)
        return self.grad_norm if wanted else None


@dataclass
class Sums:
    """Running sums since the last log point; part of the state, so that a resume loses none.

    None where a step among them was not measured: a mean of the others would not be theirs.
    """

    steps: int = 0
    loss: float = 0.0
    grad_norm: float | None = 0.0
    top1: float | None = 0.0

    def add(self, row: StepNumbers) -> None:
        """Take one step in."""
        self.steps += 1
        self.loss += row.loss
        self.grad_norm = _plus(self.grad_norm, row.told_norm)
        self.top1 = _plus(self.top1, row.top1)

    def mean(self, total: float | None) -> float | None:
        """A sum over its steps, or None."""
        return None if total is None else total / self.steps


def _plus(total: float | None, number: float | None) -> float | None:
    """The sum of two numbers, where both are known."""
    return None if total is None or number is None else total + number


@dataclass
class Throughput:
    """Time spent training: waiting for data counts, evaluation and saving do not."""

    images: int = 0
    busy_s: float = 0.0
    wait_s: float = 0.0

    def add(self, *, images: int, busy_s: float, wait_s: float) -> None:
        """Take a stretch of training in."""
        self.images += images
        self.busy_s += busy_s
        self.wait_s += wait_s

    @property
    def images_per_second(self) -> float | None:
        """Rate over all that was measured, or None."""
        return self.images / self.busy_s if self.busy_s else None

    @property
    def data_wait(self) -> float | None:
        """Share of the time spent waiting for data, or None."""
        return self.wait_s / self.busy_s if self.busy_s else None


@dataclass
class TrainState:
    """Everything a checkpoint must bring back."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0
    scores: dict[int, float] = field(default_factory=dict)  # step to validation top-1
    sums: Sums = field(default_factory=Sums)
    clock: Throughput = field(default_factory=Throughput)
    bad_images: dict[str, str] = field(default_factory=dict)  # name to reason
    scaler: DynamicLossScale | None = None  # where the loss scale finds its own size
    half: HalfWeights | None = None  # where weights have 16 bits
    offload: Offload | None = None  # where the optimizer's state lies in host memory
    averages: Averages | None = None  # of the weights, where they are wanted
    counts: Tensor | None = None  # of all updates of 16-bit weights: kernels.rounding.COUNTS

    @contextmanager
    def wide_update(self) -> Iterator[Tensor | None]:
        """Within, weights are 32 bits wide and the optimizer's state lies beside them.

        Gives what will count the roundings, if there are.
        """
        with ExitStack() as stack:
            if self.offload is not None:
                stack.enter_context(self.offload.on_device())
            half = self.half
            yield None if half is None else stack.enter_context(half.in_float32(self.step))

    def follow(self, counts: Tensor | None) -> None:
        """Take an update into the averages and the counts, without waiting for it."""
        if self.averages is not None:
            self.averages.update(self.model, self.step)
        if counts is not None:
            self.counts = counts if self.counts is None else self.counts + counts

    def plain(self) -> dict[str, Any]:
        """The part that is no tensor, ready for JSON."""
        return {
            "step": self.step,
            "scores": {str(step): top1 for step, top1 in self.scores.items()},
            "sums": asdict(self.sums),
            "clock": asdict(self.clock),
            "bad_images": self.bad_images,
            "scaler": None if self.scaler is None else asdict(self.scaler),
            "counts": None if self.counts is None else self.counts.tolist(),
        }

    def restore_plain(self, plain: dict[str, Any]) -> None:
        """Take back what `plain` gave; a missing entry is an error, never a default."""
        self.step = plain["step"]
        self.scores = {int(step): top1 for step, top1 in plain["scores"].items()}
        self.sums = Sums(**plain["sums"])
        self.clock = Throughput(**plain["clock"])
        self.bad_images = dict(plain["bad_images"])
        if self.scaler is not None:
            kept = plain["scaler"]
            history = [(step, scale) for step, scale in kept["history"]]
            self.scaler = DynamicLossScale(**{**kept, "history": history})
        if plain.get("counts") is not None:
            device = next(self.model.parameters()).device
            older = [0.0] * (len(COUNTS) - len(plain["counts"]))  # the ways came later
            counts = [*plain["counts"], *older]
            self.counts = torch.tensor(counts, dtype=torch.float64, device=device)


def hash_weights(tensors: dict[str, Tensor]) -> str:
    """sha256 over name, dtype, shape and bytes of all parameters and buffers, sorted by name."""
    digest = sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(f"{name}\0{dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
