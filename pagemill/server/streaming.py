"""Answers that take time: server-sent events, whole answers, and clients that leave.

A client that goes away ends the work: the task that reads the engine's outputs is cancelled, which
closes the engine's generators, which aborts the requests and frees their blocks.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagemill.outputs import RequestOutput
from pagemill.server.errors import to_api_error

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
# nginx' own word; nobody reads the answer, but the log line tells it from the others.
CLIENT_CLOSED = 499


def event(data: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return (
        b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


async def merge(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield (index of the stream, output) as outputs come; closing it closes every stream."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    # Of one place: what a slow reader leaves waits in the streams, which join it.
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(1)

    async def pump(index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        async with aclosing(stream):
            try:
                async for output in stream:
                    await queue.put((index, output))
                await queue.put((index, None))
            except Exception as error:  # handed to the reader, who raises it
                await queue.put((index, error))

    tasks = [asyncio.create_task(pump(i, s)) for i, s in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_disconnect(request: Request, work: Awaitable[T]) -> T | None:
    """Return the result of `work`, or None when the client went away first."""
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _cancel(task, watch)


def closed_response() -> Response:
    """Return what is "sent" to a client that went away."""
    return Response(status_code=CLIENT_CLOSED)


async def _disconnected(receive: Receive) -> None:
    """Return when the client is gone. The body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        # Only the cancellation and errors nobody waits for any more: results were taken before.
        with suppress(asyncio.CancelledError, Exception):
            await task


class EventStream(Response):
    """Server-sent events from an async generator of ready-made events.

    An error is the last event before [DONE]; what can be refused is refused before a stream begins.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        # nginx would hold events back to fill its buffer.
        self.raw_headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the end, an error, or the client's leaving."""
        pump = asyncio.create_task(self._pump(send))
        watch = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({pump, watch}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            await _cancel(pump, watch)

    async def _pump(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async with aclosing(self._events) as events:
            try:
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except OSError:
                raise  # the connection is gone
            except Exception as error:
                data = event(to_api_error(error).body())
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})
