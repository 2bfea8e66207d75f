"""`python -m phalanx` is `phalanx`."""

import sys

from phalanx.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
