"""An engine in a thread of the caller's process. Made by `AsyncLLMEngine.from_engine_args`."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

from pagemill.config import EngineConfig
from pagemill.engine.engine_loop import (
    FromEngine,
    Inbox,
    Shutdown,
    StatsCollector,
    ToEngine,
    run_loop,
)
from pagemill.engine.llm_engine import LLMEngine
from pagemill.engine_args import EngineArgs
from pagemill.executor.base import MemoryPlan
from pagemill.tokenizer.base import Tokenizer


def make_home(args: EngineArgs) -> tuple[ThreadHome, Tokenizer | None]:
    """Load an engine here; return its home and its tokenizer."""
    stats = StatsCollector()
    engine = LLMEngine.from_engine_args(
        args, stat_loggers=[] if args.disable_log_stats else [stats]
    )
    tokenizer = None if engine.config.model.skip_tokenizer_init else engine.get_tokenizer()
    return ThreadHome(engine, stats), tokenizer


class ThreadHome:
    """Runs the loop of a loaded engine in a thread."""

    shares_process = True

    def __init__(self, engine: LLMEngine, stats: StatsCollector) -> None:
        self._engine = engine
        self._stats = stats
        self._inbox: Inbox = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def config(self) -> EngineConfig:
        """Return the settled configuration."""
        return self._engine.config

    @property
    def memory_plan(self) -> MemoryPlan:
        """Return where the memory went."""
        return self._engine.memory_plan

    def start(self, deliver: Callable[[FromEngine], None]) -> None:
        """Start the thread; `deliver` is called in it."""
        self._thread = threading.Thread(
            target=run_loop,
            args=(self._engine, self._stats, self._inbox, deliver),
            name="pagemill-engine",
            daemon=True,
        )
        self._thread.start()
        # A daemon thread must not be inside a kernel when the interpreter goes away.
        weakref.finalize(self, _stop, self._inbox, self._thread)

    def send(self, message: ToEngine) -> None:
        """Give the loop a message."""
        self._inbox.put(message)

    def close(self) -> None:
        """End the loop after its current step."""
        if self._thread is None:
            self._engine.shutdown()
        else:
            _stop(self._inbox, self._thread)


def _stop(inbox: Inbox, thread: threading.Thread) -> None:
    inbox.put(Shutdown())
    if thread is not threading.current_thread():
        thread.join()
