"""The caller's end of the pipe: an engine in a process that is stopped between its turns.

Engines stay loaded for the whole run, so that rounds interleave without loading again. Some spin their
threads while they wait: between turns the whole process group is stopped (SIGSTOP), so that the others
have the machine to themselves. Called by `benchmarks.turns`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from benchmarks.engines.base import EngineOptions

ROOT = Path(__file__).parents[2]
_ERROR_LINES = 3
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class EngineFailed(Exception):
    """An engine ended, or never came up; the message has its last words."""


def command(python: str, module: str, options: EngineOptions) -> list[str]:
    """Return the command that runs an engine file in the environment of `python`."""
    return [python, "-m", "benchmarks.engines", module, json.dumps(asdict(options))]


def _end_with_caller() -> None:
    """Have the kernel kill this process, stopped as it may be, when its caller is gone."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class EngineProcess:
    """One engine. Use as a context manager: leaving it ends the process."""

    def __init__(self, name: str, arguments: list[str], threads: int) -> None:
        self.name = name
        self.version = ""
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            text=True, cwd=ROOT, env=environment, preexec_fn=_end_with_caller,
        )  # fmt: skip

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Return the id of the process, which is its group's too."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until the engine has loaded, and stop it. Raises EngineFailed."""
        self.version = str(self._answer()["version"])
        self._signal(signal.SIGSTOP)

    def run(self, case: str, round: str) -> dict[str, float]:
        """Wake the engine for one turn, and return the turn's figures. Raises EngineFailed."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        # Where it has ended, reading its answer says so, with its last words.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{case} {round}\n")
            self._process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return {name: float(value) for name, value in answer.items()}

    def idle_share(self, seconds: float) -> float:
        """Return the cores that the engine keeps busy while it waits, awake, for its next turn."""
        self._signal(signal.SIGCONT)
        before, start = self._cpu_s(), time.perf_counter()
        time.sleep(seconds)
        busy = (self._cpu_s() - before) / (time.perf_counter() - start)
        self._signal(signal.SIGSTOP)
        return busy

    def resident_bytes(self) -> int:
        """Return the memory that the engine holds, pages of mapped files included."""
        return sum(process.memory_info().rss for process in self._family())

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # a line that it did not live to read
                pipe.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise EngineFailed(f"{self.name} ended with code {code}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return " / ".join(lines[-_ERROR_LINES:]) or "it wrote nothing"

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            # Its group is gone with it, or it has not come so far as to make one.
            if self._process.poll() is None:
                self._process.send_signal(number)

    def _family(self) -> list[psutil.Process]:
        first = psutil.Process(self.pid)
        return [first, *first.children(recursive=True)]

    def _cpu_s(self) -> float:
        times = [process.cpu_times() for process in self._family()]
        return sum(one.user + one.system for one in times)


def python_of(venvs: Path, venv: str | None) -> str | None:
    """Return the interpreter of a virtual environment, or None where there is none."""
    if venv is None:
        return sys.executable
    python = venvs / venv / "bin" / "python"
    return str(python) if python.exists() else None


def has_package(python: str, package: str) -> bool:
    """Return whether an interpreter finds a package."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", code], check=False, cwd=ROOT).returncode == 0
