"""Panics of the `tokenizers` library as errors.

Its Rust code panics on some damaged files, where it should return an error. A panic arrives as an
exception that is no `Exception`, so it would pass every handler and end the process. Called by the
reader of tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pagemill.errors import CheckpointError


@contextmanager
def panics_as_errors(file: Path) -> Iterator[None]:
    """Raise CheckpointError naming `file` where the block panics; other exceptions pass."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        # The class cannot be imported: every extension made with pyo3 has one of its own.
        if type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(
            f"{file} makes the tokenizers library fail: {error}; the file is damaged, fetch it again"
        ) from error
