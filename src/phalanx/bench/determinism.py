"""What --determinism costs: steps/s of each value, in interleaved blocks, one process each."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from phalanx.assemble.dataset_summary import plan_run
from phalanx.assemble.torch_setup import DETERMINISM, prepare_torch
from phalanx.bench.paired_ratio import PairedRatio, measure_pairs
from phalanx.bench.synthetic_steps import build_synthetic_step
from phalanx.catalog.plugins import load_plugins
from phalanx.config.read import Settings
from phalanx.data.process_pool import SpawnExecutor
from phalanx.plan.plan import Plan

_BASELINE = "off"  # what the others are compared with
_NOTES = {
    "cpu": "on a CPU all three run the same kernels, so a ratio of 1 is expected",
    "cuda": "off lets cuDNN time its kernels, seeded takes what cuDNN expects to be fastest, "
    "strict only what gives the same bits; of our own kernels strict takes the first that fits, "
    "the others the fastest",
    "mps": "on mps there is no choice of kernels, so a ratio of 1 is expected",
}


@dataclass(frozen=True, kw_only=True)
class DeterminismCost:
    """Rates of the values of --determinism, divided by that of off."""

    ratios: dict[str, PairedRatio]  # by value, in steps/s
    device: str
    steps: int  # in a block

    @property
    def note(self) -> str:
        """What to know about ratios on this device."""
        return _NOTES[torch.device(self.device).type]

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        ratios = {
            name: {
                "ratio": ratio.median,
                "interval95": ratio.interval95,
                "pairs": len(ratio.pairs),
                "steps_per_second": ratio.ours,
                f"{_BASELINE}_steps_per_second": ratio.theirs,
            }
            for name, ratio in self.ratios.items()
        }
        return {"device": self.device, "steps": self.steps, "note": self.note, "ratios": ratios}


def measure_determinism(
    settings: Settings, *, pairs: int, steps: int, done: Callable[[str, int], None]
) -> DeterminismCost:
    """Steps/s of seeded and strict over those of off, on synthetic images, in paired blocks."""
    plan, _ = plan_run(settings, without_data=True)
    device = prepare_torch(plan)
    with ExitStack() as stack:
        blocks = {
            name: stack.enter_context(
                _open_step_process(settings, replace(plan, determinism=name), steps)
            )
            for name in DETERMINISM
        }
        for block in blocks.values():
            block()  # fills caches, chooses kernels
        ratios = {
            name: measure_pairs(
                blocks[name], blocks[_BASELINE], pairs=pairs, done=partial(done, name)
            )
            for name in blocks
            if name != _BASELINE
        }
    return DeterminismCost(ratios=ratios, device=str(device), steps=steps)


@contextmanager
def _open_step_process(settings: Settings, plan: Plan, steps: int) -> Iterator[Callable[[], int]]:
    """A call that takes so many steps in a new process, in which no kernel was chosen before.

    In one process, cuDNN would reuse for all what it chose for the first, and cuBLAS reads its
    settings only once.
    """
    with SpawnExecutor(1) as process:
        process.submit(prepare_process, settings, plan).result()
        yield lambda: process.submit(take_steps, steps).result()


_STEP: list[Callable[[], int]] = []  # the training step of such a process


def prepare_process(settings: Settings, plan: Plan) -> None:
    """Build the training step of this process."""
    config = settings.config
    if config.run.plugin:
        load_plugins(config.run.plugin)
    _STEP.append(build_synthetic_step(config, plan, waits=False))


def take_steps(count: int) -> int:
    """Take so many steps, and wait for the device."""
    for _ in range(count):
        _STEP[0]()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return count
