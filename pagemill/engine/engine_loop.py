"""The loop that drives an engine, and what it says to the other side.

`run_loop` is the same in a thread of the caller's process (`engine.engine_thread`) and in a process of
its own (`engine.engine_process`): messages come through a queue, everything that one step made goes
out as one message. Aborts that have arrived are obeyed before each step, so a request is gone within
one. A request that is refused here answers itself alone; an error in a step ends the loop.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pagemill.config import EngineConfig
from pagemill.errors import PagemillError
from pagemill.executor.base import MemoryPlan
from pagemill.log import get_logger
from pagemill.messages import EngineRequest, StepStats
from pagemill.outputs import RequestOutput

if TYPE_CHECKING:
    from pagemill.engine.llm_engine import LLMEngine

logger = get_logger(__name__)

# How long an idle loop waits before it looks whether its ranks are still there.
_HEALTH_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Abort:
    """End these requests."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget the prefixes computed so far, before any request sent later begins."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the loop."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is loaded."""

    config: EngineConfig
    memory_plan: MemoryPlan


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The engine could not be loaded."""

    error: BaseException


@dataclass(slots=True)
class StepNews:
    """Everything that one turn of the loop has to tell."""

    outputs: list[RequestOutput] = field(default_factory=list)
    refused: list[tuple[str, PagemillError]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)  # every id of an Abort, known or not
    stats: list[StepStats] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.outputs or self.refused or self.aborted or self.stats)


@dataclass(frozen=True, slots=True)
class EngineDead:
    """The loop has ended and why."""

    reason: str


ToEngine = EngineRequest | Abort | ResetPrefixCache | Shutdown
FromEngine = Ready | StartFailed | StepNews | EngineDead
Inbox = queue.SimpleQueue[ToEngine]


class StatsCollector:
    """A stat logger that keeps what it gets until the loop sends it on."""

    def __init__(self) -> None:
        self._stats: list[StepStats] = []

    def record(self, stats: StepStats) -> None:
        """Keep one step's statistics."""
        self._stats.append(stats)

    def take(self) -> list[StepStats]:
        """Return what was kept and forget it."""
        taken, self._stats = self._stats, []
        return taken


class EngineHome(Protocol):
    """Where an engine lives, as `AsyncLLMEngine` sees it."""

    shares_process: bool  # the engine runs in this process

    @property
    def config(self) -> EngineConfig: ...

    @property
    def memory_plan(self) -> MemoryPlan: ...

    def start(self, deliver: Callable[[FromEngine], None]) -> None:
        """Begin to run; `deliver` is called from a thread of the home's own."""
        ...

    def send(self, message: ToEngine) -> None:
        """Give the engine a message; never blocks."""
        ...

    def close(self) -> None:
        """End the engine and wait for it; calling it twice is harmless."""
        ...


def run_loop(
    engine: LLMEngine, stats: StatsCollector, inbox: Inbox, send: Callable[[FromEngine], None]
) -> bool:
    """Serve until a Shutdown (True), or until a step fails and EngineDead was sent (False)."""
    try:
        while True:
            news = StepNews()
            if not _obey(engine, inbox, news):
                return True
            if engine.has_unfinished_requests():
                news.outputs += engine.step()
            news.stats += stats.take()
            if news:
                send(news)
    except Exception as error:
        # Whatever it was, all requests are told; the traceback is for whoever reads the log.
        logger.exception("the engine has died")
        send(EngineDead(str(error)))
        return False
    finally:
        engine.shutdown()


def _obey(engine: LLMEngine, inbox: Inbox, news: StepNews) -> bool:
    """Act on every message that has come, waiting for one when idle; False after a Shutdown."""
    message = _first(engine, inbox)
    while message is not None:
        if isinstance(message, Shutdown):
            return False
        if isinstance(message, Abort):
            news.outputs += engine.abort_request(message.request_ids)
            news.aborted += message.request_ids
        elif isinstance(message, ResetPrefixCache):
            engine.reset_prefix_cache()
        else:
            _add(engine, message, news)
        try:
            message = inbox.get_nowait()
        except queue.Empty:
            message = None
    return True


def _first(engine: LLMEngine, inbox: Inbox) -> ToEngine | None:
    if engine.has_unfinished_requests():
        try:
            return inbox.get_nowait()
        except queue.Empty:
            return None
    while True:
        try:
            return inbox.get(timeout=_HEALTH_INTERVAL_S)
        except queue.Empty:
            engine.check_health()


def _add(engine: LLMEngine, request: EngineRequest, news: StepNews) -> None:
    try:
        engine.add_checked(request)
    except PagemillError as error:
        news.refused.append((request.request_id, error))
