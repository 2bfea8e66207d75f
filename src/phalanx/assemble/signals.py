"""SIGINT and SIGTERM ask a run to stop; a second SIGINT does not ask."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from phalanx.errors import EXIT_LEFT_AT_ONCE


class StopRequest:
    """Set by a signal, read by the loop after every step."""

    requested = False

    def __call__(self) -> bool:
        """Whether a signal has come."""
        return self.requested


@contextmanager
def listening(stop: StopRequest, *, leave: Callable[[], None]) -> Iterator[None]:
    """Take signals as requests to stop; `leave` puts the terminal right before an exit at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # a run inside somebody's thread: signals are theirs
        return

    def take(number: int, frame: FrameType | None) -> None:
        if stop() and number == signal.SIGINT:
            leave()
            os._exit(EXIT_LEFT_AT_ONCE)
        if not stop():
            stop.requested = True
            name = signal.Signals(number).name
            # straight to the terminal: a handler may interrupt a print, which must not print again
            os.write(2, f"\n{name}: finishing this step and saving\n".encode())

    before = {number: signal.signal(number, take) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
