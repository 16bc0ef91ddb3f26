"""`python -m towers`: the same as the command `towers`."""

import sys

from towers.cli import main

if __name__ == "__main__":
    sys.exit(main())
