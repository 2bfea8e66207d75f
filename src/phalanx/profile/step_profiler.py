"""Profiles one step of a run with torch's profiler, and writes tables, a trace and a picture.

It does not change what is computed: units only get named ranges meanwhile. The step is the first
one that is timed. If something fails, such as a full disk, this is noted and the run continues.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule

from phalanx.disk import convert_disk_errors, remove_quietly, write_atomically
from phalanx.engine.step import MicroBatch
from phalanx.engine.train import UNTIMED_STEPS, LoopDependencies
from phalanx.models.units import UnitModel
from phalanx.profile.attribution import (
    DATA,
    STEP,
    Label,
    attribute_events,
    list_pass_order,
    name_unit_range,
)
from phalanx.profile.step_drawing import draw_step
from phalanx.profile.step_table import build_step_table
from phalanx.profile.trace_file import compress_trace, read_trace
from phalanx.ranges import RANGES

_ENVIRONMENT = {
    "KINETO_LOG_LEVEL": "99",  # otherwise it logs every start and stop to standard error
    # its library must stay loaded from the pass before graphs are captured until they are replayed
    "TEARDOWN_CUPTI": "0",
    "DISABLE_CUPTI_LAZY_REINIT": "1",
}


@dataclass(frozen=True, kw_only=True)
class ProfileSpec:
    """What to profile, and where to write the files."""

    detail: str  # summary, trace or full
    folder: Path
    title: str
    images: int  # of a step
    first_step: int  # steps already done when the process starts
    total_steps: int
    passes: int  # of a step in this process
    ranks: int = 1  # of the run
    graph: bool = False  # passes are replayed
    names_units: bool = True  # False for a compiled network, which must not be changed

    @property
    def step(self) -> int:
        """The step that is profiled: the first that is timed, or the last of a shorter run."""
        return min(self.first_step + UNTIMED_STEPS + 1, self.total_steps)

    @property
    def uncaptured_step(self) -> int | None:
        """The last step before graphs are captured, if any are; it shows their units."""
        plain = self.first_step + (2 if self.passes == 1 else 1)
        return plain if self.graph and plain < self.step else None

    @property
    def is_cold(self) -> bool:
        """Whether the run is too short to warm up."""
        return self.step - self.first_step <= UNTIMED_STEPS


class StepProfiler:
    """Profiles one step of a loop; `attach` it to the loop's dependencies, `close` it at the end.

    say: called with the lines for the user.
    """

    def __init__(
        self,
        spec: ProfileSpec,
        model: nn.Module,
        *,
        print_line: Callable[[str], None],
    ) -> None:
        self._spec, self._model, self._print_line = spec, model, print_line
        self._device = next(model.parameters()).device
        self._profiler: profile | None = None
        self._step = spec.first_step  # the one whose images were requested last
        self._names_set: list[str] = []  # in the environment; unset afterwards
        self._order: list[tuple[str, Label]] = []  # kernels of a pass without graphs
        units = model.units if isinstance(model, UnitModel) and spec.names_units else {}
        self._units = [*units]

    def attach(self, deps: LoopDependencies) -> LoopDependencies:
        """The same dependencies for the loop, with one step profiled."""
        return replace(
            deps,
            batches_from=self._profile_batches(deps.batches_from),
            train_step=self._profile_step(deps.train_step),
            is_profiled=lambda step: step == self._spec.step,
        )

    def close(self) -> None:
        """End a profile that the end of the run has cut short."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            self._name_ranges(False)
            try:
                profiler.stop()
            except Exception as problem:  # noqa: BLE001 - a profile, never the run
                self._stop_after_failure(problem, outcome="there is none")
        for name in self._names_set:
            os.environ.pop(name, None)
        self._names_set.clear()

    # --- in the loop ---

    def _profile_batches(
        self, batches_from: Callable[[int], Iterator[Sequence[MicroBatch]]]
    ) -> Callable[[int], Iterator[Sequence[MicroBatch]]]:
        def follow(first: int) -> Iterator[Sequence[MicroBatch]]:
            batches = batches_from(first)
            for step in count(first + 1):
                self._begin_step(step)
                with RANGES(DATA):
                    passes = next(batches, None)
                if passes is None:
                    return
                yield passes

        return follow

    def _profile_step(
        self, train_step: Callable[[Sequence[MicroBatch], float], Tensor]
    ) -> Callable[[Sequence[MicroBatch], float], Tensor]:
        def follow(passes: Sequence[MicroBatch], lr: float) -> Tensor:
            with RANGES(STEP):
                metrics = train_step(passes, lr)
                if RANGES.are_recorded:
                    self._wait_for_device()
            if RANGES.are_recorded:
                self._end_step(self._step)
            return metrics

        return follow

    def _begin_step(self, step: int) -> None:
        """Start the profiler if this step or the next is to be profiled."""
        spec, self._step = self._spec, step
        try:
            if step in (spec.step - 1, spec.step, spec.uncaptured_step) and self._profiler is None:
                self._start_profiler()  # warms up in the step before, if there is one
            if step in (spec.step, spec.uncaptured_step) and self._profiler is not None:
                self._wait_for_device()  # earlier work is no part of it
                self._profiler.step()
                self._name_ranges(True)
        except Exception as problem:  # noqa: BLE001 - a profile, never the run
            self._stop_after_failure(problem)

    def _start_profiler(self) -> None:
        """Start a profiler that warms up; its next step counts."""
        for name, value in _ENVIRONMENT.items():
            if name not in os.environ:
                os.environ[name] = value
                self._names_set.append(name)
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        is_full = self._spec.detail == "full"
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
            record_shapes=is_full,
            with_stack=is_full,
        )
        with warnings.catch_warnings():
            # torch 2.11 says it of every profile; there is only one cycle
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            self._profiler.start()

    def _wait_for_device(self) -> None:
        """Wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _name_ranges(self, are_recorded: bool) -> None:
        """Put a named range around every unit's forward pass, or remove the ranges."""
        RANGES.are_recorded = are_recorded
        if not self._units:
            return
        if not are_recorded:
            self._model.__dict__.pop("run_unit", None)
            return
        run_unit: Callable[..., Tensor] = getattr(self._model, "run_unit")  # noqa: B009

        def run_named(unit: str, *args: Any) -> Tensor:
            with RANGES(name_unit_range(unit)):
                return run_unit(unit, *args)

        self._model.__dict__["run_unit"] = run_named

    def _end_step(self, step: int) -> None:
        """Evaluate the profiled step, and write what was asked for."""
        profiler, self._profiler = self._profiler, None
        self._name_ranges(False)
        if profiler is None:
            return
        said = ""
        try:
            profiler.stop()
            trace = read_trace(profiler)
            if step == self._spec.uncaptured_step:
                attribution = attribute_events(trace["traceEvents"], self._units)
                self._order = list_pass_order(attribution)
            else:
                said = self._write(trace)
        except Exception as problem:  # noqa: BLE001 - a profile, never the run
            self._stop_after_failure(problem)
        if said:  # outside the try: a console that cannot be written to does end a run
            self._print_line(said)

    def _stop_after_failure(
        self, problem: Exception, *, outcome: str = "the run continues without it"
    ) -> None:
        """Report why there is no profile, and what follows from that."""
        self._name_ranges(False)
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            with suppress(Exception):  # it has failed before
                profiler.stop()
        # without the hint: that is meant for a run that cannot continue
        reason = str(problem).partition("\n")[0].partition(";")[0] or type(problem).__name__
        self._print_line(f"note: profile: {reason}; {outcome}")

    # --- files ---

    def _write(self, trace: dict[str, Any]) -> str:
        """Write the files; returns what to tell the user."""
        spec, folder = self._spec, self._spec.folder
        attribution = attribute_events(trace["traceEvents"], self._units, self._order)
        table = build_step_table(
            attribution,
            self._units,
            step=spec.step,
            images=spec.images,
            title=spec.title,
            device=self._device.type,
        )
        table = replace(table, notes=(*table.notes, *self._list_notes()))
        with convert_disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._remove_old()
        write_atomically(folder / "summary.txt", "\n".join([*table.list_lines(), ""]))
        write_atomically(folder / "summary.json", json.dumps(table.to_dict(), indent=2))
        if spec.detail != "summary":
            content = compress_trace(trace, attribution, title=spec.title)
            write_atomically(folder / "trace.json.gz", content)
        write_atomically(folder / "step.png", draw_step(attribution, table))
        last = f"profile: {table.describe()}; more in {folder}"
        return "\n".join([*table.list_lines(), "", last])

    def _remove_old(self) -> None:
        """Remove files of an earlier part of the run that this one does not replace."""
        if self._spec.detail == "summary":
            remove_quietly(self._spec.folder / "trace.json.gz")
        for path in self._spec.folder.glob("rank-*"):
            rank = path.name.removeprefix("rank-")
            if rank.isdecimal() and int(rank) >= self._spec.ranks:
                shutil.rmtree(path, ignore_errors=True)

    def _list_notes(self) -> Iterator[str]:
        """What a reader must know about how the step was profiled."""
        if self._spec.is_cold:
            yield (
                f"the run has no more than {UNTIMED_STEPS} steps in this process: its last one is "
                "shown, and is not warm"
            )
        if not self._units:
            yield "the network has no units that can be told apart: it is shown as a whole"
