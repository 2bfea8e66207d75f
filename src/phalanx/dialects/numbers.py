"""What the number of an old option is: a table's row declares it, and it is checked here."""

import re
from dataclasses import dataclass

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d{1,3})?", re.ASCII | re.IGNORECASE)
_WHOLE = re.compile(r"[-+]?\d+", re.ASCII)
_MAX_DIGITS = 40  # beyond it a number is a slip, and exact arithmetic on it would never end

_SMALLEST = 1e-18  # what is nearer to 0 counts as 0


@dataclass(frozen=True, kw_only=True)
class NumberKind:
    """The numbers that an option takes."""

    whole: bool = False
    above: float | None = None  # more than that
    least: float = -(10**18)
    most: float = 10**18

    def find_problem(self, text: str) -> str:
        """What was expected in the place of a text; empty where it is such a number."""
        noun = "a whole number" if self.whole else "a number"
        pattern = _WHOLE if self.whole else _NUMBER
        if len(text) > _MAX_DIGITS or not pattern.fullmatch(text):
            return f"expected {noun}, got {text!r}"
        number = float(text) if abs(float(text)) >= _SMALLEST else 0.0
        if self.above is not None and number <= self.above:
            return f"expected {noun} above {self.above:,}, got {text}"
        if number < self.least:
            return f"expected {noun} of at least {self.least:,}, got {text}"
        if number > self.most:
            return f"expected {noun} of at most {self.most:,}, got {text}"
        return ""


NUMBER = NumberKind()
NOT_NEGATIVE = NumberKind(least=0)
POSITIVE = NumberKind(above=0)
SHARE = NumberKind(least=0, most=1)
PERCENTAGE = NumberKind(above=0, most=100)
EXPONENT = NumberKind(least=-100, most=100)  # of 2
WHOLE = NumberKind(whole=True)
COUNT = NumberKind(whole=True, least=1, most=10**9)
COUNT_OR_NONE = NumberKind(whole=True, least=0, most=10**9)
COUNT_OR_ALL = NumberKind(whole=True, least=-1, most=10**9)  # -1: all there are, or nobody's choice
