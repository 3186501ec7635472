"""A file that must stay as it is while it is read, and pieces of it.

Pieces come by calls, not through a mapping: a load beyond the end of a mapped file that somebody cuts, or
from a disk that fails, ends the process with SIGBUS, while a call says so. Owns the descriptor. Called by
the readers of this room.
"""

from __future__ import annotations

import os
import stat
import weakref
from dataclasses import dataclass
from pathlib import Path

from pagemill.checkpoint.unreadable import unreadable
from pagemill.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class FileState:
    """What tells that a file is the one that was checked, and was not written to since."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int


class SteadyFile:
    """An open file; a read that finds it changed is a CheckpointError."""

    def __init__(self, path: Path, state: FileState | None = None) -> None:
        """Open a file, which must be in `state` where one is given."""
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise unreadable(path, error) from error
        weakref.finalize(self, os.close, self._descriptor)
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            raise CheckpointError(f"cannot read {path}: it is no regular file")
        self.state = self._state_now()
        if state is not None and state != self.state:
            raise self._changed(state, self.state)

    def read(self, offset: int, count: int) -> bytes:
        """Return `count` bytes from `offset` on, all of them."""
        memory = bytearray(count)
        self.read_into(offset, memoryview(memory))
        return bytes(memory)

    def read_into(self, offset: int, memory: memoryview) -> None:
        """Fill contiguous bytes with those of the file from `offset` on."""
        done = 0
        try:
            while done < len(memory):
                count = os.preadv(self._descriptor, [memory[done:]], offset + done)
                if not count:
                    break
                done += count
        except OSError as error:
            raise unreadable(self.path, error) from error
        # A file that is written to is marked before its bytes change: what was read is as it was.
        now = self._state_now()
        if now != self.state:
            raise self._changed(self.state, now)
        assert done == len(memory), "readers ask for bytes that the file has"

    def _state_now(self) -> FileState:
        now = os.fstat(self._descriptor)
        return FileState(now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns)

    def _changed(self, before: FileState, now: FileState) -> CheckpointError:
        what = "it was written to"
        if now.size_bytes != before.size_bytes:
            what = f"it had {before.size_bytes} bytes and has {now.size_bytes}"
        elif (now.device, now.inode) != (before.device, before.inode):
            what = "another file was put in its place"
        return CheckpointError(
            f"{self.path} changed while it was read: {what}. Load it again when it is complete and "
            "nothing writes to it"
        )
