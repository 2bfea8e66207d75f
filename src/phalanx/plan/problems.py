"""Gathering what the parts of a plan refuse, so that all of it is told at once."""

import re
from collections.abc import Mapping
from types import TracebackType

from phalanx.config.read import joined
from phalanx.errors import ConfigError


class Problems:
    """A place for parts that may refuse: `with problems:` notes a ConfigError and goes on.

    places: where each option was said, which a line then begins with instead of the flag.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self.lines: list[str] = []
        self._places = places

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, ConfigError):
            return False
        self.lines += [self._placed(line) for line in str(error).splitlines()]
        return True

    def _placed(self, line: str) -> str:
        """A line with the place of the option it begins with."""
        found = re.match(r"--([a-z0-9-]+)", line)
        place = self._places.get(found[1]) if found else None
        return line if found is None or place is None else place + line[found.end() :]

    def refuse(self) -> None:
        """Raise one ConfigError for all that was noted, if anything was."""
        if self.lines:
            raise joined(self.lines)
