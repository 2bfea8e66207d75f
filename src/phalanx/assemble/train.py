"""Trains a prepared run to its end, and writes its summary."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TextIO

from torch import Tensor

from phalanx.assemble.average import average_run
from phalanx.assemble.blackbox import BlackBox
from phalanx.assemble.fork import describe_fork
from phalanx.assemble.memory import read_memory_shares
from phalanx.assemble.prepare import PreparedRun, find_starting_point, finish_preparing
from phalanx.assemble.rank_context import (
    RankContext,
    build_profiler,
    build_rank_context,
    build_watchdog,
)
from phalanx.assemble.rank_launch import digest_run
from phalanx.assemble.run_recorder import RunRecorder
from phalanx.assemble.session import Session
from phalanx.assemble.summarise import RunEnd, gather_run_end, gather_run_facts, summarise_run
from phalanx.data.layouts.image_files import describe_ignored
from phalanx.data.loading.image_checksums import merge_checksums
from phalanx.data.loading.trained_images import keep_trained_checksums, select_kept_checksums
from phalanx.engine.checkpoint import CheckpointSaver, load_weights
from phalanx.engine.checkpoint_store import (
    AVERAGE_WEIGHTS,
    WEIGHTS,
    find_newest_checkpoint,
    list_checkpoints,
    parse_step,
    prune_checkpoints,
    read_files,
)
from phalanx.engine.evaluate import Score, ValidBatch
from phalanx.engine.probe import Probe
from phalanx.engine.state import Throughput, TrainState
from phalanx.engine.step import MicroBatch
from phalanx.engine.train import Fit, LoopDependencies, MetricsBuffer, fit
from phalanx.errors import DivergedError, Stopped, UserError
from phalanx.parallel.ranks import Ranks
from phalanx.parallel.watchdog import Watchdog
from phalanx.plan.averaging import build_averaging, count_kept_checkpoints
from phalanx.plan.layout import describe_devices, describe_layout
from phalanx.profile.step_profiler import StepProfiler
from phalanx.report.console import Console
from phalanx.report.records import Records, read_averaged_scores, read_scores
from phalanx.report.report_page import write_report
from phalanx.report.summary import Summary, write_summary
from phalanx.report.terminal import escape_name
from phalanx.signals import StopRequest, listen_for_signals
from phalanx.trackers.choice import choose_trackers
from phalanx.trackers.processes import Trackers, track_run
from phalanx.units import format_plural, format_some

_IMAGES_SHOWN = 6


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A session with the run folder it writes to and the console it prints to."""

    prepared: PreparedRun
    session: Session
    records: Records
    console: Console
    saver: CheckpointSaver
    black_box: BlackBox
    stop: StopRequest
    watchdog: Watchdog | None  # if there are several ranks
    profiler: StepProfiler | None  # with --profile
    trackers: Trackers

    @property
    def context(self) -> RankContext:
        """The rank of this process."""
        return self.session.rank_context


def train(
    prepared: PreparedRun,
    *,
    stream: TextIO | None = None,
    ranks: Ranks | None = None,
    fit: Fit = fit,
) -> Summary | None:
    """Train a run to its end, from its current step; write its summary and report.

    stream: standard output if None. fit: the training loop. Only the rank that writes returns the
    summary, others None.
    """
    context = build_rank_context(prepared.plan, ranks)
    with ExitStack() as stack:
        if context.is_first_rank:
            stack.enter_context(prepared.run.lock())
        try:
            prepared = _share_starting_point(prepared, context)
            training = open_training(prepared, stack, stream=stream, ranks=ranks)
            _prepare_start(training)
        except UserError:
            stack.close()
            if prepared.is_new:  # this command made the folder, and cannot start the run
                prepared.run.discard()
            raise
        _print_start(training)
        if context.is_first_rank:
            chosen, print_line = choose_trackers(prepared.config), training.console.print
            stack.enter_context(track_run(training.trackers, prepared.run, chosen, print_line))
        _run_loop(training, fit)
        training.session.state.load_mean_statistics()
        _collect_findings(training)
        end = gather_run_end(training.session)
        if not context.is_first_rank:
            return None
        _average_last_checkpoints(training)
        summary = _write_results(training, end)
    write_report(prepared.run)
    return summary


def _share_starting_point(prepared: PreparedRun, context: RankContext) -> PreparedRun:
    """The run with the starting point that the rank that writes has found."""
    if context.is_first_rank:
        prepared = finish_preparing(prepared)
    start = prepared.start
    own = start.checkpoint if start is not None and start.use == "resume" else None
    first = context.gather(own)[0]
    if not context.is_first_rank:
        prepared = replace(prepared, start=find_starting_point(first, prepared.run))
    if context.ranks is not None:
        context.ranks.refuse_differences(digest_run(prepared))
    return prepared


def open_training(
    prepared: PreparedRun,
    stack: ExitStack,
    *,
    stream: TextIO | None,
    ranks: Ranks | None = None,
) -> TrainingRun:
    """Open all parts of a training run; the stack closes them."""
    run, plan, config = prepared.run, prepared.plan, prepared.config
    start, classes, check = prepared.start, prepared.dataset.classes, prepared.image_check
    session = Session(
        config, plan, start=start, classes=classes, ranks=ranks, folder=run.path, image_check=check
    )
    stack.enter_context(session)
    context = session.rank_context
    if not context.is_first_rank:
        stream = stack.enter_context(open(os.devnull, "w"))  # noqa: SIM115 - closed by the stack
    console = Console(
        total_steps=plan.total_steps,
        epochs=plan.epochs,
        log_file=run.log if context.is_first_rank else None,
        stream=stream,
    )
    records = Records(run.path)
    stack.callback(records.flush)  # so that a diverged run has its last steps on disk
    saver = CheckpointSaver(
        run.checkpoints,
        # checkpoints that are scored after training are kept until then
        keep=sys.maxsize if plan.scores_after else count_kept_checkpoints(config),
        run_facts=gather_run_facts(prepared, session),
        writes=context.is_first_rank,
        consensus=context.consensus,
    )
    probe = Probe(session.model) if config.machine.fp_exceptions else None
    session.feed  # noqa: B018 - opened now, to report unreadable data before the first line
    stack.enter_context(console)
    profiler = build_profiler(context, prepared, session.state, print_line=console.print)
    if profiler is not None:
        stack.callback(profiler.close)
    return TrainingRun(
        prepared=prepared,
        session=session,
        records=records,
        console=console,
        saver=saver,
        black_box=BlackBox(prepared, session, records, probe, console.print),
        stop=StopRequest(),
        watchdog=build_watchdog(context, prepared, lambda: session.state.step),
        profiler=profiler,
        trackers=Trackers(partial(read_memory_shares, session.device)),
    )


def _prepare_start(training: TrainingRun) -> None:
    """Bring checkpoints and records to the step this process starts at."""
    session, prepared = training.session, training.prepared
    state, feed = session.state, session.feed
    if prepared.start is not None and prepared.start.use == "fork":
        state.load_mean_statistics()
        training.saver.save(state)  # this run must not depend on its parent, which may be deleted
    elif prepared.findings:
        feed.recheck_bad(state.bad_images)
        feed.restore_checksums(state.image_checksums)
        if session.valid_feed is not feed:
            session.valid_feed.restore_checksums(state.image_checksums)
    else:
        state.bad_images = {}  # they may have been repaired; the others will be found again
        state.image_checksums = keep_trained_checksums(state.image_checksums)
        if prepared.accepts_changed_data and training.context.is_first_rank:
            accepted = [*prepared.run.facts.get("accepted_changed_data", []), state.step]
            now = prepared.dataset.collect_facts()
            prepared.run.update_facts(accepted_changed_data=accepted, **now)
    if state.step == prepared.plan.total_steps:
        state.scores.pop(state.step, None)  # killed before the summary: the last score is redone
    if training.context.is_first_rank:
        training.records.truncate(state.step, scored=state.step in state.scores)


def _print_start(training: TrainingRun) -> None:
    """Print what is about to be trained."""
    prepared, plan, console = training.prepared, training.prepared.plan, training.console
    config, start, dataset = prepared.config, prepared.start, prepared.dataset
    layout = training.context.layout
    console.print(
        f"{config.model.model} on {config.data.data}: {format_plural(plan.train_images, 'image')}, "
        f"{format_plural(plan.total_steps, 'step')} of {plan.global_batch:,}, "
        f"{format_plural(plan.epochs, 'epoch')}, "
        f"on {describe_devices(plan.device, layout.ranks)} in {plan.precision}"
    )
    console.print(f"run folder {prepared.run.path}")
    if layout.replicas > 1 or plan.stages > 1:
        console.print(describe_layout(layout, stages=plan.stages))
    for line in filter(None, (dataset.layout, describe_ignored(dataset.ignored))):
        console.print(f"data: {line}")
    for warning in (*plan.warnings, *training.session.notes):
        console.print(f"note: {warning}")
    if start is not None and start.use == "fork":
        console.print(describe_fork(plan, start))
    elif training.session.state.step:
        console.print(f"resumed at step {training.session.state.step:,}")
        if not prepared.findings:
            console.print("note: images may have changed since; --accept-changed-data was given")
        elif prepared.run.facts.get("data_snapshots", dataset.snapshots) != dataset.snapshots:
            console.print(
                "note: data files were written, touched or copied since the run began; names and "
                "sizes are the same, and contents are compared as they are read"
            )
    elif config.model.init_weights:
        fresh = ", with a new classifier" if config.model.reset_head else ""
        console.print(f"weights from {config.model.init_weights}{fresh}")


def _run_loop(training: TrainingRun, fit: Fit) -> None:
    """Train until the end, a signal or an error; then wait for the last save."""
    session, black_box = training.session, training.black_box
    # with a probe, a step that diverged must be noticed before the next one runs
    capacity = 1 if black_box.probe else session.config.train.device_iterations
    metrics, deps = MetricsBuffer(session.device, capacity), build_loop_dependencies(training)
    console, prints = training.console, training.context.is_first_rank
    with (
        training.watchdog or nullcontext(),
        listen_for_signals(training.stop, leave=console.restore_terminal, prints=prints),
    ):
        with black_box.record_failure(metrics.read, deps.observer.on_metrics):
            try:
                fit(session.state, session.plan, deps=deps, metrics=metrics)
            except BaseException as end:
                # ranks agree only on a stop and a divergence: else no collective call may follow
                is_agreed = isinstance(end, Stopped | DivergedError)
                training.saver.wait() if is_agreed else training.saver.join()
                raise
            training.saver.wait()
        if session.plan.scores_after:
            _score_checkpoints(training, deps)


def build_loop_dependencies(training: TrainingRun) -> LoopDependencies:
    """The functions and objects that the loop calls."""
    session, plan, black_box = training.session, training.session.plan, training.black_box
    feed, beat = session.feed, training.watchdog.beat if training.watchdog else lambda: None

    def evaluate(state: TrainState) -> Score | None:
        # the last evaluation ends the run, so it is not interrupted
        last = state.step == plan.total_steps
        return session.evaluate(show_progress(), interrupted=lambda: training.stop() and not last)

    def show_progress() -> Iterator[ValidBatch]:
        for number, batch in enumerate(session.valid_feed.validation_batches()):
            beat()
            training.console.evaluation_progress(number * plan.valid_batch, plan.valid_images)
            yield batch

    def train_step(passes: Sequence[MicroBatch], lr: float) -> Tensor:
        beat()
        return session.train_step(passes, lr, probe=black_box.probe)

    def save(state: TrainState) -> None:
        session.rank_context.refuse_drift(state)
        state.load_mean_statistics()
        _collect_findings(training)
        if training.context.is_first_rank:
            training.records.flush(sync=True)
            last_step = state.step if state.step == plan.total_steps else None
            state.records = training.records.compute_checksums(last_step=last_step)
        training.saver.save(state)

    def describe_images(step: int) -> str:
        names = [image.name for image in feed.list_step_images(step)]
        return escape_name(format_some(names, _IMAGES_SHOWN))

    deps = LoopDependencies(
        batches_from=feed.batches_from,
        train_step=train_step,
        evaluate=evaluate,
        save=save,
        stop_requested=training.stop,
        describe_images=describe_images,
        diagnose=black_box.diagnose,
        observer=RunRecorder(
            training.records,
            training.console,
            plan=plan,
            feeds=(feed, session.valid_feed),
            classes=session.classes,
            writes=training.context.is_first_rank,
            trackers=training.trackers,
        ),
        consensus=training.context.consensus,
    )
    return training.profiler.attach(deps) if training.profiler else deps


def _collect_findings(training: TrainingRun) -> None:
    """Collect what all ranks know of their images, and their throughput, into the state."""
    session, gather = training.session, training.context.gather
    state, feed, valid = session.state, session.feed, session.valid_feed
    for found in gather(feed.bad_images() | valid.bad_images()):
        state.bad_images |= found
    own = feed.image_checksums(), valid.image_checksums()
    read = merge_checksums(part for parts in gather(own) for part in parts)
    state.image_checksums = select_kept_checksums(state.image_checksums) | read
    check = feed.image_check(state.step)
    state.image_check = None if check is None else asdict(check)
    state.throughput = Throughput.combine(gather(state.throughput))


def _score_checkpoints(training: TrainingRun, deps: LoopDependencies) -> None:
    """Score every checkpoint, and the live average in it, that has not been scored before."""
    state, run = training.session.state, training.prepared.run
    state.scores |= {row.step: row.top1 for row in read_scores(run.path)}
    averaged = read_averaged_scores(run.path)
    last, weights = state.step, {n: t.clone() for n, t in state.model.state_dict().items()}

    def score_file(file: Path) -> Score:
        load_weights(state.model, read_files(file.parent, file.name)[file.name], where=file)
        score = deps.evaluate(state)
        if score is None:
            raise Stopped("stopped while scoring; a resume scores the remaining checkpoints")
        return score

    for checkpoint in list_checkpoints(run.checkpoints):
        state.step = parse_step(checkpoint)
        if state.step not in state.scores:
            score = score_file(checkpoint / WEIGHTS)
            state.scores[state.step] = score.top1
            deps.observer.on_score(state, score)
            if training.context.is_first_rank:
                training.records.flush(sync=True)
        if state.step not in averaged and (checkpoint / AVERAGE_WEIGHTS).exists():
            score = score_file(checkpoint / AVERAGE_WEIGHTS)
            deps.observer.on_averaged_score(state, score)
    state.step = last
    state.model.load_state_dict(weights)


def _average_last_checkpoints(training: TrainingRun) -> None:
    """Average the last checkpoints if the options say so, and score the result if others are."""
    how = build_averaging(training.session.config)
    if how is None:
        return
    averaged = average_run(training.prepared.run, how, {})
    what = f"{how.strategy} of {format_plural(averaged.account['count'], 'checkpoint')}"
    shares = [f"{scored.row.top1:.2%}" for scored in averaged.scores]
    result = "top-1 {1}, the newest alone {0}".format(*shares) if shares else "not scored"
    training.console.print(f"{what}: {result}")


def _write_results(training: TrainingRun, end: RunEnd) -> Summary:
    """Prune the checkpoints and write the summary."""
    state, run = training.session.state, training.prepared.run
    training.records.flush(sync=True)
    if find_newest_checkpoint(run.checkpoints) is not None:
        keep = count_kept_checkpoints(training.session.config)
        prune_checkpoints(run.checkpoints, keep=keep, scores=state.scores)
    summary = summarise_run(training.prepared, training.session, end)
    write_summary(run.path, summary)
    return summary
