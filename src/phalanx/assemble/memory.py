"""The memory of a run: what a step should take, and what the process took in the end."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from phalanx.assemble.build import first_device, offloads
from phalanx.config.schema import Config
from phalanx.errors import ConfigError
from phalanx.models.memory import HALF_BYTES, Memory, Upkeep, predict_memory
from phalanx.optim.rules import FOOTPRINTS
from phalanx.plan.model import build_variant
from phalanx.plan.plan import Plan
from phalanx.report.summary import MemoryNote

_FULL_BYTES = 4
_KIB = 1024


def _upkeep_of(config: Config, plan: Plan) -> Upkeep:
    """What each weight costs the device, whatever the batch."""
    said, rule = config.optim, FOOTPRINTS[config.optim.optimizer]
    halved = plan.precision == "16.16"  # but for the few numbers of norms
    width, slots = HALF_BYTES if halved else _FULL_BYTES, rule.slots(said.momentum)
    # 16-bit weights, gradients and slots have copies of 32 bits while they are moved
    update = _FULL_BYTES * (rule.passing + (2 + slots if halved else 0))
    away = offloads(config, torch.device(first_device(plan.device)).type)
    return Upkeep(
        weight=width,
        gradient=width,
        optimizer=0 if away else width * slots,
        update=update + (width * slots if away else 0),
        average=_FULL_BYTES if said.ema_decay else 0,
        accumulates=plan.accumulation > 1,
    )


def predict(config: Config, plan: Plan) -> Memory:
    """The memory of this run's largest step on each device; ConfigError where it is not known."""
    return predict_memory(
        build_variant(config),
        num_classes=plan.num_classes,
        batch=plan.micro_batch,
        image_size=plan.image_size,
        upkeep=_upkeep_of(config, plan),
        half=plan.precision.startswith("16"),
        stored=plan.recompute_patterns,
    )


def _peak_resident(_: torch.device) -> int:
    """The most memory this process ever had, in bytes; that of its workers is not in it."""
    status = Path("/proc/self/status")  # here Linux leaves out what the parent process had
    for line in status.read_text().splitlines() if status.is_file() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * _KIB
    import resource  # not on every system

    unit = 1 if sys.platform == "darwin" else _KIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


_Reading = Callable[[torch.device], int]
_METERS: dict[str, tuple[_Reading, _Reading]] = {  # in use at the start, most in use
    "cpu": (_peak_resident, _peak_resident),
    "cuda": (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated),
}


class Meter:
    """Measures how far the memory in use rises from the moment the meter is made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._start = _METERS[device.type][0](device) if device.type in _METERS else 0

    def rise(self) -> int | None:
        """Bytes above the start at the highest point; None where that is not known."""
        if self.device.type not in _METERS:
            return None
        # a CPU's process that had more before the start than after it cannot tell
        return _METERS[self.device.type][1](self.device) - self._start or None


def describe_memory(meter: Meter, config: Config, plan: Plan) -> MemoryNote:
    """Predicted beside measured; the measure is taken first, for the prediction needs some too."""
    measured = meter.rise()
    try:
        predicted = predict(config, plan).peak
    except ConfigError:  # a plugin's network that needs values
        predicted = None
    return MemoryNote(predicted=predicted, measured=measured)
