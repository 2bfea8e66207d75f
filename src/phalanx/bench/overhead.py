"""The overhead of Phalanx over a bare PyTorch loop with the same batches, ready-made."""

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F

from phalanx.assemble.prepare import prepare_new_run
from phalanx.assemble.session import Session
from phalanx.assemble.train import TrainingRun, build_loop_dependencies, open_training
from phalanx.bench.paired_ratio import PairedRatio, measure_pairs
from phalanx.config.read import read_settings
from phalanx.engine.train import MetricsBuffer, fit
from phalanx.errors import Stopped


def measure_overhead(*, pairs: int, steps: int, done: Callable[[int], None]) -> PairedRatio:
    """Images/s of the training loop over a bare one, in interleaved blocks of that many steps."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        flags = {"run-dir": str(Path(folder) / "run"), "steps": str((pairs + 2) * steps)}
        silence = stack.enter_context(open(os.devnull, "w"))
        prepared = prepare_new_run(read_settings("demo", flags), line="bench")
        training = open_training(prepared, stack, stream=silence)
        ours, bare = _phalanx_block(training, steps), _bare_block(training.session, steps)
        ours()  # fills caches, chooses kernels
        bare()
        return measure_pairs(ours, bare, pairs=pairs, done=done)


def _phalanx_block(training: TrainingRun, steps: int) -> Callable[[], int]:
    """The loop that `phalanx train` runs, with its loader, records and log points.

    It neither scores nor saves: the published rate excludes both.
    """
    session = training.session
    state, plan = session.state, session.plan
    plan = replace(plan, evaluate=replace(plan.evaluate, rate=Fraction(0)))

    def block() -> int:
        end = state.step + steps
        deps = replace(
            build_loop_dependencies(training),
            stop_requested=lambda: state.step >= end,
            save=lambda state: None,
        )
        with suppress(Stopped):
            fit(state, plan, deps=deps, metrics=MetricsBuffer(session.device))
        return steps * plan.global_batch

    return block


def _bare_block(session: Session, steps: int) -> Callable[[], int]:
    """A PyTorch loop as anyone would write it in ten lines, with batches from memory."""
    model = Session(session.config, session.plan).model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    ready = [passes[0] for passes in islice(session.feed.batches_from(0), steps)]

    def block() -> int:
        model.train()
        for images, labels, _ in ready:
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return steps * session.plan.global_batch

    return block
