"""Starts the engine of `serve` in its own process, from a thread, so that HTTP's imports go on meanwhile.

Called by `pagemill serve` before it imports the rest of the server.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

from pagemill.engine_args import AsyncEngineArgs
from pagemill.server.engine_client import EngineClient


def start_engine(args: AsyncEngineArgs) -> Future[EngineClient]:
    """Return the engine that is being started; errors of the start are the future's.

    The thread is a daemon: a signal that comes while the model loads must not wait for it.
    """
    future: Future[EngineClient] = Future()

    def run() -> None:
        try:
            from pagemill.engine.async_engine import AsyncLLMEngine

            engine = AsyncLLMEngine.from_engine_args(args, home="process")
        except BaseException as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            if future.set_running_or_notify_cancel():
                future.set_result(engine)
            else:
                engine.shutdown()

    threading.Thread(target=run, name="engine-start", daemon=True).start()
    return future
