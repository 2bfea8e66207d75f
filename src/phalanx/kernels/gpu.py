"""The properties of a GPU that decide which kernels run on it, and with which tiles."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from phalanx.kernels.fused import find_fused

_OLDEST = (8, 0)  # compute capability, of the A100


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that kernels depend on."""

    multiprocessors: int
    shared_memory: int  # bytes that one program can use
    has_tma: bool  # TMA, which loads tiles of a matrix by its tensor descriptor


_INTERPRETER = Gpu(2, 227 * 2**10, has_tma=True)  # few SMs: persistent programs loop


def find_gpu(tensor: Tensor) -> Gpu:
    """The GPU that holds a tensor; for the CPU, the one that Triton's interpreter stands for."""
    return _read_gpu(tensor.device) if tensor.is_cuda else _INTERPRETER


@cache
def _read_gpu(device: torch.device) -> Gpu:
    found = torch.cuda.get_device_properties(device)
    memory = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    return Gpu(found.multi_processor_count, memory, has_tma=found.major >= 9)


def use_device(device: torch.device) -> AbstractContextManager[object]:
    """A context with this GPU current: Triton launches and captures there, wherever tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def find_gpu_problem(device: torch.device) -> str | None:
    """Why a GPU cannot run our kernels; None if it can."""
    if find_fused("phalanx.kernels.norm_passes_fused.sum_statistics") is None:
        return "Triton is not installed"
    if torch.version.hip is not None:
        return "they are written for NVIDIA's GPUs"
    if torch.cuda.get_device_capability(device) < _OLDEST:
        return "the GPU is older than they are made for"
    return None


def count_persistent_bytes(
    rows: int, columns: int, *, depth: int, stages: int, images_read: int
) -> int:
    """Shared memory in bytes of a persistent program that keeps 16-bit weights [depth, columns].

    It loops over blocks of rows. stages: blocks in flight. images_read: images as wide as the
    result that are read too.
    """
    block = rows * depth * stages + rows * columns * (images_read * (stages - 1) + 1)
    return 2 * (depth * columns + block)
