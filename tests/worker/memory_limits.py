"""Start a worker again and again, each time with a little more memory, and print how each try ended.

A program, not a test: `python memory_limits.py int4 2 4 8 16`, with a quantization (or "none"), the threads,
and how many MiB a try may have beyond what the process has. A try is a process of its own, so one that
dies is seen. Prints a line for each: its MiB, "started", the OutOfMemoryError's words, or how it died.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from pagemill import native
from pagemill.config import EngineConfig
from pagemill.device import host
from pagemill.errors import OutOfMemoryError
from pagemill.worker.worker import Worker
from tests.limited_child import said_with
from tests.worker.test_memory import MIB, make_config


def settle(quantization: str, num_threads: int) -> EngineConfig:
    """Return the configuration of a model of 90 MB in float32."""
    config = make_config(kv_cache_memory_bytes=64 * MIB)
    asked = None if quantization == "none" else quantization
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, quantization=asked),
        device=dataclasses.replace(config.device, num_threads=num_threads),
    )


def start(config: EngineConfig) -> str:
    """Start a worker; return how that ended."""
    try:
        Worker(config)
    except OutOfMemoryError as error:
        return f"refused: {error}"
    return "started"


def main(quantization: str, num_threads: str, *rooms: str) -> None:
    """Make the tries; OpenMP's threads are first made in the children."""
    native.extension()
    host.available_bytes = lambda: 1 << 40  # past the plan, which knows the limit
    config = settle(quantization, int(num_threads))
    for room in rooms:
        print(room, said_with(int(room), lambda: start(config)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
