"""A fresh interpreter at the other end of a socket: how an engine or a worker gets its own process.

Not a child of `multiprocessing`, which would import the program's main module again: a script without
an `if __name__ == "__main__"` guard, or one that came through standard input, works as any other. The
child finds modules where this process does (`sys.path`). SIGINT and SIGTERM are its parent's affair, which
may have work to finish: a terminal, or a service manager, sends them to the whole group. Called by
`executor.multi_process` and `engine.engine_process`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

# Nothing but built-in modules may be imported before the path is set.
_CODE = (
    "import sys; _, module, fd, *sys.path = sys.argv; "
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "import importlib; importlib.import_module(module).main(int(fd))"
)


def start_child(
    module: str, *, keep_stderr: bool = False
) -> tuple[subprocess.Popen[bytes], Connection[Any, Any]]:
    """Start `module.main(fd)` in a new process; return it and this end of the socket.

    With `keep_stderr` the caller reads the child's stderr (`Popen.stderr`); else it is this process's.
    """
    own, theirs = socket.socketpair()
    with theirs:
        child = subprocess.Popen(
            [sys.executable, "-c", _CODE, module, str(theirs.fileno()), *sys.path],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE if keep_stderr else None,
        )
    return child, Connection(own.detach())


def parent_connection(fd: int) -> Connection[Any, Any]:
    """Return the child's end of the socket; its own children do not get it."""
    os.set_inheritable(fd, False)
    return Connection(fd)


def end_with_parent(connection: Connection[Any, Any]) -> None:
    """End this process when its parent is gone, also while it is busy; called in the child."""

    def wait() -> None:
        gone = select.poll()
        gone.register(connection.fileno(), 0)  # nothing but the other end's closing
        gone.poll()
        os._exit(1)

    threading.Thread(target=wait, name="pagemill-parent", daemon=True).start()


def kill_child(child: subprocess.Popen[bytes]) -> None:
    """End the child at once; one that has ended is fine."""
    child.kill()
    child.wait()


def exit_text(code: int) -> str:
    """Return a child's exit code, with the signal that ended it if one did."""
    return f"exit code {code}" + (f" ({signal.Signals(-code).name})" if code < 0 else "")
