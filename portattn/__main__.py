"""`python -m portattn` is the command `portattn`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
