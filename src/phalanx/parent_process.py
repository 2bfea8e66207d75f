"""What we start ends with us, by SIGKILL, too: it watches a pipe that only its parent holds open.

Not prctl's PR_SET_PDEATHSIG: that fires when the thread that started the process ends, comes too
late where the parent is gone before it is set, and exists on Linux alone.
"""

import select
import threading
from collections.abc import Callable


def watch_parent(pipe: int, on_exit: Callable[[], None]) -> None:
    """Call `on_exit`, from a thread, once nobody holds the other end of the pipe any more.

    A parent that is gone already is noticed at once. Nothing may be written into the pipe.
    """

    def wait() -> None:
        watched = select.poll()  # unlike select, it takes file numbers above 1,023
        watched.register(pipe, select.POLLIN)
        watched.poll()
        on_exit()

    threading.Thread(target=wait, daemon=True, name="parent").start()
