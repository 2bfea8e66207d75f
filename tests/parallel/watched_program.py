"""A process with a watchdog: it runs the code it is given, with these names at hand."""

import sys
import threading  # noqa: F401 - for the code that is given
import time
from collections.abc import Callable
from pathlib import Path

from phalanx.parallel import watchdog
from phalanx.parallel.watchdog import Watchdog

watchdog._PEERS_S, watchdog._LAST_WORDS_S = 0.02, 0.3


def open_watchdog(
    seconds: float = 0.1,
    describe: Callable[[], str] = lambda: "step 12\x1b[2J",
    find_resume_command: Callable[[], str] = str,
) -> Watchdog:
    report = Path(sys.argv[1])
    return Watchdog(
        seconds, describe, rank=1, ranks=4, report=report, find_resume_command=find_resume_command
    )


def wait_for_peers() -> None:
    time.sleep(10)


exec(sys.argv[2])
