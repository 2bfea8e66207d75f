"""SIGINT, SIGTERM and SIGHUP ask a run to stop; a second SIGINT does not ask.

Work that can be finished first listens for them; any other is interrupted where it is.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from phalanx.errors import EXIT_LEFT_AT_ONCE


class Interrupted(KeyboardInterrupt):
    """A signal that nothing listened for; its text is the name of the signal."""


def find_stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask this process to stop; a hangup does not if `nohup` started it."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *[signal.SIGHUP] * hangs_up)


@contextmanager
def interrupt_on_signals(*, whole_process: bool) -> Iterator[None]:
    """Context that a signal interrupts; contexts inside it may listen instead.

    whole_process: the process ends with the block, and no signal may change how it ended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            os._exit(EXIT_LEFT_AT_ONCE)
        if not received:  # later ones must not disturb what the first one has to clean up
            received.append(number)
            raise Interrupted(signal.Signals(number).name)

    before = {number: signal.signal(number, handle) for number in find_stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if whole_process else handler)


class StopRequest:
    """Set by a signal, read by the loop after every step."""

    requested = False

    def __call__(self) -> bool:
        """Whether a signal has come."""
        return self.requested


@contextmanager
def listen_for_signals(
    stop: StopRequest, *, leave: Callable[[], None], prints: bool = True
) -> Iterator[None]:
    """Context in which signals request a stop; `leave` is called before an immediate exit."""
    if threading.current_thread() is not threading.main_thread():
        yield  # a run in a thread of another program, which handles its signals itself
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop() and number == signal.SIGINT:
            leave()
            os._exit(EXIT_LEFT_AT_ONCE)
        if not stop():
            stop.requested = True
            name = signal.Signals(number).name
            # straight to the terminal: a handler may interrupt a print, which must not print again
            text = f"\n{name}: finishing this step and saving\n" * prints
            with suppress(OSError):  # after a hangup the terminal is gone
                os.write(2, text.encode())

    before = {number: signal.signal(number, handle) for number in find_stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
