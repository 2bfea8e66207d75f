"""The result of a run: the numbers of summary.json."""

from contextlib import suppress
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.assemble.feed import LoadedFeed
from phalanx.assemble.memory import describe_memory
from phalanx.assemble.prepare import PreparedRun
from phalanx.assemble.session import Session
from phalanx.config.combinations import check_gpu_decode
from phalanx.config.schema import Config
from phalanx.data.formats.decode import BadImage
from phalanx.data.loading.gpu_decode import find_gpu_decode_problem
from phalanx.data.loading.gpu_share import is_gpu_decodable
from phalanx.data.loading.loader import Loader
from phalanx.data.loading.stage_rates import StageRate, describe_bottleneck, time_stages
from phalanx.engine.checkpoint_store import choose_best_step, find_newest_checkpoint
from phalanx.engine.state import TrainState, hash_weights
from phalanx.kernels.rounding import COUNTS
from phalanx.plan.model import build_variant
from phalanx.plan.plan import Plan
from phalanx.report.environment import collect_environment
from phalanx.report.records import read_averaged_scores, read_scores
from phalanx.report.summary import BestScore, InputNote, Numerics, Summary

_SECONDS, _SAMPLES = 0.03, 16  # for each stage: a quick estimate, not a benchmark
_KEPT_UP = 0.05  # if training waits for less than this share of the time, input is no bottleneck


class RunEnd(NamedTuple):
    """What must be gathered from all ranks at the end of a run."""

    weights: dict[str, Tensor]  # of the whole model, on the rank that writes
    rounding_counts: Tensor | None  # of roundings, on the same rank
    memory_rises: list[int | None]  # by how many bytes the memory of each rank rose


def gather_run_end(session: Session) -> RunEnd:
    """Gather the end of a run from all ranks; all must call it."""
    rises, state = session.rank_context.gather(session.memory.measure_rise()), session.state
    own = {name: tensor.detach().cpu() for name, tensor in state.model.state_dict().items()}
    return RunEnd(
        state.gather_to_first(own) if state.gather_to_first else own,
        state.sum_rounding_counts(),
        rises,
    )


def summarise_run(prepared: PreparedRun, session: Session, end: RunEnd) -> Summary:
    """The summary of a finished run."""
    state, run, plan = session.state, prepared.run, session.plan
    best = choose_best_step(run.checkpoints, state.scores)
    newest = find_newest_checkpoint(run.checkpoints)
    row = next(iter(read_scores(run.path)[-1:]), None)
    averaged = read_averaged_scores(run.path).get(state.step)
    memory = describe_memory(end.memory_rises, prepared.config, plan)
    return Summary(
        steps=state.step,
        epochs=plan.epochs,
        images=state.step * plan.global_batch,
        scored=row.scored if row else None,
        top1=row.top1 if row else None,
        top5=row.top5 if row else None,
        interval95=row.interval95 if row else None,
        images_per_second=state.throughput.images_per_second,
        data_wait=state.throughput.data_wait,
        weights_sha256=hash_weights(end.weights),
        best=None if best is None else BestScore(step=best, top1=state.scores[best]),
        checkpoint=str(newest.relative_to(run.path)) if newest else None,
        bad_images=tuple(sorted(state.bad_images.values())),
        finished=True,
        input=_describe_input(session),
        averaged_top1=averaged.top1 if averaged else None,
        numerics=_describe_numerics(state, plan, end.rounding_counts),
        memory=memory[0],
        memory_by_stage=memory if len(memory) > 1 else (),
    )


def _describe_numerics(state: TrainState, plan: Plan, counted: Tensor | None) -> Numerics | None:
    """Lost updates, zero gradients, overflows and loss scales; None without 16-bit numbers."""
    if plan.precision == "32.32":
        return None
    counts = dict.fromkeys(COUNTS, 0.0)
    if counted is not None:
        counts = dict(zip(COUNTS, counted.tolist(), strict=True))

    def share(part: str, whole: str) -> float | None:
        return counts[part] / counts[whole] if counts[whole] else None

    moved, scaler = share("distance moved", "distance wanted"), state.scaler
    found = tuple(scaler.history or [(0, scaler.scale)]) if scaler else ()
    return Numerics(
        updates_lost=share("lost", "updated"),
        lost_to_rounding=None if moved is None else 1 - moved,
        gradients_zero=share("gradient zero", "elements"),
        gradients_not_finite=int(counts["gradient not finite"]) if state.half else None,
        skipped_steps=scaler.skipped if scaler else 0,
        loss_scales=found or plan.loss_scale.changes(state.step),
    )


def _describe_input(session: Session) -> InputNote | None:
    """The verdict of `phalanx data bench`, from what training measured and a quick timing.

    If training did not wait, the available rate is estimated from that of one core.
    """
    feed, throughput = session.feed, session.state.throughput
    seen, wait = throughput.images_per_second, throughput.data_wait
    if seen is None or wait is None or not isinstance(feed, LoadedFeed):
        return None
    needed = seen / max(1 - wait, 1e-6)
    if feed.loader.on_device:
        percent, first = feed.loader.spec.gpu_percent, feed.loader.spec.first_checked_step
        since = "" if first is None else f" from step {first + 1:,} on"
        decoded = f"up to {percent}% of the images are decoded on the device{since}"
        made = decoded if percent else "the images are made on the device itself"
        whole = "them" if first is None else "images, from the first step to the last,"
        return InputNote(
            verdict=f"{made}; training waited for {whole} {wait:.0%} of the time",
            images_per_second_available=seen,
            images_per_second_needed=needed,
            stages={},
        )
    stages: list[StageRate] = []
    with suppress(BadImage):  # a file was deleted: the summary then lacks this part
        stages = list(time_stages(feed.loader.reader("train"), _SECONDS, _SAMPLES))
    if not stages:
        return None
    rates = {rate.stage: rate.images_per_second for rate in stages}
    available = seen
    if wait < _KEPT_UP:
        one_core = 1 / (1 / rates["read"] + 1 / rates["both"])
        readers = max(session.plan.workers, 1) * session.rank_context.layout.ranks
        available = max(needed, one_core * readers)
    return InputNote(
        verdict=describe_bottleneck(
            available,
            needed,
            model=session.config.model.model,
            stages=stages,
            gpu_could_decode=available < needed
            and can_decode_on_gpu(feed.loader, session.config, session.device),
        ),
        images_per_second_available=available,
        images_per_second_needed=needed,
        stages=rates,
    )


def can_decode_on_gpu(loader: Loader, config: Config, device: torch.device) -> bool:
    """Whether the GPU could decode a share of the images, and does not yet."""
    if config.data.gpu_decode or device.type != "cuda":
        return False
    if loader.spec.checked_since is not None:  # the run decides that itself
        return False
    hindered = any(check_gpu_decode(config.replace_options({"gpu-decode": True})))
    first = loader.reader("train").try_open(0)
    is_jpeg = not isinstance(first, BadImage) and is_gpu_decodable(first)
    return is_jpeg and not hindered and not find_gpu_decode_problem(device)


def gather_run_facts(prepared: PreparedRun, session: Session) -> dict[str, Any]:
    """What is written to every checkpoint besides the state."""
    return {
        "run": prepared.run.path.name,
        "config": prepared.config.flat(),
        "classes": list(prepared.dataset.classes),
        "norm_layout": build_variant(prepared.config).norm.layout,
        "preprocessing": asdict(session.preprocessing),
        "preprocessing_fingerprint": session.preprocessing.fingerprint,
        "data": prepared.dataset.fingerprints,
        "data_manifest": prepared.dataset.manifest,
        "global_batch": prepared.plan.global_batch,
        "plan": prepared.plan.to_dict(),
        "code": collect_environment(),
    }
