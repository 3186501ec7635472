"""Panics of the `tokenizers` library as errors.

Its Rust code panics on some damaged files, and with some settings on some texts, where it should return an error.
A panic arrives as an exception that is no `Exception`, so it would pass every handler and end the process, or the
engine with all its requests. Called by the readers of tokenizers, and by `tokenizer.fast` around everything that it asks
the library for a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pagemill.errors import CheckpointError, PagemillError, RequestError


@contextmanager
def panics_as_errors(file: Path) -> Iterator[None]:
    """Raise CheckpointError naming `file` where the block panics; other exceptions pass."""
    with _panics_as(
        lambda panic: CheckpointError(
            f"{file} makes the tokenizers library fail: {panic}; the file is damaged, fetch it again"
        )
    ):
        yield


@contextmanager
def encoding_walled() -> Iterator[None]:
    """Raise RequestError where the block, which makes tokens of a request's text, panics."""
    with _panics_as(
        lambda panic: RequestError(
            f"the prompt cannot be tokenized: the tokenizers library fails on it: {panic}; change the "
            "text, or send token ids",
            param="prompt",
        )
    ):
        yield


@contextmanager
def decoding_walled(source: str) -> Iterator[None]:
    """Raise CheckpointError naming `source` where the block, which makes text of tokens, panics."""
    with _panics_as(
        lambda panic: CheckpointError(
            f"the tokenizer of {source} cannot make text of these tokens: the tokenizers library fails "
            f"on them: {panic}; compare its files with the original ones"
        )
    ):
        yield


@contextmanager
def _panics_as(make: Callable[[BaseException], PagemillError]) -> Iterator[None]:
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        # The class cannot be imported: every extension made with pyo3 has one of its own.
        if type(error).__name__ != "PanicException":
            raise
        raise make(error) from error
