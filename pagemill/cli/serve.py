"""`pagemill serve [MODEL]`: the OpenAI server, HTTP in this process and the engine in its own."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from pagemill.cli.arguments import add_fields, add_model, settle_all
from pagemill.engine_args import AsyncEngineArgs
from pagemill.log import setup_logging
from pagemill.server.listening import listen
from pagemill.server.settings import ServerArgs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, the engine's flags and the server's."""
    add_model(parser)
    add_fields(parser, ServerArgs, AsyncEngineArgs)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it (0) or the engine dies (1)."""
    engine_args, server_args = settle_all(args, AsyncEngineArgs, ServerArgs)
    server_args.check()
    engine_args.refuse_unsupported()
    setup_logging(sys.stdout)
    for number in (signal.SIGTERM, signal.SIGINT):  # until the server has its own handlers
        signal.signal(number, _leave)
    bound = None if server_args.uds is not None else listen(server_args.host, server_args.port)
    from pagemill.server.engine_start import start_engine

    loading = start_engine(engine_args)
    # Only now: these imports take as long as the engine process needs for torch's.
    from pagemill.server.launch import serve

    return serve(loading, engine_args, server_args, bound)


def _leave(number: int, frame: object) -> None:
    # At once, not by an exception: that could come up in the middle of an import and be lost there.
    # Nothing has begun that must end in good order; the engine's process sees its socket close.
    os._exit(0)
