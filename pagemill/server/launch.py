"""Runs the server: HTTP in this process, the engine in its own, until a signal or the engine's death.

The port is open at once and answers 503 while the model loads; that way the imports of the HTTP side and
of the engine side overlap. Called by `pagemill serve`.

How it ends, whatever the clients do:

    a signal               no new requests; open ones have `shutdown_timeout` seconds to end
    their time is over     they are aborted; streams and waiting clients are told so
    half a second later    connections that are still there are closed, whatever waits on them unread
    then                   the engine ends in good order (the tier file gets what it lacks)
    a second signal        skips to the closing of connections; an engine in a long step is killed
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import uvicorn

from pagemill.engine_args import EngineArgs
from pagemill.errors import ConfigError, EngineDeadError
from pagemill.log import get_logger
from pagemill.server.app import build_app
from pagemill.server.engine_client import EngineClient
from pagemill.server.listening import cannot_listen
from pagemill.server.serving import Serving
from pagemill.server.settings import ServerArgs
from pagemill.server.template_source import read_template
from pagemill.server.unread import UnreadWatch

logger = get_logger(__name__)

# How often the server looks whether the engine is still there, beside the requests that find out.
WATCH_INTERVAL_S = 0.25
# What open streams get to deliver an error event, and what has to end gets before it is made to.
LAST_WORDS_S = 0.5
_THREADS = "pagemill-http"  # of those that tokenize and render for requests


def serve(
    loading: Future[EngineClient],
    args: EngineArgs,
    settings: ServerArgs,
    bound: socket.socket | None,
) -> int:
    """Serve; return 0 after SIGTERM or SIGINT, 1 after the engine's death, also if a signal came then.

    `loading` is an engine that is being started (`server.engine_start`); its errors are raised here.
    `bound` is the socket to listen on (`server.listening`); None with --uds.
    """
    template = None if settings.chat_template is None else read_template(settings.chat_template)
    serving = Serving(settings, args.served_model_name or args.model, chat_template=template)
    code = _run(_Server(serving, loading, bound))
    _end_threads(code)
    return code


class _QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers: it would end the process by the signal it got."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    """One run of the server."""

    def __init__(
        self, serving: Serving, loading: Future[EngineClient], bound: socket.socket | None
    ) -> None:
        self._serving = serving
        self._loading = loading
        self._sockets = None if bound is None else [bound]
        self._engine: EngineClient | None = None
        self._http = _QuietServer(_uvicorn_config(serving))
        self._leaving = asyncio.Event()  # a signal has come
        self._at_once = asyncio.Event()  # and another

    async def run(self) -> int:
        """Open the port, load, serve; return the exit code."""
        settings = self._serving.settings
        sockets = self._sockets
        self._catch_signals()
        watch = UnreadWatch(self._http.server_state.connections, settings.send_timeout)
        loading = asyncio.wrap_future(self._loading)
        serving = asyncio.create_task(self._http.serve(sockets=sockets))
        helpers = [asyncio.create_task(one) for one in (self._leave(serving), watch.run())]
        try:
            first: set[asyncio.Future[Any]] = {loading, serving}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():  # a signal came first, or the socket could not be opened
                await self._ended(serving)
                return 0
            self._engine = loading.result()
            self._serving.attach(self._engine)
            logger.info(
                "ready: serving %s on %s", self._serving.model_name, _address(settings, sockets)
            )
            return await self._until_end(serving)
        finally:
            await self._close(serving)
            for helper in helpers:
                helper.cancel()
            await self._stop_engine()

    async def _until_end(self, serving: asyncio.Task[None]) -> int:
        """Serve until a signal ends the HTTP server, or the engine dies."""
        while not serving.done():
            await asyncio.wait({serving}, timeout=WATCH_INTERVAL_S)
            if not await self._is_alive():
                await asyncio.sleep(LAST_WORDS_S)
                return 1
        await self._ended(serving)
        return 0 if await self._is_alive() else 1

    async def _is_alive(self) -> bool:
        """Return whether the engine is there; say why when it is not."""
        assert self._engine is not None
        try:
            await self._engine.check_health()
        except EngineDeadError as error:
            logger.error("the engine is gone: %s", error)
            self._serving.fail(str(error))
            return False
        return True

    async def _leave(self, serving: asyncio.Task[None]) -> None:
        """Wait for a signal; then give open requests their time, end them, and close what is left."""
        await self._leaving.wait()
        timeout_s = self._serving.settings.shutdown_timeout
        if not await self._is_over(serving, timeout_s) and not self._at_once.is_set():
            logger.warning("ending the requests that are open after %g s", timeout_s)
            self._serving.interrupt(
                f"the server is leaving, and the {timeout_s:g} s are over that open requests had to end "
                "(--shutdown-timeout)"
            )
            await self._is_over(serving, LAST_WORDS_S)
        await self._disconnect(serving)

    async def _close(self, serving: asyncio.Task[None]) -> None:
        """Close the port. Without an engine no client is waited for: one may never read or finish."""
        self._http.should_exit = True
        await self._is_over(serving, LAST_WORDS_S)
        await self._disconnect(serving)

    async def _is_over(self, work: asyncio.Future[None], timeout_s: float | None) -> bool:
        """Wait until something has ended, its time is over, or a second signal comes; return the first."""
        at_once = asyncio.create_task(self._at_once.wait())
        both: set[asyncio.Future[Any]] = {work, at_once}
        await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        at_once.cancel()
        return work.done()

    async def _disconnect(self, serving: asyncio.Task[None]) -> None:
        """Close every connection, read or not, and end the HTTP server."""
        self._http.force_exit = True
        for connection in list(self._http.server_state.connections):
            connection.transport.abort()
        await asyncio.wait({serving}, timeout=LAST_WORDS_S)
        serving.cancel()  # it may wait for a connection that is not one of HTTP yet
        await asyncio.wait({serving})

    async def _ended(self, serving: asyncio.Task[None]) -> None:
        await asyncio.wait({serving})
        error = None if serving.cancelled() else serving.exception()
        if isinstance(error, OSError):
            settings = self._serving.settings
            if self._sockets is not None:
                raise cannot_listen(settings.host, settings.port, error) from None
            raise ConfigError(
                f"cannot listen on {settings.uds}: {error}; choose another --uds"
            ) from None
        if error is not None:
            raise error

    def _catch_signals(self) -> None:
        """Note signals, until the process has ended: one that comes late changes nothing."""
        loop = asyncio.get_running_loop()

        def note(number: int, frame: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._on_signal, signal.Signals(number).name)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, note)

    def _on_signal(self, name: str) -> None:
        if self._leaving.is_set():
            logger.info("%s again: leaving at once", name)
            self._at_once.set()
            return
        logger.info(
            "%s: finishing open requests for at most %g s, then leaving; once more leaves at once",
            name,
            self._serving.settings.shutdown_timeout,
        )
        self._leaving.set()
        self._http.should_exit = True
        self._serving.close()

    async def _stop_engine(self) -> None:
        """End the engine in good order; after a second signal it does not finish a long step."""
        # An engine that is still loading ends with this process: it has nothing to end in good order.
        if self._engine is None:
            return
        thread = ThreadPoolExecutor(1)
        ending = asyncio.get_running_loop().run_in_executor(thread, self._engine.shutdown)
        if not await self._is_over(ending, None):
            await asyncio.wait({ending}, timeout=LAST_WORDS_S)
            if not ending.done():
                self._engine.kill()
        await ending
        thread.shutdown()


def _run(server: _Server) -> int:
    """Run the server in an event loop of its own; return the exit code.

    As asyncio.run, which would wait at the end for every thread, those included that work for clients
    which are gone.
    """
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.set_default_executor(ThreadPoolExecutor(thread_name_prefix=_THREADS))
    try:
        return loop.run_until_complete(server.run())
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=LAST_WORDS_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()


def _end_threads(code: int) -> None:
    """Wait a moment for threads that tokenize and render; with one that goes on the process ends here."""
    end = time.monotonic() + LAST_WORDS_S
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(_THREADS)]
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        logger.info("leaving without a thread that still works on a request")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _uvicorn_config(serving: Serving) -> uvicorn.Config:
    settings = serving.settings
    for name in ("uvicorn", "uvicorn.error"):
        uvicorn_logger = logging.getLogger(name)
        uvicorn_logger.handlers = logging.getLogger("pagemill").handlers
        uvicorn_logger.propagate = False
    config = uvicorn.Config(
        build_app(serving),
        uds=settings.uds,
        root_path=settings.root_path,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ssl_certfile, ssl_keyfile: cannot be used: {error}") from None
    return config


def _address(settings: ServerArgs, sockets: list[socket.socket] | None) -> str:
    if sockets is None:
        return f"unix:{settings.uds}"
    host, port = sockets[0].getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    scheme = "https" if settings.ssl_certfile is not None else "http"
    return f"{scheme}://{shown}:{port}"
