"""Runs a sweep: trial after trial, each in a process, until all are finished or it is stopped."""

import math
import os
import shutil
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

from phalanx.catalog.plugins import format_plugin_flag, list_loaded_plugins
from phalanx.disk import file_lock, quote_path, remove_dead_parts, write_atomically
from phalanx.errors import (
    EXIT_LEFT_AT_ONCE,
    EXIT_STOPPED,
    OUT_OF_MEMORY,
    CheckpointError,
    ConfigError,
    DataError,
    DiskError,
    DivergedError,
    Stopped,
    UserError,
)
from phalanx.report.folder import is_run_folder, open_run
from phalanx.report.report_page import write_report
from phalanx.signals import StopRequest, listen_for_signals
from phalanx.sweep.page import render_page
from phalanx.sweep.process import (
    TrialProcess,
    build_command,
    find_error_message,
    open_trial_log,
    read_total_steps,
    read_trial_scores,
)
from phalanx.sweep.proposals import TrialPruner, propose_values
from phalanx.sweep.schema import SweepFile
from phalanx.sweep.state import (
    LOCK_FILE,
    PAGE_FILE,
    SweepState,
    Trial,
    create_sweep,
    create_sweep_folder,
    is_sweep_folder,
    load_sweep,
)
from phalanx.sweep.table import describe_progress, describe_trial

_STOPS = (EXIT_STOPPED, EXIT_LEFT_AT_ONCE)
_SAME_MISTAKE = 3  # first trials with the same failure: the mistake is in what they share
_MISTAKES: dict[int, type[UserError]] = {e.exit_code: e for e in (ConfigError, DataError)}
_LINES_SHOWN = 5  # from the end of a failed trial's output


@dataclass(frozen=True)
class SweepOutput:
    """Where a sweep prints."""

    print: Callable[[str], None]  # a line that stays
    show_progress: Callable[[str], None]  # overwrites the last such line


@dataclass(frozen=True)
class _ProcessResult:
    """How a process ended."""

    exit_code: int
    output: str


def run_sweep(folder: Path, sweep: SweepFile, output: SweepOutput) -> SweepState:
    """Run all trials of a sweep that are not finished; returns its state."""
    create_sweep_folder(folder)
    with lock_sweep(folder):
        remove_dead_parts(folder)
        state = (
            load_sweep(folder, sweep) if is_sweep_folder(folder) else create_sweep(folder, sweep)
        )
        runner = _TrialRunner(output)
        with listen_for_signals(runner.stop, leave=runner.kill):
            state = _run_trials(state, runner)
        _write_page(state)
    return state


def _run_trials(state: SweepState, runner: "_TrialRunner") -> SweepState:
    """Run the remaining trials, one after the other."""
    if state.trials and not state.is_finished:
        runner.output.print(
            f"{len(state.finished_trials)} of {state.sweep.trials} trials are finished"
        )
    while not state.is_finished:
        if runner.stop():
            raise _make_stop(state)
        if not any(trial.state == "running" for trial in state.trials):
            values = propose_values(state.sweep, state.trials)
            state = state.with_trial(Trial(number=len(state.trials), values=values))
        state = runner.run(state)
        _refuse_common_mistake(state)
        if not state.is_finished:
            _write_page(state)
    return state


def _make_stop(state: SweepState) -> Stopped:
    """The exception for a stop by a signal."""
    done, total = len(state.finished_trials), state.sweep.trials
    command = _resume_command(state)
    return Stopped(
        f"stopped after {done} of {total} trials; everything is saved; continue with: {command}"
    )


def _resume_command(state: SweepState) -> str:
    """The command that continues the sweep."""
    flag = format_plugin_flag(list_loaded_plugins())
    return f"phalanx sweep --resume {quote_path(state.folder)}{flag}"


def _refuse_common_mistake(state: SweepState) -> None:
    """Raise if no trial could start: the mistake is in what all share, and they are removed."""
    first = state.finished_trials
    if len(first) != min(_SAME_MISTAKE, state.sweep.trials):
        return
    if all(trial.state == "failed" and trial.exit_code in _MISTAKES for trial in first):
        state.without_trials(first)
        kind = _MISTAKES[first[-1].exit_code or 0]
        which = f"the first {len(first)} trials failed, the last one with"
        if len(first) == 1:
            which = "the only trial failed with"
        raise kind(f"{which}: {first[-1].reason}")


def lock_sweep(folder: Path) -> AbstractContextManager[int]:
    """Be the only process that runs this sweep; the lock ends with the process."""
    return file_lock(
        folder / LOCK_FILE,
        lambda: CheckpointError(
            f"{folder}: another process is running this sweep; stop it first, or choose another "
            "--sweep-dir"
        ),
    )


def _write_page(state: SweepState) -> None:
    """Write sweep.html for the current state."""
    write_atomically(state.folder / PAGE_FILE, render_page(state))


class _TrialRunner:
    """Runs one trial after the other, and forwards signals to the one that is running."""

    def __init__(self, output: SweepOutput):
        self.output, self.stop = output, StopRequest()
        self._process: TrialProcess | None = None

    def kill(self) -> None:
        """Kill the training process at once."""
        if self._process is not None:
            self._process.kill()

    def run(self, state: SweepState) -> SweepState:
        """The state after its running trial has finished; Stopped if a signal comes first."""
        trial = next(trial for trial in state.trials if trial.state == "running")
        monitor = _TrialMonitor(state, trial, self.output)
        log = open_trial_log(state.folder, trial, self.stop)
        if log is None:
            raise _make_stop(state)
        try:
            result = None if monitor.update_scores() else self._train(monitor, log)
        finally:
            os.close(log)
        trial = self._finish_trial(monitor, result)
        state = monitor.state.with_trial(trial)
        if trial.state != "done" and is_run_folder(monitor.run):
            with suppress(CheckpointError):  # a broken run may have nothing to report
                write_report(open_run(monitor.run))  # it did not write one itself
        self.output.print(describe_trial(state, trial))
        if trial.state == "failed" and result is not None:
            lines = [line for line in result.output.splitlines() if line.strip()]
            for line in lines[-_LINES_SHOWN:]:
                self.output.print(f"    {line}")
        return state

    def _train(self, monitor: "_TrialMonitor", log: int) -> _ProcessResult:
        """Train the trial in a process to its end; the process holds the log's lock."""
        words, is_resumed = build_command(monitor.state.sweep, monitor.trial, monitor.run)
        self._process = process = TrialProcess(words, log)
        monitor.update_trial(process=(socket.gethostname(), process.pid))
        start = monotonic() - monitor.trial.seconds
        exit_code = None
        while exit_code is None:
            exit_code = process.wait()
            monitor.trial = replace(monitor.trial, seconds=round(monotonic() - start, 1))
            if (monitor.update_scores() or self.stop()) and exit_code is None:
                process.interrupt()
        if is_resumed and exit_code == CheckpointError.exit_code:
            shutil.rmtree(monitor.run)  # it cannot be resumed: start it again
            monitor.reset_scores()
            return self._train(monitor, log)
        return _ProcessResult(exit_code, process.read_output(monitor.log))

    def _finish_trial(self, monitor: "_TrialMonitor", result: _ProcessResult | None) -> Trial:
        """The finished trial; raises Stopped, which leaves everything as it is."""
        trial = replace(monitor.trial, process=None, rungs=monitor.pruner.rungs)
        if result is None or monitor.is_pruned:
            return replace(trial, state="pruned", exit_code=result.exit_code if result else None)
        if result.exit_code == 0:
            return _check_score(trial, monitor.state.sweep)
        if self.stop() or result.exit_code in _STOPS:
            monitor.update_trial(process=None)
            raise _make_stop(monitor.state)
        said = find_error_message(result.output)
        if result.exit_code == DiskError.exit_code and OUT_OF_MEMORY not in said:
            command = _resume_command(monitor.state)
            raise DiskError(f"{said}; then continue with: {command}")
        reason = _explain_failure(result)
        return replace(trial, state="failed", exit_code=result.exit_code, reason=reason)


class _TrialMonitor:
    """Watches a trial through its validations, and keeps the state of the sweep up to date."""

    def __init__(self, state: SweepState, trial: Trial, output: SweepOutput):
        self.state, self.trial, self._output = state, trial, output
        self.run = state.folder / trial.name
        self.log = state.folder / f"{trial.name}.log"
        self.reset_scores()

    def reset_scores(self) -> None:
        """Start without validations; those of an earlier process are read from the run again."""
        self.trial = replace(self.trial, points=())
        self.is_pruned = False
        earlier = self.state.trials[: self.trial.number]
        self.pruner = TrialPruner(self.state.sweep, earlier, values=self.trial.values)

    def update_scores(self) -> bool:
        """Read new validations; returns whether to prune the trial."""
        newest = self.trial.points[-1].step if self.trial.points else 0
        for point in read_trial_scores(self.run, self.state.sweep.goal):
            if point.step > newest and not self.is_pruned:
                self.update_trial(points=(*self.trial.points, point))
                self._output.show_progress(describe_progress(self.state, self.trial))
                # the last validation of a run is its end: nothing is left to prune
                is_early = point.step < read_total_steps(self.run)
                self.is_pruned = self.pruner.should_prune(point.score) and is_early
        return self.is_pruned

    def update_trial(self, **changes: object) -> None:
        """Change the trial, on disk too."""
        self.trial = replace(self.trial, **changes)  # type: ignore[arg-type]
        self.state = self.state.with_trial(self.trial)


def _check_score(trial: Trial, sweep: SweepFile) -> Trial:
    """A trial that trained to its end: done, or failed for lack of a score."""
    if trial.score is None:
        reason = f"no {sweep.goal} was scored; top5 needs more than five classes"
        return replace(trial, state="failed", exit_code=ConfigError.exit_code, reason=reason)
    if not math.isfinite(trial.score):
        reason = f"diverged: its {sweep.goal} is {trial.score}"
        return replace(trial, state="failed", exit_code=DivergedError.exit_code, reason=reason)
    return replace(trial, state="done", exit_code=0)


def _explain_failure(result: _ProcessResult) -> str:
    """Why a process failed, in its own words."""
    if result.exit_code < 0:
        name = signal.Signals(-result.exit_code).name
        return f"killed by {name}" + "; it may have run out of memory" * (name == "SIGKILL")
    diverged = "diverged: " if result.exit_code == DivergedError.exit_code else ""
    return diverged + (find_error_message(result.output) or f"exit code {result.exit_code}")
