"""Start a worker again and again, each time with a little more memory, and print how each try ended.

A program, not a test: `python memory_limits.py int4 2 4 8 16`, with a quantization (or "none"), the threads,
and how many MiB a try may have beyond what the process has. A try is a process of its own, so one that
dies is seen. Prints a line for each: its MiB, "started", the OutOfMemoryError's words, or how it died.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from pagemill import native
from pagemill.config import EngineConfig
from pagemill.device import host
from pagemill.errors import OutOfMemoryError
from pagemill.worker.worker import Worker
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


def attempt(config: EngineConfig, room_mib: int) -> str:
    """Start a worker in a child with so much room; return how it ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + room_mib * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            Worker(config)
            said = "started"
        except OutOfMemoryError as error:
            said = f"refused: {error}"
        except BaseException as error:
            said = f"failed: {type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"died of signal {os.WTERMSIG(status)}"
    return said or f"ended with status {os.WEXITSTATUS(status)}"


def main(quantization: str, num_threads: str, *rooms: str) -> None:
    """Make the tries; OpenMP's threads are first made in the children."""
    native.extension()
    host.available_bytes = lambda: 1 << 40  # past the plan, which knows the limit
    config = settle(quantization, int(num_threads))
    for room in rooms:
        print(room, attempt(config, int(room)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
