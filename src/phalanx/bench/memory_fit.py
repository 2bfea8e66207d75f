"""Batches that do not fit into memory: refused, with the largest that fits.

A GPU that runs out of memory raises an error, and smaller batches are tried. A host kills the
process, so a batch's memory is predicted there: from a step's plan, or two small forward passes.
"""

from dataclasses import replace

import torch

from phalanx.assemble.memory import (
    predict_step_memory,
    read_peak_memory,
    read_resident_memory,
)
from phalanx.assemble.session import Session
from phalanx.assemble.torch_setup import find_rank_device
from phalanx.bench.batch_size_finder import (
    FREE_MEMORY_FRACTION,
    find_batch_size,
    search_sizes,
)
from phalanx.config.read import Settings
from phalanx.config.schema import Config
from phalanx.data.loading.cache import read_free_memory
from phalanx.engine.step import compute_logits
from phalanx.errors import ConfigError, is_out_of_memory
from phalanx.plan.machine_choice import count_local_ranks
from phalanx.plan.plan import Plan
from phalanx.units import format_bytes

_FLOAT_BYTES, _CHANNELS = 4, 3
_SURELY_ENOUGH = 400  # times the bytes of its images: no step of our models needs more
_COPIES = 2  # of synthetic images: as they are drawn, and as the model reads them
_TRIED = (8, 32)  # images of the forward passes from which others are predicted
_TRIAL_S = 0.1


def refuse_large_step(config: Config, plan: Plan) -> None:
    """Raise ConfigError if a step does not fit into the host's memory; it names one that does."""
    rows, free = plan.micro_batch, _count_free(plan)
    if _is_on_gpu(plan):
        _refuse_large_images(rows, plan, free)
        return
    if _surely_fits(rows * plan.layout.turn_size, plan, free):
        return
    less = rows // 2
    try:
        needed, smaller = (
            predict_step_memory(config, replace(plan, micro_batch=size)).peak
            for size in (rows, less)
        )
    except ConfigError:  # a plugin's network that needs real tensors
        return
    _refuse_large("a training step", (less, smaller), (rows, needed), asked=rows, free=free)


def explain_full_device(settings: Settings, plan: Plan, *, alone: bool) -> ConfigError:
    """The error for a training step that ran out of memory; it names the largest that fits.

    alone: there are no other ranks, which would wait while sizes are tried.
    """
    if not alone:
        return _describe_full(plan.micro_batch, None, plan.device)
    if plan.micro_batch == 1:
        return _describe_full(1, 0, plan.device)
    found = find_batch_size(
        settings, most=plan.micro_batch, seconds=_TRIAL_S, done=lambda trial: None
    )
    return _describe_full(plan.micro_batch, found.largest, plan.device)


def refuse_large_forward(session: Session) -> None:
    """The same for a batch that is only scored."""
    plan = session.plan
    rows, free = plan.valid_batch, _count_free(plan)
    if _is_on_gpu(plan):
        _refuse_large_images(rows, plan, free)
        return
    if session.rank_context.scores_in_stages or _surely_fits(rows, plan, free):
        return
    held = read_resident_memory("VmRSS") or 0  # not free any more
    peaks = []
    for size in _TRIED:
        _run_forward(session, size)
        peaks.append((size, read_peak_memory() - held))
    _refuse_large("a forward pass", *peaks, asked=rows, free=free)


def explain_full_forward(session: Session) -> ConfigError:
    """The error for a forward pass that ran out of memory; it names the largest that fits."""

    def fits(size: int) -> bool:
        torch.cuda.empty_cache()
        try:
            _run_forward(session, size)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    plan = session.plan
    alone = session.rank_context.ranks is None
    found = search_sizes(fits, most=plan.valid_batch) if alone else None
    return _describe_full(plan.valid_batch, found, plan.device)


@torch.inference_mode()
def _run_forward(session: Session, rows: int) -> None:
    size = session.plan.image_size
    images = torch.zeros(rows, _CHANNELS, size, size, device=session.device)
    images = images.contiguous(memory_format=torch.channels_last)
    compute_logits(session.find_scoring_model(), images, session.options).cpu()


def _is_on_gpu(plan: Plan) -> bool:
    return torch.device(find_rank_device(plan.device)).type != "cpu"


def _count_free(plan: Plan) -> int:
    """Free bytes of memory for each rank of this host."""
    return int(FREE_MEMORY_FRACTION * read_free_memory() / count_local_ranks(plan.layout))


def _surely_fits(rows: int, plan: Plan, free: int) -> bool:
    images = rows * _CHANNELS * plan.image_size**2 * _FLOAT_BYTES
    return images * _SURELY_ENOUGH < free


def _refuse_large_images(rows: int, plan: Plan, free: int) -> None:
    """Raise ConfigError if the host has no memory for the images that it makes for a GPU."""
    images = rows * _CHANNELS * plan.image_size**2 * _FLOAT_BYTES
    high = rows, _COPIES * images
    _refuse_large("making the images of a batch", (0, 0), high, asked=rows, free=free)


def _refuse_large(
    what: str, low: tuple[int, int], high: tuple[int, int], *, asked: int, free: int
) -> None:
    """Raise ConfigError if a batch needs too much, extrapolated from two others: (rows, bytes)."""
    (few, least), (many, most) = low, high
    each = max(1, (most - least) // max(1, many - few))
    needed = most + each * (asked - many)
    if needed <= free:
        return
    largest = (free - most) // each + many
    head = f"--batch-size {asked:,}: {what} needs about {format_bytes(needed)} of memory"
    if largest < 1:
        raise ConfigError(
            f"{head}, and not even that of one image fits into the {format_bytes(free)} that can "
            "be used; try a smaller --image-size"
        )
    raise ConfigError(
        f"{head}, of which {format_bytes(free)} can be used; about {largest:,} images fit: "
        f"--batch-size {largest}"
    )


def _describe_full(asked: int, largest: int | None, device: str) -> ConfigError:
    """The error for a full device; largest: 0 if none fits, None if none was tried."""
    if largest is None:
        return ConfigError(
            f"--batch-size {asked:,}: does not fit into the memory of {device}; the same command "
            "on one device finds the largest that does"
        )
    if not largest:
        return ConfigError(
            f"--batch-size {asked:,}: does not fit into the memory of {device}, and neither does "
            "the smallest; try a smaller --image-size"
        )
    return ConfigError(
        f"--batch-size {asked:,}: does not fit into the memory of {device}; the largest that "
        f"does, of those tried: --batch-size {largest}"
    )
