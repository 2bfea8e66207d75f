"""What torchrun says when ranks end: the codes they ended with, without its own traceback."""

import re
from dataclasses import dataclass

_LOG = re.compile(r"[A-Z]\d{4} [\d:.]+ +\d+ (?:site-packages/)?torch/distributed/(?:run|elastic/)")
_TRACEBACK = "Traceback (most recent call last):"
_OWN = ("/torch/distributed/run.py", "/bin/torchrun")
_RANK = re.compile(r"\s+rank\s+: (\d+) ")
_CODE = re.compile(r"\s+exitcode\s*: (-?\d+) ")


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended, as torchrun tells it; a signal is negative."""

    rank: int
    code: int


class TorchrunOutput:
    """The lines of one torchrun's standard error, with its own taken out.

    torchrun ends with code 1 whatever its ranks ended with, and says more in a table.
    """

    def __init__(self) -> None:
        self.ends: list[RankEnd] = []  # of ranks that did not end with 0; the first to end is last
        self.failure = ""  # torchrun's own, in one line
        self._held: list[str] = []  # a traceback that may be torchrun's
        self._rules_left = 0  # of the table: it has a first and a last one
        self._rank = 0

    def read(self, line: str) -> list[str]:
        """Take the next line; the lines that are to be shown now."""
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
        """What is left to be shown when there are no more lines."""
        held, self._held = self._held, []
        return held

    def _end_traceback(self) -> list[str]:
        """The traceback, unless it is torchrun's; what was raised there is kept."""
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
