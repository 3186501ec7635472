"""Clients that ask and do not read: what waits for one is kept for a while, then its connection is closed.

An answer that nobody reads stays in its connection's buffer, and the request behind a stream goes on: its
events wait in `send`, its outputs are joined into one (`engine.mailbox`). Closing the connection ends the request as
any client's leaving does, and frees its blocks. A client that reads, however slowly, changes the amount that waits
and is left alone: here, or in the system's buffer for the connection, which holds megabytes and takes more only
when a good part of them went. Whole answers, and those that were over before the connection was closed, count alike.

Owned by `launch`, which lets it look at all connections of the HTTP server.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import termios
import time
from collections.abc import Callable, Collection
from typing import Protocol

from pagemill.log import get_logger

logger = get_logger(__name__)

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0  # between two looks


class Connection(Protocol):
    """What is asked of a connection; the HTTP server's are protocols of asyncio."""

    transport: asyncio.Transport


class UnreadWatch:
    """Closes connections on which something waits, and nothing was read for `timeout_s` seconds."""

    def __init__(
        self,
        connections: Collection[Connection],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connections = connections
        self._timeout_s = timeout_s
        self.pause_s = max(_SHORTEST_PAUSE_S, min(_LONGEST_PAUSE_S, timeout_s / 4))
        self._clock = clock
        # What waits on a connection (bytes here, bytes in the system), and since when it is as much.
        self._waiting: dict[Connection, tuple[tuple[int, int], float]] = {}

    async def run(self) -> None:
        """Look again and again; ends by being cancelled."""
        while True:
            await asyncio.sleep(self.pause_s)
            self.look()

    def look(self) -> None:
        """Close those whose time is over."""
        now = self._clock()
        waiting: dict[Connection, tuple[tuple[int, int], float]] = {}
        for connection in list(self._connections):
            size = connection.transport.get_write_buffer_size()
            if size == 0:
                continue
            found = (size, _bytes_in_system(connection.transport))
            known, since = self._waiting.get(connection, (None, now))
            if known != found:
                since = now
            elif now - since >= self._timeout_s:
                logger.warning(
                    "closing a connection: %d bytes wait for its client, which has read nothing for %.3g s "
                    "(--send-timeout)",
                    size,
                    now - since,
                )
                connection.transport.abort()
                continue
            waiting[connection] = (found, since)
        self._waiting = waiting


def _bytes_in_system(transport: asyncio.Transport) -> int:
    """Return how many bytes the system holds that the client has not taken; 0 where it does not say."""
    own = transport.get_extra_info("socket")
    if own is None:
        return 0
    held = array.array("i", [0])
    try:
        fcntl.ioctl(own.fileno(), termios.TIOCOUTQ, held)  # of a socket on Linux: SIOCOUTQ
    except (OSError, ValueError):  # closed a moment ago
        return 0
    return held[0]
