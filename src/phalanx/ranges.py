"""Names for the parts of a training step, which a profiler records while it looks.

They are blocks of the code that trains, so they must cost nothing while nobody looks, and must not
change what is computed: then each is the same empty block.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any


class _RangeNames:
    """Gives a block its name while `are_recorded` is set."""

    def __init__(self) -> None:
        self.are_recorded = False
        self._nothing: AbstractContextManager[Any] = nullcontext()

    def __call__(self, name: str) -> AbstractContextManager[Any]:
        """A block that a profile shows under this name."""
        if not self.are_recorded:
            return self._nothing
        from torch.profiler import record_function

        return record_function(name)


RANGES = _RangeNames()
