"""Sets torch up as a plan says: threads, kernels and the device."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from phalanx.config.schema import Config
from phalanx.errors import ConfigError
from phalanx.plan.machine import count_devices, resolve_device
from phalanx.plan.plan import Plan

_WITHOUT_AMX = "AVX512_CORE_BF16"  # oneDNN's highest instruction set without matrix tiles
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_LARGEST_TRIM = 2**31 - 1  # bytes; the largest int
_LARGEST_MMAP = 32 * 2**20  # bytes; the largest that glibc accepts
DETERMINISM = {  # (deterministic algorithms and cuDNN kernels, cudnn.benchmark)
    "off": (False, True),
    "seeded": (False, False),  # the same random draws; sums may be added in another order
    "strict": (True, False),  # the same bits every time, on the same hardware
}


def prepare_torch(plan: Plan, *, local_rank: int = 0) -> torch.device:
    """Set torch up as the plan says, and return the device of a rank."""
    disable_amx_on_virtual_machines()
    set_cuda_queues()
    apply_torch_settings(plan)
    device = _open_device(find_rank_device(plan.device, local_rank), "--device")
    if device.type == "cpu":
        _keep_freed_memory()
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # NCCL and Triton use the current device
    return device


def set_cuda_queues() -> None:
    """Let 32 queues of a GPU serve all streams, unless the user has said how many.

    It is read when CUDA starts. With the usual eight, streams of nvJPEG share the queue of
    training, and wait for whole CUDA graphs.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def find_scoring_device(config: Config, device: torch.device, *, local_rank: int) -> torch.device:
    """The device that scores during training; the training device unless the option names one.

    The named devices are assigned to ranks in turn: a single one serves them all.
    """
    name = config.machine.validation_device
    if name is None:
        return device
    name = resolve_device(name)
    turn = local_rank % count_devices(name) if ":" in name else local_rank
    found = _open_device(find_rank_device(name, turn), "--validation-device")
    is_same = found.type == device.type and (found.index or 0) == (device.index or 0)
    return device if is_same else found


def _open_device(name: str, flag: str) -> torch.device:
    """The device of that name; ConfigError if torch does not find it."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{flag}: torch finds no CUDA device here; use {flag} cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        here = "1 CUDA device, number 0" if found == 1 else f"{found} CUDA devices, numbered from 0"
        raise ConfigError(f"{flag} {name}: this machine has {here}")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"{flag}: torch finds no mps device here; use {flag} cpu")
    return device


def apply_torch_settings(plan: Plan) -> None:
    """Apply the threads and the determinism of a plan to torch's global settings."""
    torch.set_num_threads(plan.threads)
    deterministic, benchmark = DETERMINISM[plan.determinism]
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    _set_deterministic_mode(2 if deterministic else 0)
    # by default, deterministic mode fills all new memory, which costs time
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    cudnn.deterministic, cudnn.benchmark = deterministic, benchmark
    matmul.allow_fp16_reduced_precision_reduction = plan.half_partials
    matmul.allow_bf16_reduced_precision_reduction = plan.half_partials


def _set_deterministic_mode(mode: int) -> None:
    """Set torch's mode (0: off, 1: warn, 2: strict), if it is another one.

    Setting it imports torch's compiler, which takes a second and 70 MiB.
    """
    if mode != torch.get_deterministic_debug_mode():
        torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)


@contextmanager
def preserve_torch_settings() -> Iterator[None]:
    """Context that restores torch's global settings, for Python programs that call us."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    threads = torch.get_num_threads()
    mode = torch.get_deterministic_debug_mode()
    kernels = cudnn.deterministic, cudnn.benchmark
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    float16 = matmul.allow_fp16_reduced_precision_reduction
    bfloat16 = matmul.allow_bf16_reduced_precision_reduction
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    try:
        yield
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.set_device(device)
        torch.set_num_threads(threads)
        _set_deterministic_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        cudnn.deterministic, cudnn.benchmark = kernels
        matmul.allow_fp16_reduced_precision_reduction = float16
        matmul.allow_bf16_reduced_precision_reduction = bfloat16


def find_rank_device(devices: str, local_rank: int = 0) -> str:
    """The device of a rank among those of its machine: with cuda:1,3, rank 1 has cuda:3.

    >>> find_rank_device("cuda:1,3", 1), find_rank_device("cuda", 2), find_rank_device("cpu", 2)
    ('cuda:3', 'cuda:2', 'cpu')
    """
    kind, _, numbers = devices.partition(":")
    if numbers:
        listed = numbers.split(",")
        if local_rank >= len(listed):
            raise ConfigError(
                f"--device {devices}: names {len(listed)} devices, and rank {local_rank} of this "
                "machine needs one of its own; name more, or start fewer ranks"
            )
        return f"{kind}:{listed[local_rank]}"
    return f"{kind}:{local_rank}" if kind == "cuda" and local_rank else kind


def _keep_freed_memory() -> None:
    """Make glibc keep the memory that a step frees, for the next step.

    Otherwise it returns activations to the system after every step and gets them again page by
    page, which takes up to a third of the time. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _LARGEST_TRIM)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP)


def disable_amx_on_virtual_machines() -> None:
    """Keep oneDNN from using AMX tiles on virtual machines, unless the user has set its ISA.

    Some of them report AMX but kill the process when it is used, which only 16-bit matrix products
    do. Call it before torch's first matrix product: oneDNN reads its setting once.
    """
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        flags = facts.split("flags", 2)[1].split()
    except (OSError, IndexError):
        return
    if "hypervisor" in flags and "amx_tile" in flags:
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", _WITHOUT_AMX)
