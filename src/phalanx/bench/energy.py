"""The energy that devices have used, by their own counters, and their clock rate."""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

_NVML = "libnvidia-ml.so.1"
_RAPL = Path("/sys/class/powercap")
_MILLI, _MICRO = 1e-3, 1e-6
_SM_CLOCK = 1  # NVML's number of this kind of clock


class EnergyMeter:
    """Joules from `start` on: of a GPU by NVML, of a processor by RAPL.

    A processor's counter covers all that runs on it; only one rank per host may read it.
    """

    def __init__(self, device: torch.device, *, rapl: Path = _RAPL) -> None:
        self._read: Callable[[], dict[str, float] | None]
        if device.type == "cuda":
            self._read = lambda: _read_gpu(device)
            self._ranges: dict[str, float] = {}
        else:
            self._read = lambda: _read_packages(rapl) if device.type == "cpu" else None
            self._ranges = _read_packages(rapl, "max_energy_range_uj") or {}
        self._first: dict[str, float] | None = None

    def start(self) -> None:
        """Count from here."""
        self._first = self._read()

    def read(self) -> float | None:
        """Joules since the start; None if the device does not report them."""
        first, last = self._first, self._read()
        if first is None or last is None or first.keys() != last.keys():
            return None
        used = {name: last[name] - first[name] for name in first}
        # a processor's counter wraps around about once an hour
        return sum(
            one + (self._ranges.get(name, 0.0) if one < 0 else 0.0) for name, one in used.items()
        )


def _read_packages(rapl: Path, file: str = "energy_uj") -> dict[str, float] | None:
    """A counter of each processor package in joules; None if it may not be read."""
    found = {}
    for package in sorted(rapl.glob("intel-rapl:[0-9]*")):
        if package.name.count(":") > 1:  # a domain of a package, included there already
            continue
        try:
            if not (package / "name").read_text().startswith("package"):
                continue  # psys: the whole machine, including its packages
            found[package.name] = int((package / file).read_text()) * _MICRO
        except (OSError, ValueError):
            return None
    return found or None


@cache
def _open_nvml() -> Any:
    """The driver's NVML library, initialised; None if there is none."""
    try:
        library = ctypes.CDLL(_NVML)
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def _find_gpu(device: torch.device) -> tuple[Any, ctypes.c_void_p, str] | None:
    """NVML, its handle of a GPU, and the GPU's name; None if it has none."""
    library = _open_nvml()
    if library is None:
        return None
    # NVML and CUDA number devices differently
    uuid, handle = f"GPU-{torch.cuda.get_device_properties(device).uuid}", ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return None
    return library, handle, uuid


def _read_gpu(device: torch.device) -> dict[str, float] | None:
    """The joules that a GPU has used since the driver was loaded."""
    found, millijoules = _find_gpu(device), ctypes.c_ulonglong()
    if found is None:
        return None
    library, handle, uuid = found
    if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
        return None
    return {uuid: millijoules.value * _MILLI}


def read_clock_mhz(device: torch.device) -> int | None:
    """The current SM clock of a GPU; None if the device does not report it."""
    found = _find_gpu(device) if device.type == "cuda" else None
    megahertz = ctypes.c_uint()
    if found is None or found[0].nvmlDeviceGetClockInfo(
        found[1], _SM_CLOCK, ctypes.byref(megahertz)
    ):
        return None
    return megahertz.value
