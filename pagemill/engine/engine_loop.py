"""The loop that drives an engine's core, and what it says to the other side.

`run_loop` is the same in a thread of the caller's process (`engine.engine_thread`) and in a process of
its own (`engine.engine_process`): messages come through a queue, everything that one step came to goes
out as one message, and the next step begins at once: text and streams are made by others meanwhile. Aborts and
stop strings that have arrived are obeyed before each step, so a request is gone within one. A request that is
refused here answers itself alone; an error in a step ends the loop.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pagemill.config import EngineConfig
from pagemill.errors import EngineDeadError, PagemillError, words_of
from pagemill.executor.base import MemoryPlan
from pagemill.log import get_logger
from pagemill.messages import EngineRequest, StepReport, StringStop

if TYPE_CHECKING:
    from pagemill.engine.engine_core import EngineCore

logger = get_logger(__name__)

# How long an idle loop waits before it looks whether its ranks are still there.
_HEALTH_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Abort:
    """End these requests."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """End these sequences: stop strings were found in their text."""

    stops: tuple[StringStop, ...]


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

    refused: list[tuple[str, PagemillError]] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)  # in the order in which things happened
    resets: list[bool] = field(default_factory=list)  # of the prefix cache: what each came to

    def __bool__(self) -> bool:
        return bool(self.refused or self.reports or self.resets)

    def add(self, report: StepReport | None) -> None:
        """Take a report that says something."""
        if report is not None and not report.is_empty:
            self.reports.append(report)


@dataclass(frozen=True, slots=True)
class EngineDead:
    """The loop has ended and why."""

    reason: str


ToEngine = EngineRequest | Abort | Finish | ResetPrefixCache | Shutdown
FromEngine = Ready | StartFailed | StepNews | EngineDead
Inbox = queue.SimpleQueue[ToEngine]


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
        """Give the engine a message; never blocks. Messages are obeyed in their order."""
        ...

    def check_health(self) -> None:
        """Raise EngineDeadError when the engine is gone, though `deliver` may not have been told yet."""
        ...

    def close(self) -> None:
        """End the engine and wait for it; calling it twice is harmless."""
        ...

    def kill(self) -> None:
        """Let a `close` that waits in another thread, or comes, not wait for a step."""
        ...


def run_loop(core: EngineCore, inbox: Inbox, send: Callable[[FromEngine], None]) -> bool:
    """Serve until a Shutdown (True), or until a step fails and EngineDead was sent (False)."""
    try:
        while True:
            news = StepNews()
            goes_on = _obey(core, inbox, news)
            if goes_on and core.has_unfinished_requests():
                news.add(core.step())
            if news:
                send(news)
            if not goes_on:
                return True
    except BaseException as error:
        # Whatever it was, all requests are told; the traceback is for whoever reads the log.
        logger.exception("the engine has died")
        known = isinstance(error, EngineDeadError)
        send(EngineDead(str(error) if known else words_of(error)))
        if not isinstance(error, Exception):
            raise
        return False
    finally:
        core.shutdown()


def _obey(core: EngineCore, inbox: Inbox, news: StepNews) -> bool:
    """Act on every message that has come, waiting for one when idle; False after a Shutdown."""
    message = _first(core, inbox)
    while message is not None:
        if isinstance(message, Shutdown):
            return False
        if isinstance(message, Abort):
            news.add(core.abort(message.request_ids))
        elif isinstance(message, Finish):
            news.add(core.finish(message.stops))
        elif isinstance(message, ResetPrefixCache):
            news.resets.append(core.reset_prefix_cache())
        else:
            _add(core, message, news)
        try:
            message = inbox.get_nowait()
        except queue.Empty:
            message = None
    return True


def _first(core: EngineCore, inbox: Inbox) -> ToEngine | None:
    if core.has_unfinished_requests():
        try:
            return inbox.get_nowait()
        except queue.Empty:
            return None
    while True:
        try:
            return inbox.get(timeout=_HEALTH_INTERVAL_S)
        except queue.Empty:
            core.check_health()


def _add(core: EngineCore, request: EngineRequest, news: StepNews) -> None:
    try:
        core.add(request)
    except PagemillError as error:
        news.refused.append((request.request_id, error))
