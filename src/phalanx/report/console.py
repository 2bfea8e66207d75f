"""What a run prints while it trains: a live line on a terminal, otherwise plain lines.

Everything printed also goes to log.txt, with the time. If standard output fails, because the reader
of a pipe has left or a disk is full, the console becomes silent and the run continues; the command
then ends with an error, unless it was a reader who left.
"""

import io
import os
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from phalanx.disk import convert_disk_errors
from phalanx.report.records import LogRow, ScoreRow
from phalanx.report.terminal import (
    defer_output_error,
    discard_output,
    escape_redirected_streams,
    escape_text,
    raw_stream,
)
from phalanx.units import format_count, format_plural, format_seconds

_REFRESH_S = 0.1
_NARROW = 100  # columns; below this, the live line is shorter
_SHORTEST_BAR, _GAP = 4, 2  # columns


class Console:
    """Prints the progress of one run."""

    def __init__(
        self,
        *,
        total_steps: int,
        epochs: float,
        log_file: Path | None = None,
        stream: TextIO | None = None,
    ):
        self.total_steps, self.epochs = total_steps, epochs
        # a program without standard output, such as a service, trains silently
        self._original_stream = stream or sys.stdout or io.StringIO()
        self.stream = raw_stream(self._original_stream)
        self.log_file = log_file
        self._rich = RichConsole(file=self.stream, highlight=False, soft_wrap=True)
        self.is_live = self.stream.isatty() and not self._rich.is_dumb_terminal
        self._live: Live | None = None
        self._step = 0
        self._newest: LogRow | None = None
        self._activity = ""
        self._timer = StepTimer()
        self._next_redraw = 0.0

    def __enter__(self) -> "Console":
        if self.is_live:
            # stderr that goes to a file must not appear on the terminal
            self._live = Live(
                console=self._rich,
                auto_refresh=False,
                transient=True,
                redirect_stderr=sys.stderr.isatty(),
                get_renderable=self._draw,
            )
            self._live.start()
            escape_redirected_streams()
        return self

    def __exit__(self, *failure: object) -> None:
        if self._live:
            try:
                self._live.stop()
            except OSError as cause:
                self._stop_printing(cause)
            self._live = None

    def print(self, text: str, *, style: str = "") -> None:
        """Print one or several lines."""
        for line in text.split("\n"):
            printable = escape_text(line.expandtabs())
            self._append_to_log(printable)
            self._print_line(printable, style)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.print(f"warning: {text}", style="magenta")  # yellow is unreadable on white

    def progress(self, step: int) -> None:
        """Record a finished step. Costs microseconds: the line is redrawn ten times per second."""
        self._step = step
        now = time.monotonic()
        self._timer.record(step, now)
        if self._live and now >= self._next_redraw:
            self._activity = ""
            self._redraw(now)

    def evaluation_progress(self, done: int, total: int) -> None:
        """Record how many images an evaluation has scored; as cheap as `progress`."""
        now = time.monotonic()
        if self._live and now >= self._next_redraw:
            self._activity = f"validating {done / max(total, 1):.0%}"
            self._redraw(now)

    def log(self, row: LogRow) -> None:
        """Show the numbers of a log point: in the live line, or as a separate line."""
        self._step, self._newest = row.step, row
        parts = [self._describe_step(row.step, row.epoch), *_describe_log(row), self._time_left()]
        line = "  ".join(parts).rstrip()
        if self._live:
            self._append_to_log(line)
            self._redraw(time.monotonic())
        else:
            self.print(line)

    def score(self, row: ScoreRow, *, best: bool = False) -> None:
        """Show the result of an evaluation."""
        self._activity = ""
        mark = "  best" if best else ""
        line = f"{self._describe_step(row.step, row.epoch)}  {_describe_score(row)}{mark}"
        if not self._live:
            self.print(line)
            return
        self._append_to_log(line)
        long, short = (
            f"epoch {row.epoch:.2f}  {_describe_score(row, short=is_short)}{mark}"
            for is_short in (False, True)
        )
        fitting = long if len(long) <= self._rich.width else short
        self._print_line(fitting, "bold green" if best else "bold")

    def restore_terminal(self) -> None:
        """Show the cursor again, without locks or buffers, just before the process exits."""
        if self._live:
            with suppress(OSError):  # the terminal may be gone
                os.write(self.stream.fileno(), b"\x1b[?25h\r\n")

    def _print_line(self, line: str, style: str) -> None:
        try:
            if self.is_live:
                self._rich.print(Text(line, style=style))
                return
            encoding = self.stream.encoding or "ascii"
            self.stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
            self.stream.flush()
        except OSError as cause:
            self._stop_printing(cause)

    def _stop_printing(self, cause: OSError) -> None:
        """Stop printing; a closed terminal counts as a reader who left."""
        if self.is_live:
            discard_output(self.stream)
        else:
            defer_output_error(self._original_stream, cause, log=self.log_file)

    def _append_to_log(self, text: str) -> None:
        if self.log_file:
            stamp = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
            with (
                convert_disk_errors(self.log_file),
                self.log_file.open("a", encoding="utf-8") as file,
            ):
                file.write(f"{stamp}  {text}\n")

    def _describe_step(self, step: int, epoch: float) -> str:
        total = str(self.total_steps)
        return f"step {step:>{len(total)}}/{total}  epoch {epoch:.2f}"

    def _time_left(self) -> str:
        steps = self.total_steps - self._step
        seconds = self._timer.seconds_for(steps)
        return f"{format_seconds(seconds)} left" if steps and seconds is not None else ""

    @property
    def _is_narrow(self) -> bool:
        return self._rich.width < _NARROW

    def _redraw(self, now: float) -> None:
        self._next_redraw = now + _REFRESH_S
        if self._live:
            try:
                self._live.refresh()
            except OSError as cause:
                self._stop_printing(cause)

    def _draw(self) -> Table:
        epoch = self._step / max(self.total_steps, 1) * self.epochs
        bar = ProgressBar(
            total=self.total_steps,
            completed=self._step,
            style="bright_black",  # rich's own is darker than the rest on a light background
            complete_style="cyan",
            finished_style="cyan",  # rich's own turns grey on terminals of 16 colours
        )
        numbers = _describe_log_briefly(self._newest, narrow=self._is_narrow)
        counts = f"epoch {epoch:.1f}/{self.epochs:.4g}", f"{self._step}/{self.total_steps}"
        ending = self._activity or self._time_left()
        # what does not fit is left out: cut off it says nothing
        while numbers and self._rich.width < _SHORTEST_BAR + sum(
            len(part) + _GAP for part in (*counts, *numbers, ending)
        ):
            numbers.pop()
        cells: list[Text | ProgressBar] = [
            Text(counts[0], style="bold"),
            bar,
            *(Text(part) for part in (counts[1], *numbers)),
            Text(ending, style="cyan"),
        ]
        table = Table.grid(padding=(0, _GAP, 0, 0), expand=True)
        for cell in cells:
            table.add_column(no_wrap=True, ratio=1 if cell is bar else None)
        table.add_row(*cells)
        return table


class StepTimer:
    """Measures how long a step takes, from the second step on: the first one warms up."""

    def __init__(self) -> None:
        self.calls = 0
        self.first_step, self.started_at = 0, 0.0
        self.step, self.now = 0, 0.0

    def record(self, step: int, now: float) -> None:
        """Record that a step was finished at this time."""
        if self.calls < 2:
            self.calls += 1
            self.first_step, self.started_at = step, now
        self.step, self.now = step, now

    def seconds_for(self, steps: int) -> float | None:
        """The time that so many steps would take; None while it is not known."""
        done = self.step - self.first_step
        return (self.now - self.started_at) / done * max(steps, 0) if done > 0 else None


def _describe_log(row: LogRow) -> list[str]:
    """The measured numbers of a log point, each with its name."""
    parts = [f"loss {row.loss:.4f}"]
    if row.top1 is not None:
        parts.append(f"top-1 {row.top1:.2%}")
    parts.append(f"lr {row.lr:.4g}")
    if row.grad_norm is not None:
        parts.append(f"grad {row.grad_norm:.3g}")
    if row.images_per_second is not None:
        parts.append(f"{format_count(row.images_per_second)} images/s")
    if row.data_wait is not None:
        parts.append(f"data wait {row.data_wait:.1%}")
    return parts


def _describe_log_briefly(row: LogRow | None, *, narrow: bool) -> list[str]:
    """The numbers of the live line: loss, speed and share of time waiting for data."""
    if row is None:
        return []
    parts = [f"loss {row.loss:.4f}"]
    if row.images_per_second is not None:
        parts.append(f"{format_count(row.images_per_second)} {'im/s' if narrow else 'images/s'}")
    if row.data_wait is not None:
        parts.append(f"{'wait' if narrow else 'data wait'} {row.data_wait:.0%}")
    return parts


def _describe_score(row: ScoreRow, *, short: bool = False) -> str:
    """An evaluation as text, with its 95 % interval and the number of images."""
    low, high = row.interval95
    if short:
        interval, images = f"({low:.1%} to {high:.1%})", ""
    else:
        interval = f"(95% interval {low:.2%} to {high:.2%})"
        images = f"  {format_plural(row.scored, 'image')}"
    top5 = "" if row.top5 is None else f"  top-5 {row.top5:.2%}"
    return f"valid top-1 {row.top1:.2%} {interval}{top5}  loss {row.loss:.4f}{images}"
