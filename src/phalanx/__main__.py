"""`python -m phalanx` is `phalanx`."""

import os
import signal
import sys
from pathlib import Path
from types import FrameType


def _leave(number: int, frame: FrameType | None) -> None:
    """End at once: a signal came while the first modules were imported."""
    try:
        os.write(2, b"phalanx: stopped while starting; nothing was changed\n")
    finally:  # whether or not the terminal is still there
        os._exit(130)


if __name__ in ("__main__", "phalanx.__main__"):  # not in a child of multiprocessing
    for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # until main() takes them itself
        if _number != signal.SIGHUP or signal.getsignal(_number) is not signal.SIG_IGN:  # nohup
            signal.signal(_number, _leave)

# Python puts the current folder there for `-m`; what lies in it is not ours to import
_is_run = __name__ == "__main__"
if _is_run and not sys.flags.safe_path and Path(sys.path[0]) != Path(__file__).parents[1]:
    del sys.path[0]

from phalanx.cli.main import main  # noqa: E402

if _is_run:
    sys.exit(main())
