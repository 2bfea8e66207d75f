"""Progress on stderr: one line that is rewritten on a terminal, occasional lines in a log."""

import math
import sys
import time

from phalanx.report.terminal import drawing_stream, escape_text
from phalanx.units import format_count, format_seconds

REWRITE_S, _LOG_S = 0.1, 10.0  # between two texts of many, on a terminal and in a log
_LEAST_RATE_S = 1.0  # images come from processes in bursts: over less time, a rate says nothing


class ProgressLine:
    """One line on a terminal that each text replaces.

    rewrite_s: seconds between two texts on a terminal. log_s: between two lines elsewhere; None:
    nothing is printed there.
    """

    def __init__(self, rewrite_s: float = 0.0, log_s: float | None = None):
        self.is_terminal = sys.stderr.isatty()
        self.interval = rewrite_s if self.is_terminal else log_s
        self.shown_at = -math.inf if self.is_terminal else time.monotonic()

    def is_due(self, *, is_last: bool = False) -> bool:
        """Whether a text would be shown now: the interval has passed, or it is the last one."""
        if self.interval is None:
            return False
        return is_last or time.monotonic() - self.shown_at >= self.interval

    def show(self, text: str, *, is_last: bool = False) -> None:
        """Show a text, if one is due."""
        if not self.is_due(is_last=is_last):
            return
        self.shown_at = time.monotonic()
        begin, end = ("\r\033[K", "\n" if is_last else "") if self.is_terminal else ("", "\n")
        stream = drawing_stream(sys.stderr)
        print(f"{begin}{escape_text(text)}", end=end, file=stream, flush=True)

    def end(self) -> None:
        """End the line, so that later output starts on a new one."""
        if self.is_terminal:
            print(file=sys.stderr)


class ImageProgress:
    """Shows how many images of a split are done, the rate, and the time left."""

    def __init__(self, verb: str):
        self.verb, self.line = verb, ProgressLine(REWRITE_S, _LOG_S)
        self.split, self.began, self.first = "", 0.0, 0

    def __call__(self, split: str, done: int, count: int) -> None:
        """Show the progress of a split, if due."""
        now = time.monotonic()
        if split != self.split:
            self.split, self.began, self.first = split, now, done
        if not self.line.is_due(is_last=done == count):
            return
        text = f"{split}: {format_count(done)} of {format_count(count)} images {self.verb}"
        elapsed = now - self.began
        rate = (done - self.first) / elapsed if elapsed >= _LEAST_RATE_S else 0.0
        if rate > 0:
            text += f", {format_count(rate)}/s"
        if rate > 0 and done < count:
            text += f", {format_seconds((count - done) / rate)} left"
        self.line.show(text, is_last=done == count)
