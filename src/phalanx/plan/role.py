"""What one process does for a run."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Role:
    """Whether this process writes the run folder, and whether it prints. One of a run does each."""

    writes: bool = True
    prints: bool = True
