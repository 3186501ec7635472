"""The standard streams of a command: open, and able to carry any text.

A stream that the caller closed is the null device, so that nobody else's file takes its number.
Characters that the terminal's encoding lacks are written as escapes; bytes that are no text come in as
lone surrogates, which the engine refuses with their position. Called by `main`.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path


def prepare_streams() -> None:
    """Open what is closed, and let no character end the command."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 (stays open)
            setattr(sys, name, null)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def drop_output() -> None:
    """Send what is still to be written to stdout nowhere.

    Its reader is gone or its disk is full; the interpreter, which flushes at exit, must not fail again.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
