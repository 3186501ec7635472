"""Hands messages to another thread, so that whoever makes them can go on at once.

Used for what a step came to: by `engine.engine_thread`, whose other thread makes the text, and by
`engine.engine_process`, whose other thread pickles and writes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from pagemill.log import get_logger

logger = get_logger(__name__)
T = TypeVar("T")

# How many messages may wait. One is what a thread needs to work while the next step computes; more let it
# catch up after a pause. Without a bound a reader that is too slow would be left behind for ever.
_MOST_WAITING = 8


class HandOver(Generic[T]):
    """Calls `take` with each message, in order, in a thread of its own.

    Once `take` has raised it is not called again, and `put` raises what it did.
    """

    def __init__(self, take: Callable[[T], None], name: str) -> None:
        self._take = take
        self._waiting: queue.Queue[T | None] = queue.Queue(_MOST_WAITING)
        self._failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def put(self, message: T) -> None:
        """Hand a message over; waits only while as many as may wait are waiting."""
        if self._failure is not None:
            raise self._failure
        self._waiting.put(message)

    def close(self) -> None:
        """Wait until everything was taken, and end the thread; nothing may be put any more."""
        self._waiting.put(None)
        self.thread.join()

    def _run(self) -> None:
        while (message := self._waiting.get()) is not None:
            if self._failure is not None:
                continue  # nobody who puts is left waiting
            try:
                self._take(message)
            except BaseException as error:  # also what a library's panic or a caller's exit raises
                logger.exception("%s has ended", self.thread.name)
                self._failure = error
