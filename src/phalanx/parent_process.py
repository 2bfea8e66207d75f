"""Child processes that end with their parent, even by SIGKILL: they watch a pipe it holds open.

prctl's PR_SET_PDEATHSIG would not do: it fires when the thread that started the process ends, comes
too late if the parent is gone before it is set, and exists only on Linux.
"""

import select
import threading
from collections.abc import Callable


def watch_parent(pipe: int, on_exit: Callable[[], None]) -> None:
    """Call `on_exit`, from a thread, once no process holds the other end of the pipe.

    A parent that is already gone is noticed at once. Nothing may be written into the pipe.
    """

    def wait() -> None:
        watched = select.poll()  # unlike select, it takes file numbers above 1,023
        watched.register(pipe, select.POLLIN)
        watched.poll()
        on_exit()

    threading.Thread(target=wait, daemon=True, name="parent").start()
