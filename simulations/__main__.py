"""``python -m simulations`` is ``fl-strategies``."""

import sys

from simulations.commands import main as main

if __name__ == "__main__":
    sys.exit(main())
