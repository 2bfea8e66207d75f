"""`python -m phalanx` is `phalanx`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python has put the current folder there; what lies in it is not ours to import
    if not sys.flags.safe_path and Path(sys.path[0]) != Path(__file__).parents[1]:
        del sys.path[0]
    from phalanx.cli.main import main

    sys.exit(main())
