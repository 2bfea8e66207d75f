"""Names for the parts of a training step, for a profiler.

They are contexts in the training code, so they must cost nothing without a profiler, and must not
change what is computed: without a profiler, each is the same empty context.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any


class _RangeNames:
    """Names contexts while `are_recorded` is set."""

    def __init__(self) -> None:
        self.are_recorded = False
        self._nothing: AbstractContextManager[Any] = nullcontext()

    def __call__(self, name: str) -> AbstractContextManager[Any]:
        """A context that a profile shows under this name."""
        if not self.are_recorded:
            return self._nothing
        from torch.profiler import record_function

        return record_function(name)


RANGES = _RangeNames()
