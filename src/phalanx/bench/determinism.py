"""What --determinism costs: steps/s of each of its values, in turns in one process."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from phalanx.assemble.build import DETERMINISM, build_state, prepare_torch, step_rule
from phalanx.assemble.feed import SyntheticFeed
from phalanx.assemble.view import plan_of
from phalanx.bench.feeding import synchronise
from phalanx.bench.paired import Ratio, measure_pairs
from phalanx.config.read import Settings
from phalanx.engine.step import train_step

BESIDE = "off"  # what the others are compared with
NOTES = {
    "cpu": "on a CPU the three run the same kernels, so a ratio of 1 is expected; strict only "
    "fills new memory besides",
    "cuda": "in one process off and seeded share the kernels that cuDNN chose first, so their "
    "ratio does not show what the choice itself is worth; strict has its own",
    "mps": "nothing here chooses kernels on mps, so a ratio of 1 is expected",
}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Rates of the values of --determinism over that of off."""

    ratios: dict[str, Ratio]  # by value, in steps/s
    device: str
    steps: int  # in a block

    @property
    def note(self) -> str:
        """What to know of ratios on this device."""
        return NOTES[torch.device(self.device).type]

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON."""
        told = {
            name: {
                "ratio": ratio.median,
                "interval95": ratio.interval95,
                "pairs": len(ratio.pairs),
                "steps_per_second": ratio.ours,
                f"{BESIDE}_steps_per_second": ratio.theirs,
            }
            for name, ratio in self.ratios.items()
        }
        return {"device": self.device, "steps": self.steps, "note": self.note, "ratios": told}


def measure_determinism(
    settings: Settings, *, pairs: int, steps: int, done: Callable[[str, int], None]
) -> Cost:
    """Steps/s of seeded and of strict over those of off, on made-up images, in paired blocks."""
    # cuBLAS reads this once, at its first product: later all three have what strict needs
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    plan, _ = plan_of(settings, without_data=True)
    device = prepare_torch(plan)
    state = build_state(settings.config, plan, device)
    rule = step_rule(settings.config, plan, device)
    passes = next(SyntheticFeed(plan, device, seed=0).batches_from(0))
    scale = plan.loss_scale.at(0)

    def block_of(name: str) -> Callable[[], int]:
        def block() -> int:
            become(name)
            for _ in range(steps):
                train_step(state, passes, 0.0, rule=rule, loss_scale=scale)
            synchronise(device)
            return steps

        return block

    blocks = {name: block_of(name) for name in DETERMINISM}
    try:
        for block in blocks.values():
            block()  # caches fill, kernels are chosen
        ratios = {
            name: measure_pairs(blocks[name], blocks[BESIDE], pairs=pairs, done=partial(done, name))
            for name in blocks
            if name != BESIDE
        }
    finally:
        become(plan.determinism)
    return Cost(ratios=ratios, device=str(device), steps=steps)


def become(name: str) -> None:
    """Set torch as that value of --determinism does in a fresh process."""
    torch.backends.cudnn.deterministic = False  # strict sets it, the others leave it as it is
    DETERMINISM[name]()
