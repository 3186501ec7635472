"""An engine in a thread of the caller's process. Made by `AsyncLLMEngine.from_engine_args`.

event loops -> inbox -> thread of the steps -> hand over -> thread of the text: deliver -> event loops
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

from pagemill.config import EngineConfig
from pagemill.engine.engine_core import EngineCore, load_core
from pagemill.engine.engine_loop import FromEngine, Inbox, Shutdown, ToEngine, run_loop
from pagemill.engine.hand_over import HandOver
from pagemill.engine_args import EngineArgs
from pagemill.errors import EngineDeadError
from pagemill.executor.base import MemoryPlan
from pagemill.tokenizer.base import Tokenizer


def make_home(args: EngineArgs) -> tuple[ThreadHome, Tokenizer | None]:
    """Load an engine here; return its home and its tokenizer."""
    core, tokenizer = load_core(args)
    return ThreadHome(core), tokenizer


class ThreadHome:
    """Runs the loop of a loaded engine in a thread; what steps come to is delivered in another."""

    shares_process = True

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._inbox: Inbox = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._finalizer: weakref.finalize[..., ThreadHome] | None = None

    @property
    def config(self) -> EngineConfig:
        """Return the settled configuration."""
        return self._core.config

    @property
    def memory_plan(self) -> MemoryPlan:
        """Return where the memory went."""
        return self._core.memory_plan

    def start(self, deliver: Callable[[FromEngine], None]) -> None:
        """Start the threads; `deliver` is called in the second."""
        news = HandOver(deliver, "pagemill-text")
        self._thread = threading.Thread(
            target=_run, args=(self._core, self._inbox, news), name="pagemill-engine", daemon=True
        )
        self._thread.start()
        # A daemon thread must not be inside a kernel when the interpreter goes away.
        self._finalizer = weakref.finalize(self, _stop, self._inbox, self._thread, news)

    def send(self, message: ToEngine) -> None:
        """Give the loop a message."""
        self._inbox.put(message)

    def check_health(self) -> None:
        """Raise EngineDeadError when the loop has ended."""
        if self._thread is not None and not self._thread.is_alive():
            raise EngineDeadError("the engine is gone: its thread has ended; start a new one")

    def close(self) -> None:
        """End the loop after its current step."""
        if self._finalizer is None:
            self._core.shutdown()
        else:
            self._finalizer()

    def kill(self) -> None:
        """Ask the loop to end: a thread cannot be ended in a step."""
        self._inbox.put(Shutdown())


def _run(core: EngineCore, inbox: Inbox, news: HandOver[FromEngine]) -> None:
    try:
        run_loop(core, inbox, news.put)
    finally:
        news.close()


def _stop(inbox: Inbox, thread: threading.Thread, news: HandOver[FromEngine]) -> None:
    inbox.put(Shutdown())
    # Whoever lets go of the last reference may be one of the two.
    if threading.current_thread() not in (thread, news.thread):
        thread.join()
