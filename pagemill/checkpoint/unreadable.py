"""What it means that a file of a checkpoint cannot be read. Called by the readers of this room."""

from __future__ import annotations

import errno
from pathlib import Path

from pagemill.errors import CheckpointError, OutOfMemoryError, PagemillError


def unreadable(path: Path, error: OSError) -> PagemillError:
    """Return the error to raise: the file's fault, or the system's where it has no memory to read it."""
    if error.errno == errno.ENOMEM:
        return OutOfMemoryError(
            f"the system refused memory while {path} was read: {error.strerror}. The file is not at "
            "fault: raise the process's limit (ulimit -v, or the container's), start fewer threads, or "
            "free memory"
        )
    return CheckpointError(f"cannot read {path}: {error.strerror or error}")
