"""Memory that several processes see, handed on as a file without a name."""

import os
import tempfile
from typing import Any

import numpy as np
from numpy.typing import NDArray


def anonymous_memory(size: int) -> Any:
    """A file without a name, in memory where the system can: no crash leaves it behind."""
    if hasattr(os, "memfd_create"):
        memory = os.fdopen(os.memfd_create("phalanx"), "w+b")
    else:
        memory = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    os.ftruncate(memory.fileno(), size)
    return memory


def rows_in(slot: NDArray[np.uint8], rows: int, size: int) -> NDArray[np.uint8]:
    """The first images of a slot, which may be smaller than the largest it is made for."""
    return slot[: rows * size * size * 3].reshape(rows, size, size, 3)
