"""The cores and devices of this machine, found without importing torch."""

import os
import platform
from pathlib import Path

from phalanx.errors import ConfigError

_MAX_THREADS = 1024  # as --threads has it


def count_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def count_threads() -> int:
    """The default number of torch threads: OMP_NUM_THREADS, else the number of cores.

    A number that the machine cannot start is refused: it would end in a segmentation fault.
    """
    text = os.environ.get("OMP_NUM_THREADS", "").strip()
    digits = text.lstrip("0") if text.isdecimal() else ""
    if len(digits) > len(str(_MAX_THREADS)) or int(digits or 0) > _MAX_THREADS:
        raise ConfigError(
            f"OMP_NUM_THREADS is {text[:20]}: at most {_MAX_THREADS:,} threads can be used; set it "
            "to the number of cores or less, unset it, or give --threads"
        )
    return int(digits) if digits else count_cores()


def resolve_device(device: str) -> str:
    """The device that a name stands for; auto is the fastest that seems to exist.

    Only what the system shows is checked; torch decides when the run is assembled.
    """
    if device != "auto":
        return device
    if _has_cuda():
        return "cuda"
    apple = platform.system() == "Darwin" and platform.machine() == "arm64"
    return "mps" if apple else "cpu"


def count_devices(device: str) -> int:
    """The number of devices of a resolved name, as far as is known without torch."""
    if not device.startswith("cuda"):
        return 1
    if ":" in device:
        return device.count(",") + 1
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return max(1, len([name for name in visible.split(",") if name.strip()]))
    return max(1, len(list(Path("/dev").glob("nvidia[0-9]*"))))


def _has_cuda() -> bool:
    """Whether a CUDA device is visible and torch was built for CUDA."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    if hidden or not any(Path("/dev").glob("nvidia[0-9]*")):
        return False
    from importlib import metadata  # a fifth of the time of `phalanx --help`

    try:
        return not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False
