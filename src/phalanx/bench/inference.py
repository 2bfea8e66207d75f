"""Images/s of inference, and the latency of a batch: the forward pass that scores and serves."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.assemble.build import build_normaliser
from phalanx.assemble.feed import LoadedFeed
from phalanx.assemble.score import watch_ranks
from phalanx.assemble.session import Session
from phalanx.bench.measurement import BenchJob, build_result, release_memory, start_clock
from phalanx.bench.memory_fit import explain_full_forward, refuse_large_forward
from phalanx.bench.result import BenchResult
from phalanx.bench.synthetic_steps import synchronise
from phalanx.engine.evaluate import ValidBatch
from phalanx.engine.step import compute_logits
from phalanx.errors import ConfigError, is_out_of_memory
from phalanx.report.scores import compute_percentiles

_MOST_CALLS = 1000  # of one batch at a time
_LATENCY_SHARE = 0.5  # of the seconds for throughput


def measure_inference(open_session: Callable[[], Session], job: BenchJob) -> BenchResult:
    """Score batches until all blocks are measured; then one at a time, for the latency."""
    release_memory()
    with open_session() as session:
        refuse_large_forward(session)
        try:
            return _measure(session, job)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        raise explain_full_forward(session)


@torch.inference_mode()
def _measure(session: Session, job: BenchJob) -> BenchResult:
    plan, context, done = session.plan, session.rank_context, 0
    stream, answer = _repeat_batches(session), _build_answer(session)
    clock = start_clock(session, job)
    with watch_ranks(session, lambda: f"a benchmark, after {done:,} batches") as beat:
        while not clock.is_over:
            count = clock.next_end - done
            context.gather(None)  # ranks start together
            began, rows = perf_counter(), list[int]()
            answer(_count_rows(islice(stream, count), rows, beat))
            synchronise(session.device)
            busy_s = max(context.gather(perf_counter() - began))
            images = sum(context.gather(sum(rows) if context.reads_images(scoring=True) else 0))
            done += count
            clock.end_block(done, images, busy_s)
        latency = None if context.scores_in_stages else _time_calls(session, job, beat)
    return build_result(
        session,
        job,
        clock,
        global_batch=plan.valid_batch * plan.layout.pipelines,
        micro_batch=plan.valid_batch,
        latency_ms=latency,
    )


def _build_answer(session: Session) -> Callable[[Iterable[ValidBatch]], object]:
    """A function that scores batches: with the scoring model, or with all stages together."""
    if session.rank_context.scores_in_stages:
        return session.evaluate
    model, options = session.find_scoring_model(), session.options

    def answer(batches: Iterable[ValidBatch]) -> None:
        for batch in batches:
            compute_logits(model, batch.images, options)

    return answer


def _repeat_batches(session: Session) -> Iterator[tuple[int, ValidBatch]]:
    """This rank's validation batches, repeated endlessly, with the number of images in each."""
    plan, context, feed = session.plan, session.rank_context, session.scoring_feed
    # another folder than the run's may have another number of images
    loader = feed.loader if isinstance(feed, LoadedFeed) else None
    images = plan.valid_images if loader is None else len(loader.source("valid"))
    rows = plan.valid_batch
    numbers = context.valid_share.batches(-(-images // rows))
    if not numbers:
        raise ConfigError(
            f"--batch-size {rows:,}: the {images:,} validation images are too few batches for "
            f"{plan.layout.ranks} devices; lower it"
        )
    sizes = [min(rows, images - number * rows) for number in numbers]
    while True:
        yield from zip(sizes, feed.validation_batches(), strict=True)


def _count_rows(
    stream: Iterable[tuple[int, ValidBatch]], counts: list[int], beat: Callable[[], None]
) -> Iterator[ValidBatch]:
    """The batches of a stream; their numbers of images are appended to `counts`."""
    for rows, batch in stream:
        beat()
        counts.append(rows)
        yield batch


def _time_calls(session: Session, job: BenchJob, beat: Callable[[], None]) -> dict[str, Any]:
    """Milliseconds from a batch to its logits on the host, one batch at a time.

    Synthetic images are on the device already; others are bytes on the host.
    """
    call, times = _build_call(session, on_device=job.data == "synthetic"), list[float]()
    call()
    end = perf_counter() + _LATENCY_SHARE * job.timing.seconds
    while len(times) < _MOST_CALLS and (perf_counter() < end or not times):
        began = perf_counter()
        call()
        times.append(1e3 * (perf_counter() - began))
        beat()
    every = np.concatenate(session.rank_context.gather(np.array(times)))
    return {**compute_percentiles(every), "n": len(every)}


def _build_call(session: Session, *, on_device: bool) -> Callable[[], Tensor]:
    """A call that scores one batch, and waits for it."""
    rows, size = session.plan.valid_batch, session.preprocessing.image_size
    model, options = session.find_scoring_model(), session.options
    normaliser = build_normaliser(session.preprocessing, session.scoring_device)
    pixels = np.random.default_rng(0).integers(0, 256, (rows, size, size, 3), np.uint8)
    ready = normaliser(pixels) if on_device else None

    def call() -> Tensor:
        images = normaliser(pixels) if ready is None else ready
        return compute_logits(model, images, options).cpu()  # waits for the device

    return call
