"""The course of a sweep: trial after trial, each a process, until all are finished or a stop."""

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

from phalanx.assemble.signals import StopRequest, listening
from phalanx.disk import file_lock, write_atomically
from phalanx.errors import (
    EXIT_LEFT_AT_ONCE,
    EXIT_STOPPED,
    CheckpointError,
    ConfigError,
    DataError,
    DiskError,
    DivergedError,
    Stopped,
    UserError,
)
from phalanx.report.folder import is_run_folder, open_run
from phalanx.report.page import write_report
from phalanx.sweep.file import SweepFile
from phalanx.sweep.journal import (
    LOCK,
    PAGE,
    Point,
    SweepState,
    Trial,
    begin,
    is_sweep,
    make_folder,
    reopen,
)
from phalanx.sweep.page import render_page
from phalanx.sweep.process import (
    TrialProcess,
    last_lines,
    last_words,
    open_log,
    read_points,
    total_steps,
    words_for,
)
from phalanx.sweep.proposals import Judge, propose
from phalanx.sweep.table import describe_progress, describe_trial

_STOPS = (EXIT_STOPPED, EXIT_LEFT_AT_ONCE)
_SAME_MISTAKE = 3  # trials at the beginning that fail alike are a mistake in what all have
_MISTAKES: dict[int, type[UserError]] = {e.exit_code: e for e in (ConfigError, DataError)}
_PLAIN = {DivergedError.exit_code: "diverged: "}  # said before a process's own words


@dataclass(frozen=True)
class Voice:
    """Where a sweep speaks to."""

    say: Callable[[str], None]  # a line that stays
    tell: Callable[[str], None]  # how far the work is, over the last such line


@dataclass(frozen=True)
class _Ending:
    """How a process ended."""

    code: int
    said: str  # since it was started
    resumed: bool  # went on with a run that was there


def run_sweep(folder: Path, sweep: SweepFile, voice: Voice) -> SweepState:
    """All trials of a sweep, from wherever it stands."""
    make_folder(folder)
    with held(folder):
        journal = reopen(folder, sweep) if is_sweep(folder) else begin(folder, sweep)
        worker = _TrialRunner(voice)
        with listening(worker.stop, leave=worker.kill):
            journal = _run_trials(journal, worker)
        _write_page(journal)
    return journal


def _run_trials(journal: SweepState, worker: "_TrialRunner") -> SweepState:
    """The trials that are left, one after the other."""
    if journal.trials and not journal.is_finished:
        worker.voice.say(f"{len(journal.finished)} of {journal.sweep.trials} trials are finished")
    while not journal.is_finished:
        _refuse_to_go_on(journal, worker)
        journal = worker.run(_started(journal))
        _refuse_same_mistake(journal)
        if not journal.is_finished:
            _write_page(journal)
    return journal


def _started(journal: SweepState) -> SweepState:
    """The journal with one trial running: the one that was, or the next."""
    if any(trial.state == "running" for trial in journal.trials):
        return journal
    values = propose(journal.sweep, journal.trials)
    return journal.with_trial(Trial(number=len(journal.trials), values=values))


def _refuse_to_go_on(journal: SweepState, worker: "_TrialRunner") -> None:
    """Leave where a signal asked for it."""
    if worker.stop():
        raise _stopped(journal)


def _stopped(journal: SweepState) -> Stopped:
    """What a stop says."""
    done, total = len(journal.finished), journal.sweep.trials
    way_on = f"phalanx sweep --resume {journal.folder}"
    return Stopped(f"stopped after {done} of {total} trials; all is saved; go on with: {way_on}")


def _refuse_same_mistake(journal: SweepState) -> None:
    """Raise where no trial could begin: the mistake is in what all have, and they are forgotten."""
    first = journal.finished
    if len(first) != min(_SAME_MISTAKE, journal.sweep.trials):
        return
    if all(trial.state == "failed" and trial.exit_code in _MISTAKES for trial in first):
        journal.without(first)
        kind = _MISTAKES[first[-1].exit_code or 0]
        raise kind(f"the first {len(first)} trials failed, the last one with: {first[-1].reason}")


def held(folder: Path) -> AbstractContextManager[int]:
    """Be the only process that runs this sweep; the lock dies with the process."""
    return file_lock(
        folder / LOCK,
        lambda: CheckpointError(
            f"{folder}: another process runs this sweep; stop that one first, or choose another "
            "--sweep-dir"
        ),
    )


def _write_page(journal: SweepState) -> None:
    """sweep.html as things stand."""
    write_atomically(journal.folder / PAGE, render_page(journal))


class _TrialRunner:
    """Runs one trial after the other and passes signals on to the one that runs."""

    def __init__(self, voice: Voice):
        self.voice, self.stop = voice, StopRequest()
        self._training: TrialProcess | None = None

    def kill(self) -> None:
        """End the process that trains, at once."""
        if self._training is not None:
            self._training.kill()

    def run(self, journal: SweepState) -> SweepState:
        """The journal once its running trial is finished; Stopped if a signal comes first."""
        trial = next(trial for trial in journal.trials if trial.state == "running")
        before = tuple(other for other in journal.trials if other.number < trial.number)
        watch = _TrialMonitor(journal, before, trial, self.voice)
        log = open_log(journal.folder, trial, self.stop)
        if log is None:
            raise _stopped(journal)
        try:
            ending = None if watch.look() else self._train(watch, log)
        finally:
            os.close(log)
        journal = watch.journal.with_trial(self._judge(watch, ending))
        ended = journal.trials[trial.number]
        _report_early_end(watch.run, ended)
        self.voice.say(describe_trial(journal, ended))
        if ended.state == "failed" and ending is not None:
            for line in last_lines(ending.said):
                self.voice.say(f"    {line}")
        return journal

    def _train(self, watch: "_TrialMonitor", log: int) -> _Ending:
        """A process that trains the trial, followed to its end; the log's lock goes with it."""
        words, resumed = words_for(watch.journal.sweep, watch.trial, watch.run)
        self._training = training = TrialProcess(words, log)
        watch.belongs_to(training.number)
        began, spent = monotonic(), watch.trial.seconds
        while (code := training.wait()) is None:
            watch.lasted(spent + monotonic() - began)
            if watch.look() or self.stop():
                training.ask_to_stop()
        watch.lasted(spent + monotonic() - began)
        watch.look()
        ending = _Ending(code, training.said(watch.log), resumed)
        if resumed and code == CheckpointError.exit_code:
            shutil.rmtree(watch.run)  # it cannot be resumed: begin it again
            watch.forget()
            return self._train(watch, log)
        return ending

    def _judge(self, watch: "_TrialMonitor", ending: _Ending | None) -> Trial:
        """What became of the trial, or Stopped with everything as it is."""
        trial = replace(watch.trial, process=None, rungs=watch.rungs)
        if ending is None or watch.hopeless:
            return replace(trial, state="pruned", exit_code=ending.code if ending else None)
        if ending.code == 0:
            return _judge_score(trial, watch.journal.sweep)
        if self.stop() or ending.code in _STOPS:
            watch.journal.with_trial(replace(watch.trial, process=None))
            raise _stopped(watch.journal)
        if ending.code == DiskError.exit_code:
            way_on = f"phalanx sweep --resume {watch.journal.folder}"
            raise DiskError(f"{last_words(ending.said)}; then go on with: {way_on}")
        reason = _explain_failure(ending)
        return replace(trial, state="failed", exit_code=ending.code, reason=reason)


class _TrialMonitor:
    """Follows a trial by its validations, and keeps the journal up to date."""

    def __init__(
        self, journal: SweepState, before: tuple[Trial, ...], trial: Trial, voice: Voice
    ) -> None:
        self.journal, self.voice = journal, voice
        self.run = journal.folder / trial.name
        self.log = journal.folder / f"{trial.name}.log"
        self._before = before
        self._start(trial)

    def _start(self, trial: Trial) -> None:
        # whatever was seen before is seen again: the run itself remembers it
        self.trial = replace(trial, points=())
        self.hopeless = False
        self._judge = Judge(self.journal.sweep, self._before, values=trial.values)

    @property
    def rungs(self) -> dict[str, float]:
        """What the pruner remembers of this trial."""
        return self._judge.rungs

    def forget(self) -> None:
        """Begin again with a run that begins again."""
        self._start(self.trial)

    def belongs_to(self, number: int) -> None:
        """Note the process that trains it, for a sweep that comes after a kill."""
        self._update(process=(socket.gethostname(), number))

    def lasted(self, seconds: float) -> None:
        """Note how long it has trained; on disk with the next score."""
        self.trial = replace(self.trial, seconds=round(seconds, 1))

    def look(self) -> bool:
        """Take in new validations, and say whether the trial is not worth going on with."""
        seen = self.trial.points[-1].step if self.trial.points else 0
        new = [p for p in read_points(self.run, self.journal.sweep.goal) if p.step > seen]
        for point in new:
            if not self.hopeless:
                self._take(point)
        return self.hopeless

    def _take(self, point: Point) -> None:
        """One more validation; the last of a run is its end, and prunes nothing."""
        self._update(points=(*self.trial.points, point))
        self.voice.tell(describe_progress(self.journal, self.trial))
        early = point.step < total_steps(self.run)
        self.hopeless = self._judge.is_hopeless(point.score) and early

    def _update(self, **changes: object) -> None:
        self.trial = replace(self.trial, **changes)  # type: ignore[arg-type]
        self.journal = self.journal.with_trial(self.trial)


def _judge_score(trial: Trial, sweep: SweepFile) -> Trial:
    """A trial that came to its end: done, or failed for want of a score."""
    if trial.score is None:
        reason = f"no {sweep.goal} was scored; top5 wants more than five classes"
        return replace(trial, state="failed", exit_code=ConfigError.exit_code, reason=reason)
    if not math.isfinite(trial.score):
        reason = f"diverged: its {sweep.goal} is {trial.score}"
        return replace(trial, state="failed", exit_code=DivergedError.exit_code, reason=reason)
    return replace(trial, state="done", exit_code=0)


def _explain_failure(ending: _Ending) -> str:
    """Why a process ended badly, in its own words."""
    if ending.code < 0:
        name = signal.Signals(-ending.code).name
        return f"killed by {name}" + "; was memory short?" * (name == "SIGKILL")
    return _PLAIN.get(ending.code, "") + (last_words(ending.said) or f"exit code {ending.code}")


def _report_early_end(run: Path, trial: Trial) -> None:
    """Write the report that a run which was stopped or broke has not written itself."""
    if trial.state != "done" and is_run_folder(run):
        with suppress(CheckpointError):  # a run that broke may have nothing to report
            write_report(open_run(run))
