"""The passes of one stage of a model, in training and in evaluation."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phalanx.engine.evaluate import ValidBatch
from phalanx.engine.step import MicroBatch, PassParts, RunTurn, Scale
from phalanx.parallel.stage_links import IncomingTensor, StageLinks
from phalanx.plan.pipeline import Pass
from phalanx.ranges import RANGES


class _StoredPass(NamedTuple):
    """The tensors of a micro-batch that a stage keeps between forward and backward pass."""

    input: Tensor
    output: Tensor  # in the last stage, the loss


def build_stage_turn(
    parts: PassParts, links: StageLinks, order: Callable[..., Sequence[Pass]]
) -> RunTurn:
    """A function that runs the passes of a turn through one stage.

    order: the passes of a stage for a number of micro-batches, as `Pipeline.order` returns them.
    While a pass runs, the next pass's input is already being received.
    """

    def run_turn(
        passes: Sequence[Sequence[MicroBatch]], loss_scale: Scale, is_last: bool
    ) -> Tensor:
        with RANGES("between stages"):
            labelled = _share_labels(passes, links)
            turn = _StageTurn(parts, links, labelled, loss_scale)
            links.begin_passes()
            steps = order(links.stage, passes=len(passes))
            incoming = turn.start_receiving(steps[0])
            for index, one in enumerate(steps):
                arrived = incoming or turn.start_receiving(one)
                incoming = (
                    turn.start_receiving(steps[index + 1]) if index + 1 < len(steps) else None
                )
                turn.run(one, arrived)
            links.flush()
            return links.broadcast(turn.totals, stage=-1)

    return run_turn


def _share_labels(
    passes: Sequence[Sequence[MicroBatch]], links: StageLinks
) -> list[tuple[MicroBatch, ...]]:
    """The micro-batches with the labels of the first stage, which the last stage needs."""
    labels = links.send_labels(torch.stack([one.labels for batches in passes for one in batches]))
    rows = iter(labels)
    return [tuple(one._replace(labels=next(rows)) for one in batches) for batches in passes]


class _StageTurn:
    """The state of a turn that is running in one stage."""

    def __init__(
        self,
        parts: PassParts,
        links: StageLinks,
        passes: Sequence[Sequence[MicroBatch]],
        loss_scale: Scale,
    ) -> None:
        self._parts, self._links = parts, links
        self._passes, self._loss_scale = passes, loss_scale
        self._stored: dict[int, _StoredPass] = {}
        wide = passes[0][0].images.dtype == torch.float64
        dtype = torch.float64 if wide else torch.float32
        self.totals = torch.zeros(2, dtype=dtype, device=passes[0][0].labels.device)

    def start_receiving(self, one: Pass) -> IncomingTensor | None:
        """Start receiving what a pass needs from a neighbouring stage; None if it needs nothing."""
        if one.kind == "forward":
            return None if self._links.is_first else self._links.receive_input()
        return None if self._links.is_last else self._links.receive_gradient()

    def run(self, one: Pass, arrived: IncomingTensor | None) -> None:
        """Run a pass, with what a neighbouring stage sent for it."""
        if one.kind == "forward":
            self._stored[one.number] = self._run_forward(self._passes[one.number], arrived)
        else:
            self._run_backward(self._stored.pop(one.number), arrived)

    def _run_forward(
        self, batches: Sequence[MicroBatch], arrived: IncomingTensor | None
    ) -> _StoredPass:
        parts, links = self._parts, self._links
        mixes = parts.draw_mixes(batches) if links.is_first or links.is_last else []
        if arrived is None:
            x = parts.join_images(batches, mixes)
        else:
            x = arrived.wait().requires_grad_()
        output = parts.forward(x, [batch.first for batch in batches])
        if not links.is_last:
            links.send_output(output)
            return _StoredPass(x, output)
        targets = parts.mix_targets(batches, mixes)
        factor = parts.find_loss_factor(self._loss_scale)
        with RANGES("loss"):
            loss, totals = parts.compute_loss(output, targets, factor)
        self.totals += totals
        return _StoredPass(x, loss)

    def _run_backward(self, stored: _StoredPass, arrived: IncomingTensor | None) -> None:
        gradient = None if arrived is None else arrived.wait()
        with RANGES("backward"):
            torch.autograd.backward(stored.output, gradient)
        if stored.input.grad is not None:
            self._links.send_gradient(stored.input.grad)


class StagedScoring(nn.Module):
    """One stage of a model that is scored, called with batches of images like the whole model.

    The last stage returns the logits, other stages return zeros for a single class.
    """

    def __init__(
        self, part: nn.Module, links: StageLinks, gather: Callable[[Any], list[Any]]
    ) -> None:
        super().__init__()
        self._part, self._links, self._gather_all = part, links, gather
        self.interrupted = False

    def gather(self, value: Any) -> list[Any]:
        """The results of the last stages; None from any stage means that it was interrupted."""
        return self._gather_all(value if self._links.is_last or value is None else {})

    def forward(self, images: Tensor) -> Tensor:
        """The logits in the last stage; meaningless zeros in the others."""
        links = self._links
        links.begin_passes()
        x = images if links.is_first else links.receive_input().wait()
        output: Tensor = self._part(x)
        if links.is_last:
            return output
        links.send_output(output)
        return torch.zeros(len(images), 1, device=output.device)

    def share(
        self, batches: Iterator[ValidBatch], interrupted: Callable[[], bool]
    ) -> Iterator[ValidBatch]:
        """The first stage's batches, in every stage; labels and indices only in the last."""
        links, self.interrupted = self._links, False
        for batch in batches:
            header = torch.tensor([interrupted(), len(batch.labels)], device=batch.labels.device)
            stop, rows = links.broadcast(header, stage=0).tolist()
            self.interrupted = bool(stop)
            numbers = torch.zeros(2, rows, dtype=batch.labels.dtype, device=batch.labels.device)
            if links.is_first:
                numbers = torch.stack([batch.labels, batch.indices])
            numbers = links.broadcast(numbers, stage=0)
            labels, indices = numbers if links.is_last else torch.zeros_like(numbers)
            images = (
                batch.images
                if links.is_first
                else batch.images.new_empty((rows, *batch.images.shape[1:]))
            )
            yield ValidBatch(images, labels, indices)
        links.flush()
