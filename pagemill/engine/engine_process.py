"""An engine in a process of its own: the parent's side (`ProcessHome`) and the child's (`main`).

The child is a fresh interpreter (`executor.child_process`) that talks through one socket pair in pickled messages. It resolves the
arguments and loads the model, so the parent never imports torch; its first message is Ready or
StartFailed. A child whose parent is gone reads the end of the socket and ends too. Made by
`AsyncLLMEngine.from_engine_args`.

    parent: event loop -> outgoing queue -> writer thread  == socket ==>  reader thread -> inbox: child
    parent: reader thread -> deliver           <== socket ==   writer thread <- hand over <- run_loop

Tokens cross, not text: the parent makes it, in its reader thread, while the child computes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from pagemill.config import EngineConfig
from pagemill.engine.argument_checks import check_arguments
from pagemill.engine.engine_loop import (
    EngineDead,
    FromEngine,
    Inbox,
    Ready,
    Shutdown,
    StartFailed,
    ToEngine,
    run_loop,
)
from pagemill.engine.hand_over import HandOver
from pagemill.engine.tokenizer_source import read_tokenizer
from pagemill.engine_args import EngineArgs
from pagemill.errors import EngineDeadError
from pagemill.executor.base import MemoryPlan
from pagemill.executor.child_process import (
    exit_text,
    kill_child,
    parent_connection,
    start_child,
)
from pagemill.log import logs_to_stdout, setup_logging
from pagemill.tokenizer.base import Tokenizer

_CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class _Start:
    """What the child needs to begin."""

    args: EngineArgs
    log_to_stdout: bool


def make_home(args: EngineArgs) -> tuple[ProcessHome, Tokenizer | None]:
    """Load an engine in a process of its own and, meanwhile, its tokenizer in this one."""
    check_arguments(args)
    home = ProcessHome(args)
    try:
        tokenizer = read_tokenizer(args)
        home.wait_ready()
    except BaseException:
        home.close()
        raise
    return home, tokenizer


class ProcessHome:
    """Starts the child in the constructor; `wait_ready` returns when it has loaded."""

    shares_process = False

    def __init__(self, args: EngineArgs) -> None:
        self._child, self._connection = start_child(__name__)
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._ready: Ready | None = None
        self._threads: list[threading.Thread] = []
        # Whoever forgets `close` leaves no child behind: at exit, or when this object goes away. Until
        # `start` there is nothing to end in good order.
        self._finalizer: weakref.finalize[..., ProcessHome] = weakref.finalize(
            self, kill_child, self._child
        )
        self._connection.send(_Start(args, logs_to_stdout()))

    def wait_ready(self) -> None:
        """Wait until the engine is loaded; raise what kept it from loading."""
        try:
            message = self._connection.recv()
        except (EOFError, ConnectionError):
            code = self._child.wait()
            raise EngineDeadError(
                f"the engine process ended while it was starting, with {exit_text(code)}"
            ) from None
        if isinstance(message, StartFailed):
            self._child.wait()
            raise message.error
        assert isinstance(message, Ready)
        self._ready = message

    @property
    def config(self) -> EngineConfig:
        """Return the settled configuration."""
        assert self._ready is not None, "wait_ready comes first"
        return self._ready.config

    @property
    def memory_plan(self) -> MemoryPlan:
        """Return where the memory went."""
        assert self._ready is not None, "wait_ready comes first"
        return self._ready.memory_plan

    @property
    def pid(self) -> int:
        """Return the child's process id."""
        return self._child.pid

    def start(self, deliver: Callable[[FromEngine], None]) -> None:
        """Begin to pass messages; `deliver` is called in the reader thread."""
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _end, self._child, self._outgoing)
        for target, args in (
            (_read, (self._connection, self._child, deliver)),
            (_write, (self._connection, self._outgoing)),
        ):
            thread = threading.Thread(target=target, args=args, daemon=True)
            thread.start()
            self._threads.append(thread)

    def send(self, message: ToEngine) -> None:
        """Give the child a message; never blocks."""
        self._outgoing.put(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def check_health(self) -> None:
        """Raise EngineDeadError when the child has ended."""
        code = self._child.poll()
        if code is not None:
            raise EngineDeadError(f"the engine is gone: {_ended(code)}; start a new one")

    def close(self) -> None:
        """End the child and the threads."""
        self._finalizer()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._connection.close()

    def kill(self) -> None:
        """End the child at once; `close` finds it ended."""
        self._child.kill()


def _ended(code: int) -> str:
    return f"its process has ended with {exit_text(code)}"


def _end(child: subprocess.Popen[bytes], outgoing: queue.SimpleQueue[bytes | None]) -> None:
    outgoing.put(pickle.dumps(Shutdown(), pickle.HIGHEST_PROTOCOL))
    outgoing.put(None)
    try:
        child.wait(_CLOSE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _read(
    connection: Connection[Any, Any],
    child: subprocess.Popen[bytes],
    deliver: Callable[[FromEngine], None],
) -> None:
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            code = child.wait()
            deliver(EngineDead(_ended(code)))
            return
        deliver(message)


def _write(connection: Connection[Any, Any], outgoing: queue.SimpleQueue[bytes | None]) -> None:
    while (message := outgoing.get()) is not None:
        try:
            connection.send_bytes(message)
        except OSError:
            return  # the child is gone; the reader thread says so to everyone


# ---------------------------------------------------------------- the child's side


def main(fd: int) -> None:
    """Run an engine that is spoken to through the socket `fd`; never returns."""
    connection = parent_connection(fd)
    start: _Start = connection.recv()
    setup_logging(sys.stdout if start.log_to_stdout else sys.stderr)
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, inbox), daemon=True).start()
    sys.exit(_serve(start.args, connection, inbox))


def _listen(connection: Connection[Any, Any], inbox: Inbox) -> None:
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            # The parent is gone without a Shutdown, whatever this process is doing just now.
            os._exit(1)
        inbox.put(message)
        if isinstance(message, Shutdown):
            return


def _serve(args: EngineArgs, connection: Connection[Any, Any], inbox: Inbox) -> int:
    # Imported here: the parent, which imports this module too, must stay free of what loading needs.
    from pagemill.engine.engine_core import load_core

    try:
        core, _ = load_core(args)
    except Exception as error:
        connection.send(StartFailed(_portable(error)))
        return 1
    connection.send(Ready(core.config, core.memory_plan))

    def write(message: FromEngine) -> None:
        # A parent that is gone is noticed by the reader thread, which ends this process.
        with contextlib.suppress(OSError):
            connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    news: HandOver[FromEngine] = HandOver(write, "pagemill-news")
    try:
        return 0 if run_loop(core, inbox, news.put) else 1
    finally:
        news.close()


def _portable(error: Exception) -> Exception:
    """Return the error, or one with its words when it cannot cross to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return EngineDeadError(f"{type(error).__name__}: {error}")
    return error
