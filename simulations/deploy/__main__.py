"""``python -m simulations.deploy`` is ``fl-strategies deploy``."""

import sys
from collections.abc import Sequence

from simulations import commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    return commands.main(["deploy", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
