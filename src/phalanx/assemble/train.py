"""Train: from a prepared run to its summary."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from phalanx.assemble.average import average_run
from phalanx.assemble.blackbox import DivergenceDiagnosis, Recorder
from phalanx.assemble.build import begin_with_weights, build_state, prepare_torch, step_rule
from phalanx.assemble.dataset_summary import preprocessing_of, recipe_of
from phalanx.assemble.environment import describe_environment
from phalanx.assemble.feed import Feed, normaliser_of, open_feed
from phalanx.assemble.fork import describe_fork, first_step
from phalanx.assemble.input_note import describe_input
from phalanx.assemble.memory import Meter, describe_memory
from phalanx.assemble.prepare import Prepared, take_over
from phalanx.assemble.signals import StopRequest, listening
from phalanx.assemble.watch import RunWatch
from phalanx.config.schema import Config
from phalanx.engine.checkpoint import WEIGHTS, Saver, load_weights, restore
from phalanx.engine.checkpoint_store import (
    AVERAGES,
    find_best,
    list_checkpoints,
    newest_checkpoint,
    prune,
    read_files,
    step_of,
)
from phalanx.engine.evaluate import Score, ValidBatch, evaluate
from phalanx.engine.metrics_buffer import MetricsBuffer
from phalanx.engine.probe import Probe
from phalanx.engine.state import Sums, Throughput, TrainState, hash_weights
from phalanx.engine.step import MicroBatch, StepRule, train_step
from phalanx.engine.train import LoopDependencies, fit
from phalanx.errors import Stopped, UserError
from phalanx.kernels.rounding import COUNTS
from phalanx.plan.averaging import averaging_of, kept_by
from phalanx.plan.model import build_variant
from phalanx.plan.plan import Plan
from phalanx.report.console import Console
from phalanx.report.page import write_report
from phalanx.report.records import Records, read_averaged_top1, read_scores
from phalanx.report.summary import BestScore, Numerics, Summary, write_summary


@dataclass(frozen=True, kw_only=True)
class Training:
    """A run whose parts are all there."""

    prepared: Prepared
    device: torch.device
    meter: Meter
    state: TrainState
    feed: Feed
    records: Records
    console: Console
    saver: Saver
    blame: DivergenceDiagnosis


def train(prepared: Prepared, *, stream: TextIO | None = None) -> Summary:
    """Train a run to its end, from wherever it stands; write its summary and report.

    `stream` is where the run speaks to, standard output if not given.
    """
    run = prepared.run
    with ExitStack() as stack:
        stack.enter_context(run.lock())
        training = _begin(prepared, stack, stream=stream)
        _greet(training)
        _run_loop(training)
        _average_last(training)
        summary = _finish(training)
    write_report(run)
    return summary


def _begin(prepared: Prepared, stack: ExitStack, *, stream: TextIO | None) -> Training:
    """A run at its first step. One that this command made and cannot begin leaves no folder."""
    try:
        training = assemble(take_over(prepared), stack, stream=stream)
        _go_to_start(training)
    except UserError:
        stack.close()
        if prepared.fresh:
            prepared.run.discard()
        raise
    return training


def assemble(prepared: Prepared, stack: ExitStack, *, stream: TextIO | None = None) -> Training:
    """Build every part; the stack takes them down again."""
    run, plan, config = prepared.run, prepared.plan, prepared.config
    console = Console(
        total_steps=plan.total_steps, epochs=plan.epochs, log_file=run.log, stream=stream
    )
    device = prepare_torch(plan)
    meter = Meter(device)
    state = build_state(config, plan, device)
    records = Records(run.path)
    stack.callback(records.flush)  # a run that diverges has its last steps on disk
    keep = sys.maxsize if _scores_after(config) else kept_by(config)  # all, until they are scored
    saver = Saver(run.checkpoints, keep=keep, about=_about(prepared))
    normaliser = normaliser_of(preprocessing_of(config, plan), device, config)
    feed = stack.enter_context(open_feed(recipe_of(config, plan), plan, normaliser, config))
    stack.enter_context(console)
    return Training(
        prepared=prepared,
        device=device,
        meter=meter,
        state=state,
        feed=feed,
        records=records,
        console=console,
        saver=saver,
        blame=DivergenceDiagnosis(
            prepared, state, feed, Probe(state.model) if _looks_on(config) else None
        ),
    )


def _about(prepared: Prepared) -> dict[str, Any]:
    """What travels in every checkpoint beside the state."""
    preprocessing = preprocessing_of(prepared.config, prepared.plan)
    return {
        "run": prepared.run.path.name,
        "config": prepared.config.flat(),
        "classes": list(prepared.view.classes),
        "norm_layout": build_variant(prepared.config).norm.layout,
        "preprocessing": asdict(preprocessing),
        "preprocessing_fingerprint": preprocessing.fingerprint,
        "data": prepared.view.fingerprints,
        "data_manifest": prepared.view.manifest,
        "global_batch": prepared.plan.global_batch,
        "plan": prepared.plan.facts(),
        "code": describe_environment(),
    }


def _go_to_start(training: Training) -> None:
    """Bring the state and the records to the step this process begins at."""
    state, prepared = training.state, training.prepared
    bring_to_start(state, prepared)
    if prepared.start is not None and prepared.start.forked:
        training.saver.save(state)  # the parent may go; this run must stand on its own
    else:
        training.feed.look_again(state.bad_images)
    if state.step == prepared.plan.total_steps:
        state.scores.pop(state.step, None)  # killed before the summary: the last score is redone
    training.records.cut_back(state.step, scored=state.step in state.scores)


def bring_to_start(state: TrainState, prepared: Prepared) -> None:
    """Fill a fresh state with what the run begins with: a checkpoint, or its first weights."""
    start = prepared.start
    if start is not None:
        restore(state, start.checkpoint)
    else:
        begin_with_weights(state.model, prepared.config)
        if state.averages is not None:
            state.averages.begin_with(state.model)
    if start is not None and start.forked:
        state.step = first_step(prepared.plan, start)
        state.scores, state.sums, state.clock = {}, Sums(), Throughput()


def _greet(training: Training) -> None:
    """Say what is about to happen."""
    prepared, plan, console = training.prepared, training.prepared.plan, training.console
    config, start = prepared.config, prepared.start
    console.print(
        f"{config.model.model} on {config.data.data}: {plan.train_images:,} images, "
        f"{plan.total_steps:,} steps of {plan.global_batch:,}, {plan.epochs:g} epochs, "
        f"on {plan.device} in {plan.precision}"
    )
    console.print(f"run folder {prepared.run.path}")
    for warning in plan.warnings:
        console.print(f"note: {warning}")
    if start is not None and start.forked:
        console.print(describe_fork(plan, start))
    elif training.state.step:
        console.print(f"resumed at step {training.state.step:,}")
    elif config.model.init_weights:
        fresh = ", with a new classifier" if config.model.reset_head else ""
        console.print(f"weights from {config.model.init_weights}{fresh}")


def _run_loop(training: Training) -> None:
    """Train until the end, a signal, or trouble; whatever was handed to the saver is written."""
    state, plan, console = training.state, training.prepared.plan, training.console
    config, stop = training.prepared.config, StopRequest()
    # where every step is looked at, an unsound one is seen before another is made
    ledger = MetricsBuffer(
        training.device, 1 if _looks_on(config) else config.train.device_iterations
    )
    parts = parts_of(training, stop)
    with listening(stop, leave=console.restore_terminal):
        with _recorder_of(training, ledger, parts).recording():
            try:
                fit(state, plan, parts=parts, ledger=ledger)
            finally:
                training.saver.wait()
        if _scores_after(config):
            _score_kept(training, parts)


def _recorder_of(training: Training, ledger: MetricsBuffer, parts: LoopDependencies) -> Recorder:
    """What writes the black box of a run that ends badly."""
    return Recorder(
        prepared=training.prepared,
        state=training.state,
        feed=training.feed,
        records=training.records,
        unread=lambda: ledger.settle(Sums()),
        write_steps=parts.watch.steps,
        blame=training.blame,
    )


def _looks_on(config: Config) -> bool:
    """Whether every step is looked at, module by module."""
    return config.machine.fp_exceptions


def step_with(
    rule: StepRule, plan: Plan, probe: Probe | None = None
) -> Callable[[TrainState, Sequence[MicroBatch], float], Tensor]:
    """The step of a run, as a function of the state; a probe looks on, if one is given."""

    def step(state: TrainState, passes: Sequence[MicroBatch], lr: float) -> Tensor:
        scale = plan.loss_scale.at(state.step)
        with probe or nullcontext():
            return train_step(state, passes, lr, rule=rule, loss_scale=scale)

    return step


def parts_of(training: Training, stop: StopRequest) -> LoopDependencies:
    """What the loop needs, each as a function of the state."""
    feed, plan = training.feed, training.prepared.plan
    rule = step_rule(training.prepared.config, plan, training.device)

    def score(state: TrainState) -> Score | None:
        # the last score is finished whatever comes: it ends the run
        last = state.step == plan.total_steps
        interrupted = (lambda: False) if last else stop
        return evaluate(state.model, shown(), rule=rule, interrupted=interrupted)

    def shown() -> Iterator[ValidBatch]:
        for number, batch in enumerate(feed.validation()):
            training.console.evaluation_progress(number * plan.valid_batch, plan.valid_images)
            yield batch

    def save(state: TrainState) -> None:
        state.bad_images |= feed.bad_images()
        training.records.flush(sync=True)
        training.saver.save(state)

    return LoopDependencies(
        batches_from=feed.batches_from,
        train_step=step_with(rule, plan, training.blame.probe),
        evaluate=score,
        save=save,
        stopping=stop,
        images_of=feed.images_of,
        blame=training.blame,
        watch=RunWatch(
            training.records,
            training.console,
            plan,
            feed=feed,
        ),
    )


def _scores_after(config: Config) -> bool:
    """Whether checkpoints are scored when training is over."""
    return config.train.validation and config.train.validation_mode == "after"


def _score_kept(training: Training, parts: LoopDependencies) -> None:
    """Score every checkpoint, and the average in it, that no process before this one has scored."""
    state, run = training.state, training.prepared.run
    state.scores |= {row.step: row.top1 for row in read_scores(run.path)}
    averaged = read_averaged_top1(run.path)
    training.saver.wait()
    last, weights = state.step, {n: t.clone() for n, t in state.model.state_dict().items()}
    for checkpoint in list_checkpoints(run.checkpoints):
        state.step = step_of(checkpoint)
        if state.step not in state.scores:
            score = _score_file(checkpoint / WEIGHTS, state, parts)
            state.scores[state.step] = score.top1
            parts.watch.score(state, score)
            training.records.flush(sync=True)
        if state.step not in averaged and (checkpoint / AVERAGES).exists():
            parts.watch.score_averaged(state, _score_file(checkpoint / AVERAGES, state, parts))
    state.step = last
    state.model.load_state_dict(weights)


def _score_file(file: Path, state: TrainState, parts: LoopDependencies) -> Score:
    """The score of the weights in a file of a checkpoint; a signal may stop it."""
    load_weights(state.model, read_files(file.parent)[file.name], where=file)
    score = parts.evaluate(state)
    if score is None:
        raise Stopped("stopped while scoring; the checkpoints left are scored by a resume")
    return score


def _average_last(training: Training) -> None:
    """Average the last checkpoints and score that, where the run is to end so."""
    how = averaging_of(training.prepared.config)
    if how is None:
        return
    averaged = average_run(training.prepared.run, how, {})
    before, after = (f"{row.top1:.2%}" for row, _ in averaged.scores)
    told = f"{how.strategy} of {averaged.account['count']} checkpoints"
    training.console.print(f"{told}: top-1 {after}, the newest alone {before}")


def _finish(training: Training) -> Summary:
    """Write what came out."""
    state, prepared = training.state, training.prepared
    run, plan = prepared.run, prepared.plan
    state.bad_images |= training.feed.bad_images()
    training.records.flush(sync=True)
    if newest_checkpoint(run.checkpoints) is not None:
        prune(run.checkpoints, keep=kept_by(prepared.config), scores=state.scores)
    best = find_best(run.checkpoints, state.scores)
    newest = newest_checkpoint(run.checkpoints)
    row = next(iter(read_scores(run.path)[-1:]), None)
    summary = Summary(
        steps=state.step,
        epochs=plan.epochs,
        images=state.step * plan.global_batch,
        scored=row.scored if row else None,
        top1=row.top1 if row else None,
        top5=row.top5 if row else None,
        interval95=row.interval95 if row else None,
        images_per_second=state.clock.images_per_second,
        data_wait=state.clock.data_wait,
        weights_sha256=hash_weights(state.model.state_dict()),
        best=BestScore(step=best.step, top1=best.top1) if best else None,
        checkpoint=str(newest.relative_to(run.path)) if newest else None,
        bad_images=tuple(sorted(state.bad_images.values())),
        finished=True,
        input=describe_input(training.feed, state.clock, prepared),
        averaged_top1=read_averaged_top1(run.path).get(state.step),
        numerics=_describe_numerics(state, plan),
        memory=describe_memory(training.meter, prepared.config, plan),
    )
    write_summary(run.path, summary)
    return summary


def _describe_numerics(state: TrainState, plan: Plan) -> Numerics | None:
    """What became of small and large numbers, where some have 16 bits."""
    if plan.precision == "32.32":
        return None
    counts = dict.fromkeys(COUNTS, 0.0)
    if state.counts is not None:
        counts = dict(zip(COUNTS, state.counts.tolist(), strict=True))

    def share(part: str, whole: str) -> float | None:
        return counts[part] / counts[whole] if counts[whole] else None

    gone, scaler = share("gone", "way"), state.scaler
    found = tuple(scaler.history or [(0, scaler.scale)]) if scaler else ()
    return Numerics(
        updates_lost=share("lost", "updated"),
        lost_to_rounding=None if gone is None else 1 - gone,
        gradients_zero=share("gradient zero", "elements"),
        gradients_not_finite=int(counts["gradient not finite"]) if state.half else None,
        skipped_steps=scaler.skipped if scaler else 0,
        loss_scales=found or plan.loss_scale.changes(state.step),
    )
