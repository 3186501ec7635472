"""Runs something in a process of its own that may take only so much more memory than this one has.

For the programs that try one size after the other; a child that dies or hangs is seen.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

MIB = 1 << 20
_PATIENCE_S = 60


def said_with(room_mib: int, say: Callable[[], str]) -> str:
    """Return what `say` returned in a child with so much room, on one line, or how the child ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + room_mib * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        signal.alarm(_PATIENCE_S)
        try:
            said = say()
        except BaseException as error:
            said = f"failed: {type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"died of {signal.Signals(os.WTERMSIG(status)).name}"
    return said.replace("\n", " ") or f"ended with status {os.WEXITSTATUS(status)}"
