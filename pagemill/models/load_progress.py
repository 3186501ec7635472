"""How far the reading and packing of a model's weights is: a bar on a terminal, else lines in the log.

One `LoadProgress` a model, made and fed by the loader. Nothing is shown for a load of under a second.
"""

from __future__ import annotations

import sys
import time
from typing import NoReturn

from tqdm import tqdm

from pagemill.log import get_logger

logger = get_logger(__name__)

_SHOWN_AFTER_S = 1.0
_LINE_EVERY_S = 5.0
_MIB = 1 << 20


class LoadProgress:
    """Counts bytes of the files, `total` in all. A bar goes to stderr where that is a terminal."""

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total, self._done = name, total, 0
        self._said = time.monotonic()
        self._bar: tqdm[NoReturn] | None = None
        if sys.stderr.isatty():  # making one starts a thread, which nobody needs elsewhere
            self._bar = tqdm(
                total=total,
                desc=f"Loading {name}",
                unit="B",
                unit_scale=True,
                dynamic_ncols=True,
                delay=_SHOWN_AFTER_S,
            )

    def add(self, size_bytes: int) -> None:
        """Count a tensor that lies in its place."""
        self._done += size_bytes
        if self._bar is not None:
            self._bar.update(size_bytes)
            return
        now = time.monotonic()
        if now - self._said >= _LINE_EVERY_S and self._done < self._total:
            self._said = now
            logger.info(
                "loading %s: %d of %d MiB (%d%%)",
                self._name,
                self._done // _MIB,
                self._total // _MIB,
                100 * self._done // self._total,
            )

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
