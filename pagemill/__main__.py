"""`python -m pagemill`: the command line, as the `pagemill` console script runs it."""

from __future__ import annotations

import sys

from pagemill.cli import main

if __name__ == "__main__":
    sys.exit(main())
