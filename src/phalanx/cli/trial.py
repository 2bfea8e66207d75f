"""`python -m phalanx.cli.trial train ...`: a run of a sweep or check, which does not outlive it."""

import os
import signal
import sys

from phalanx.cli.main import main
from phalanx.parent_process import watch_parent

if __name__ == "__main__":
    # it finishes its step, saves and leaves, as if a signal had been passed on
    watch_parent(sys.stdin.fileno(), lambda: os.kill(os.getpid(), signal.SIGTERM))
    sys.exit(main())
