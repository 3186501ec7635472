"""`pagemill pull [NAME]`: fetch a named model into the cache; prints where it lies."""

from __future__ import annotations

import argparse

from pagemill.engine_args import DEMO_MODEL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add NAME and --quiet."""
    parser.add_argument("name", nargs="?", default=DEMO_MODEL, metavar="NAME", help="default: the demo model, %(default)s")  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="print the path and nothing else")


def run(args: argparse.Namespace) -> int:
    """Fetch the model, or find it in the cache, and print its path."""
    from pagemill.checkpoint.pull import pull

    print(pull(args.name, progress=not args.quiet))
    return 0
