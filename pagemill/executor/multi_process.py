"""The worker in a process of its own: messages are pickled over a pipe, one answer a step.

    parent                                  child (`executor.child_process`)
    EngineConfig  ------------------------> loads
                  <------------------------ _Ready(plan) | _Failed(error)
    SchedulerOutput ----------------------> executes
                  <------------------------ StepOutput   | _Failed(error)
    None          ------------------------> ends

The child's stderr comes back over a second pipe: it is passed on as it is, and its last lines are what
EngineDeadError quotes when the child dies. A parent that dies closes the pipe, which ends the child.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import faulthandler
import os
import pickle
import subprocess
import sys
import threading
import traceback
import weakref
from dataclasses import dataclass
from typing import IO

from torch import Tensor

from pagemill.config import EngineConfig
from pagemill.errors import EngineDeadError
from pagemill.executor.child_process import (
    end_with_parent,
    exit_text,
    kill_child,
    parent_connection,
    start_child,
)
from pagemill.log import get_logger, setup_logging
from pagemill.memory_plan import MemoryPlan
from pagemill.messages import SchedulerOutput, StepOutput
from pagemill.worker.worker import Worker

logger = get_logger(__name__)

_SHUTDOWN_TIMEOUT_S = 5.0
_KEPT_LINES = 20
# A message that a socket's buffer takes whole, whatever the system.
_MOST_BYTES_AHEAD = 32 << 10


@dataclass(frozen=True, slots=True)
class _Ready:
    """The child has loaded."""

    plan: MemoryPlan


@dataclass(frozen=True, slots=True)
class _Failed:
    """An exception of the child: itself where it can be pickled, and its text in any case."""

    error: BaseException | None
    text: str


class MultiProcessExecutor:
    """An `Executor` over one `Worker` in a process of its own."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the process and wait until it has loaded. Its errors are raised here, as they are."""
        self._process, self._pipe = start_child(__name__, keep_stderr=True)
        # Whoever forgets `shutdown` leaves no process behind: at exit, or when this object goes away.
        self._finalizer: weakref.finalize[..., MultiProcessExecutor] = weakref.finalize(
            self, kill_child, self._process
        )
        assert self._process.stderr is not None
        self._tail = _StderrTail(self._process.stderr)
        self._closed = False
        self._unread: list[int] = []  # ids of steps whose answer was not taken
        self._unsent: bytes | None = None  # the last of them, if it was too long to be sent ahead
        try:
            self._plan = self._load(config)
        except BaseException:
            self._finalizer()  # it has nothing to end in good order yet
            self.shutdown()
            raise

    @property
    def memory_plan(self) -> MemoryPlan:
        """Return the plan the KV cache was made by."""
        return self._plan

    def execute(self, scheduled: SchedulerOutput) -> StepOutput:
        """Run one step in the child. What the model raises there is raised here."""
        self.check_health()
        while self._unread:  # an interrupt came between a step and its answer
            self.collect()
        self.submit(scheduled)
        result = self.collect()
        assert result.step_id == scheduled.step_id
        return result

    def submit(self, scheduled: SchedulerOutput) -> None:
        """Send a step to the child, which begins it when the one before is done.

        A long message behind another step is sent when that one's answer is here: both sides might else
        wait for the other to read.
        """
        self.check_health()
        message = _pickled(scheduled)
        self._unread.append(scheduled.step_id)
        if len(self._unread) > 1 and len(message) > _MOST_BYTES_AHEAD:
            self._unsent = message
        else:
            self._send(message)

    def collect(self) -> StepOutput:
        """Wait for the oldest answer. What the model raised is raised here."""
        result = self._receive()
        assert isinstance(result, StepOutput)
        if self._unsent is not None:
            message, self._unsent = self._unsent, None
            self._send(message)
        return result

    def _send(self, message: bytes) -> None:
        try:
            self._pipe.send_bytes(message)
        except OSError as error:
            raise self._dead() from error

    def check_health(self) -> None:
        """Raise EngineDeadError when the process is gone."""
        if self._closed:
            raise EngineDeadError("the executor was shut down; make a new engine")
        if self._process.poll() is not None:
            raise self._dead()

    def shutdown(self) -> None:
        """End the process: asked first, then killed."""
        if self._closed:
            return
        self._closed = True
        try:
            self._pipe.send(None)
        except OSError:
            logger.debug("the worker process was gone before it was asked to end")
        self._wait()
        self._finalizer()
        self._pipe.close()
        self._tail.close()

    def _load(self, config: EngineConfig) -> MemoryPlan:
        try:
            self._pipe.send(config)
        except OSError as error:
            raise self._dead() from error
        ready = self._receive()
        assert isinstance(ready, _Ready)
        return ready.plan

    def _receive(self) -> _Ready | StepOutput:
        """Return the child's next message; raise what it failed with."""
        try:
            self._pipe.poll(None)  # an interrupt ends this wait, not the reading of half a message
            message = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._dead() from error
        if isinstance(message, StepOutput):
            self._unread.remove(message.step_id)
        if isinstance(message, _Failed):
            self._unread.clear()
            if message.error is not None:
                raise message.error
            raise EngineDeadError(f"the worker process failed:\n{message.text}")
        assert isinstance(message, (_Ready, StepOutput))
        return message

    def _wait(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SHUTDOWN_TIMEOUT_S)

    def _dead(self) -> EngineDeadError:
        self._wait()
        code = self._process.poll()
        how = "the worker process no longer answers"
        if code is not None:
            how = f"the worker process ended with {exit_text(code)}"
        self._tail.close()
        said = "\n".join(self._tail.lines())
        return EngineDeadError(
            f"{how}; " + (f"it last said:\n{said}" if said else
            "it said nothing (a kill may come from the system running out of memory)")
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Unsendable:
    """Stands for logits processors that cannot be pickled: fails their own sequence only."""

    reason: str

    def __call__(self, token_ids: list[int], logits: Tensor) -> Tensor:
        """Raise, which ends the sequence with this error."""
        raise TypeError(
            f"it cannot be sent to the worker's process ({self.reason}); define it at the top level of "
            "a module, or use distributed_executor_backend='in_process'"
        )


def _pickled(scheduled: SchedulerOutput) -> bytes:
    try:
        return pickle.dumps(scheduled, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        return pickle.dumps(_made_sendable(scheduled), pickle.HIGHEST_PROTOCOL)


def _made_sendable(step: SchedulerOutput) -> SchedulerOutput:
    """Replace what cannot be pickled in a step: only logits processors are the caller's own objects."""
    sequences = []
    for new in step.new_sequences:
        try:
            pickle.dumps(new.sampling)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            spec = dataclasses.replace(new.sampling, logits_processors=(_Unsendable(str(error)),))
            new = dataclasses.replace(new, sampling=spec)
        sequences.append(new)
    return dataclasses.replace(step, new_sequences=tuple(sequences))


class _StderrTail:
    """Passes a child's stderr on and remembers its last lines."""

    def __init__(self, reader: IO[bytes]) -> None:
        self._reader = reader
        self._last: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._thread = threading.Thread(target=self._copy, name="pagemill-stderr", daemon=True)
        self._thread.start()

    def lines(self) -> list[str]:
        """Return the last lines."""
        return list(self._last)

    def close(self) -> None:
        """Wait until the child has closed its end and all is read."""
        self._thread.join(_SHUTDOWN_TIMEOUT_S)

    def _copy(self) -> None:
        rest = ""
        with self._reader:
            while chunk := os.read(self._reader.fileno(), 65536):
                text = chunk.decode("utf-8", "replace")
                sys.stderr.write(text)
                sys.stderr.flush()
                *lines, rest = (rest + text).split("\n")
                self._last.extend(lines)
        if rest:
            self._last.append(rest)


def main(fd: int) -> None:
    """Be the child: load, then answer steps until told to end or the parent is gone."""
    faulthandler.enable()
    pipe = parent_connection(fd)
    end_with_parent(pipe)
    setup_logging()
    try:
        worker = Worker(pipe.recv())
        pipe.send(_Ready(worker.memory_plan))
        while (step := pipe.recv()) is not None:
            pipe.send(_answer(worker, step))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone
    except Exception as error:
        pipe.send(_failed(error))


def _answer(worker: Worker, step: SchedulerOutput) -> StepOutput | _Failed:
    try:
        return worker.execute(step)
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> _Failed:
    """Wrap an exception; one that does not survive pickling is sent as text."""
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return _Failed(None, text)
    return _Failed(error, text)
