"""A trial of a sweep: `python -m phalanx.cli.trial train ...`, which does not outlive the sweep."""

import os
import signal
import sys

from phalanx.cli.main import main
from phalanx.parent_process import watch_parent

if __name__ == "__main__":
    # it finishes its step, saves and leaves, as if the sweep had passed a signal on
    watch_parent(sys.stdin.fileno(), lambda: os.kill(os.getpid(), signal.SIGTERM))
    sys.exit(main())
