"""What needs nothing but pagemill and transformers, in one run: `python -m benchmarks.all` (or `make bench`)."""

from __future__ import annotations

import argparse
import subprocess
import sys

COMMANDS = (
    ("benchmarks.startup",),
    ("benchmarks.step_overhead",),
    ("benchmarks.ops.attention",),
    ("benchmarks.offline", "--cases", "c", "--rounds", "1"),
)


def main() -> None:
    """Run the commands one after the other; the machine should have nothing else to do."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for command in COMMANDS:
        print(f"\n== python -m {' '.join(command)}", flush=True)
        subprocess.run([sys.executable, "-m", *command], check=True)


if __name__ == "__main__":
    main()
