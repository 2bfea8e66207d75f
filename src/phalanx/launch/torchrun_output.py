"""Parses torchrun's output: the exit codes of its ranks, without torchrun's own traceback."""

import re
from dataclasses import dataclass

_LOG = re.compile(r"[A-Z]\d{4} [\d:.]+ +\d+ (?:site-packages/)?torch/distributed/(?:run|elastic/)")
_TRACEBACK = "Traceback (most recent call last):"
_OWN = ("/torch/distributed/run.py", "/bin/torchrun")
_RANK = re.compile(r"\s+rank\s+: (\d+) ")
_CODE = re.compile(r"\s+exitcode\s*: (-?\d+) ")


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended, as torchrun reports it; signals are negative."""

    rank: int
    code: int


class TorchrunOutput:
    """The standard error of one torchrun, with torchrun's own lines removed.

    torchrun exits with code 1 whatever its ranks' codes are, and lists those in a table.
    """

    def __init__(self) -> None:
        self.ends: list[RankEnd] = []  # of ranks that did not exit with 0; the first to end is last
        self.failure = ""  # torchrun's own failure, in one line
        self._held: list[str] = []  # a traceback that may be torchrun's
        self._rules_left = 0  # rules of the table: one above, one below
        self._rank = 0

    def read(self, line: str) -> list[str]:
        """Process the next line; returns the lines to show now."""
        if self._rules_left:
            self._read_table(line)
            return []
        if self._held:
            self._held.append(line)
            return [] if line.startswith(" ") or not line.strip() else self._end_traceback()
        if line.rstrip() == _TRACEBACK:
            self._held = [line]
            return []
        return [] if _LOG.match(line) else [line]

    def close(self) -> list[str]:
        """The lines that remain to be shown after the last one."""
        held, self._held = self._held, []
        return held

    def _end_traceback(self) -> list[str]:
        """The traceback, unless it is torchrun's, whose exception is kept in `failure`."""
        held, self._held = self._held, []
        if not any(own in line for line in held for own in _OWN):
            return held
        if "ChildFailedError" in held[-1]:
            self._rules_left = 2
        else:
            self.failure = held[-1].strip()
        return []

    def _read_table(self, line: str) -> None:
        self._rules_left -= line.startswith("=====")
        if found := _RANK.match(line):
            self._rank = int(found[1])
        if found := _CODE.match(line):
            self.ends.append(RankEnd(self._rank, int(found[1])))
