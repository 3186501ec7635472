"""Runs the server: HTTP in this process, the engine in its own, until a signal or the engine's death.

The port is open at once and answers 503 while the model loads; that way the imports of the HTTP side and
of the engine side overlap. Called by `pagemill serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import uvicorn

from pagemill.engine_args import EngineArgs
from pagemill.errors import ConfigError, EngineDeadError
from pagemill.log import get_logger
from pagemill.server.app import build_app
from pagemill.server.engine_client import EngineClient
from pagemill.server.serving import Serving
from pagemill.server.settings import ServerArgs
from pagemill.server.template_source import read_template

logger = get_logger(__name__)

# How often the server looks whether the engine is still there, beside the requests that find out.
WATCH_INTERVAL_S = 0.25
# What open streams get to deliver the error event after the engine died.
LAST_WORDS_S = 0.5


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
    return asyncio.run(_Server(serving, loading, bound).run())


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

    async def run(self) -> int:
        """Open the port, load, serve; return the exit code."""
        settings = self._serving.settings
        sockets = self._sockets
        self._catch_signals()
        loading = asyncio.wrap_future(self._loading)
        serving = asyncio.create_task(self._http.serve(sockets=sockets))
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
            self._stop_engine()

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

    async def _close(self, serving: asyncio.Task[None]) -> None:
        """Close the port. Without an engine no client is waited for: one may never read or finish."""
        self._http.should_exit = True
        await asyncio.wait({serving}, timeout=LAST_WORDS_S)
        self._http.force_exit = True
        await asyncio.wait({serving})

    async def _ended(self, serving: asyncio.Task[None]) -> None:
        try:
            await serving
        except OSError as error:
            raise ConfigError(f"cannot listen on {self._serving.settings.uds}: {error}") from None

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)

    def _on_signal(self, name: str) -> None:
        if self._http.should_exit:
            logger.info("%s again: leaving at once", name)
            self._http.force_exit = True
            return
        logger.info("%s: finishing open requests, then leaving; once more leaves at once", name)
        self._http.should_exit = True
        self._serving.close()

    def _stop_engine(self) -> None:
        # An engine that is still loading ends with this process: it has nothing to end in good order.
        if self._engine is not None:
            self._engine.shutdown()


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
