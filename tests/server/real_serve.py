"""Starts the real `pagemill serve` as a user does: a process of its own, its log on stdout."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.server.harness import Running, until

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0
_READY = re.compile(r"ready: serving (\S+) on (https?://127\.0\.0\.1:(\d+))")


@dataclass
class Serve:
    """A running `pagemill serve`."""

    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)
    url: str = ""
    port: int = 0

    def is_ready(self) -> bool:
        """Return whether the log says where it serves; fails when the process has ended."""
        match = _READY.search("\n".join(self.log))
        if match is not None:
            self.url, self.port = match[2], int(match[3])
            return True
        assert self.process.poll() is None, "\n".join(self.log)
        return False

    def children(self) -> list[int]:
        """Return the ids of the server's child processes."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for path in tasks for pid in path.read_text().split()]

    def engine_pid(self) -> int:
        """Return the id of the engine's process: the server's one child."""
        children = self.children()
        assert len(children) == 1, children
        return children[0]

    def maps(self, pid: int) -> str:
        """Return what a process has mapped into its memory."""
        return Path(f"/proc/{pid}/maps").read_text()

    def end(self, number: signal.Signals, timeout_s: float = 30.0) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)


@contextmanager
def started(*words: str) -> Iterator[Serve]:
    """Start the server; whatever is left of it at the end is killed."""
    command = [sys.executable, "-m", "pagemill", "serve", *words]
    command += ["--host", "127.0.0.1", "--port", "0", "--kv-cache-memory-bytes", "32MiB"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    serve = Serve(process)
    reader = threading.Thread(target=_read, args=(serve,), daemon=True)
    reader.start()
    try:
        yield serve
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join(timeout=20)
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def ready(*words: str) -> Iterator[Serve]:
    """Start the server and wait until it serves."""
    with started(*words) as serve:
        until(serve.is_ready, START_TIMEOUT_S)
        yield serve


@contextmanager
def asked_of(serve: Serve) -> Iterator[Running]:
    """Put the questions that the harness asks a server to the real one."""
    with httpx.Client(base_url=serve.url, timeout=60) as http:
        running = Running.__new__(Running)
        running.url, running.port, running.http = serve.url, serve.port, http
        yield running


def _read(serve: Serve) -> None:
    assert serve.process.stdout is not None
    for line in serve.process.stdout:
        serve.log.append(line.rstrip("\n"))
