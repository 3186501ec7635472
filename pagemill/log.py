"""Logger setup: one handler on the "pagemill" logger, one line a record.

Records go to stderr, so that the output of a program that uses pagemill stays its own; `serve` asks for
stdout. Called once by each face (LLM, the command line) through `setup_logging`.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from pagemill import env
from pagemill.errors import ConfigError

_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
_TIME = "%m-%d %H:%M:%S"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]  # 3.10 takes none
    """Writes to what is `sys.stderr` at the time: a program may replace it, and close what it was."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        """Return the standard error of now."""
        return sys.stderr


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass `__name__`."""
    return logging.getLogger(name)


def setup_logging(stream: TextIO | None = None) -> None:
    """Give the "pagemill" logger its handler, once; a program's own handler on it is respected."""
    logger = logging.getLogger("pagemill")
    if logger.handlers:
        return
    level = env.log_level()
    if level not in _LEVELS:
        raise ConfigError(f"PAGEMILL_LOG_LEVEL is {level!r}; use DEBUG, INFO, WARNING or ERROR")
    handler = _StderrHandler() if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(_FORMAT, _TIME))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


def logs_to_stdout() -> bool:
    """Return whether this process logs to stdout; an engine process of its own then does so too."""
    handlers = logging.getLogger("pagemill").handlers
    return any(isinstance(h, logging.StreamHandler) and h.stream is sys.stdout for h in handlers)
