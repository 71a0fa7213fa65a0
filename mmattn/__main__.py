"""`python -m mmattn` is the `mmattn` command."""

import sys

from mmattn.cli import main

if __name__ == "__main__":
    sys.exit(main())
