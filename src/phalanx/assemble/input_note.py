"""What a finished run knows of its input: how fast images came, and who waited for whom."""

from contextlib import suppress

from phalanx.assemble.feed import Feed, LoadedFeed
from phalanx.assemble.prepare import Prepared
from phalanx.data.formats.decode import BadImage
from phalanx.data.loading.stage_rates import Rate, judge_feeding, time_stages
from phalanx.engine.state import Throughput
from phalanx.report.summary import InputNote

_SECONDS, _SAMPLES = 0.03, 16  # for each stage: a glance, not a benchmark
_KEPT_UP = 0.05  # waits of less than this share of the time are no limit, as the report says


def describe_input(feed: Feed, clock: Throughput, prepared: Prepared) -> InputNote | None:
    """The verdict of `phalanx data bench`, from what training measured and a glance at the stages.

    Where training did not wait, what could have come is worked out from one core's rate.
    """
    seen, wait = clock.images_per_second, clock.data_wait
    if seen is None or wait is None or not isinstance(feed, LoadedFeed):
        return None
    eaten = seen / max(1 - wait, 1e-6)
    if feed.loader.on_device:
        return InputNote(
            verdict="the images are made on the device itself",
            images_per_second_available=seen,
            images_per_second_needed=eaten,
            stages={},
        )
    stages: list[Rate] = []
    with suppress(BadImage):  # a file went away: the run has its summary all the same
        stages = list(time_stages(feed.loader.reader("train"), _SECONDS, _SAMPLES))
    if not stages:
        return None
    come = seen
    if wait < _KEPT_UP:
        come = max(eaten, _one_core(stages) * max(prepared.plan.workers, 1))
    return InputNote(
        verdict=judge_feeding(come, eaten, model=prepared.config.model.model, stages=stages),
        images_per_second_available=come,
        images_per_second_needed=eaten,
        stages={rate.stage: rate.images_per_second for rate in stages},
    )


def _one_core(stages: list[Rate]) -> float:
    """Images a second that one core reads and makes ready."""
    rates = {rate.stage: rate.images_per_second for rate in stages}
    return 1 / (1 / rates["read"] + 1 / rates["both"])
