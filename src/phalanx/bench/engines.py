"""What --engine lightning costs: both engines train alternately in one process, on equal batches.

A block is a number of steps of a run, of which all but the first are timed. So the start of a
Trainer, which a real run pays for once, does not count; what it does between steps does.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from phalanx.assemble.prepare import PreparedRun, prepare_new_run
from phalanx.assemble.train import TrainingRun, build_loop_dependencies, open_training
from phalanx.bench.paired_ratio import PairedRatio
from phalanx.bench.synthetic_steps import synchronise
from phalanx.config.read import Settings
from phalanx.engine.state import hash_weights
from phalanx.engine.train import Fit, MetricsBuffer, fit
from phalanx.errors import ConfigError, Stopped
from phalanx.lightning.engine_choice import choose_fit
from phalanx.plan.layout import describe_layout
from phalanx.units import format_plural


@dataclass(frozen=True, kw_only=True)
class EngineComparison:
    """The rate of the Lightning engine over that of the native loop, and both final weights."""

    ratio: PairedRatio  # in images/s
    steps: int  # in a block
    steps_trained: int  # by each engine in total
    hashes: tuple[str, str]  # of the final weights: lightning, native
    largest_difference: float  # between corresponding weights
    model: str
    layout: str  # in words, if there are several replicas
    device: str

    @property
    def weights_equal(self) -> bool:
        """Whether both engines have trained the same weights, bit for bit."""
        return self.hashes[0] == self.hashes[1]

    @property
    def verdict(self) -> str:
        """How the final weights compare, in words."""
        steps = f"after {format_plural(self.steps_trained, 'step')}"
        if self.weights_equal:
            return f"weights {steps}: equal, bit for bit"
        why = (
            "some GPU kernels add in varying order, --determinism strict leaves those out"
            if self.device.startswith("cuda")
            else "they should be equal: please report it"
        )
        return f"weights {steps}: differ by up to {self.largest_difference:.3g}; {why}"

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "model": self.model,
            "layout": self.layout,
            "device": self.device,
            "ratio": self.ratio.median,
            "interval95": self.ratio.interval95,
            "pairs": len(self.ratio.pairs),
            "steps": self.steps,
            "steps_trained": self.steps_trained,
            "lightning_images_per_second": self.ratio.ours,
            "native_images_per_second": self.ratio.theirs,
            "weights_equal": self.weights_equal,
            "largest_difference": self.largest_difference,
            "weights_sha256": dict(zip(("lightning", "native"), self.hashes, strict=True)),
        }


def measure_engines(
    settings: Settings, *, pairs: int, steps: int, done: Callable[[int], None]
) -> EngineComparison:
    """Train two runs of the same settings, one with each engine, in interleaved blocks."""
    settings = settings.replace_options({"engine": "lightning"})
    with TemporaryDirectory() as folder, ExitStack() as stack:
        silence = stack.enter_context(open(os.devnull, "w"))
        runs: list[TrainingRun] = []
        for name in ("lightning", "native"):
            prepared = _prepare(settings, Path(folder) / name)
            runs.append(open_training(prepared, stack, stream=silence))
        fits = (choose_fit(settings.config), fit)
        for training, engine in zip(runs, fits, strict=True):
            _run_block(training, engine, steps)  # fills caches, chooses kernels
        rates: tuple[list[float], list[float]] = ([], [])
        for pair in range(pairs):
            for side in (0, 1) if pair % 2 == 0 else (1, 0):
                rates[side].append(_run_block(runs[side], fits[side], steps))
            done(pair + 1)
        lightning, native = (training.session.gather_weights() for training in runs)
        plan = runs[0].session.plan
        return EngineComparison(
            ratio=PairedRatio(tuple(rates[0]), tuple(rates[1])),
            steps=steps,
            steps_trained=runs[1].session.state.step,
            hashes=(hash_weights(lightning), hash_weights(native)),
            largest_difference=max(
                float((lightning[name].double() - native[name].double()).abs().max())
                for name in native
            ),
            model=settings.config.model.model,
            layout=describe_layout(plan.layout, stages=plan.stages),
            device=str(runs[0].session.device),
        )


def _prepare(settings: Settings, folder: Path) -> PreparedRun:
    """A run of these settings in its own folder; ConfigError if it needs several ranks."""
    settings = settings.replace_options({"run-dir": str(folder)})
    prepared = prepare_new_run(settings, line="bench engines")
    ranks = prepared.plan.layout.ranks
    if ranks > 1:
        raise ConfigError(
            f"bench engines: measures one process, and these options take {ranks}; give "
            "--devices 1, which folds all replicas onto one device"
        )
    return prepared


def _run_block(training: TrainingRun, engine: Fit, steps: int) -> float:
    """Images/s of the steps of a block except its first.

    It neither scores nor saves: the published rate excludes both.
    """
    session = training.session
    state, first, times = session.state, session.state.step + 1, list[float]()
    plan = replace(session.plan, evaluate=replace(session.plan.evaluate, rate=Fraction(0)))

    def is_over() -> bool:
        if state.step == first:
            synchronise(session.device)
            times.append(perf_counter())
        return state.step == first - 1 + steps

    deps = replace(
        build_loop_dependencies(training),
        stop_requested=is_over,
        save=lambda state: times.append(perf_counter()),  # by then the device has finished
    )
    plan = replace(plan, save=replace(plan.save, rate=Fraction(0)))
    with suppress(Stopped):
        engine(state, plan, deps=deps, metrics=MetricsBuffer(session.device))
    begin, end = times
    return (steps - 1) * plan.global_batch / (end - begin)
