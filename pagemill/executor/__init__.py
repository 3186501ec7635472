"""How the engine reaches its ranks, by name: one file and one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagemill.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagemill.config import EngineConfig
    from pagemill.executor.base import Executor

EXECUTORS: Registry[Callable[[EngineConfig], Executor]] = Registry(
    "executor",
    {
        "in_process": "pagemill.executor.in_process:InProcessExecutor",
        "uni": "pagemill.executor.in_process:InProcessExecutor",
        "multi_process": "pagemill.executor.multi_process:MultiProcessExecutor",
        "mp": "pagemill.executor.multi_process:MultiProcessExecutor",
    },
)
