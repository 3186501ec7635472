"""Every error a user can cause, in one tree.

    PagemillError
    ├── ConfigError (ValueError)         an engine argument is wrong; raised before anything runs
    │   ├── UnknownNameError             a name is in no registry; lists the known ones
    │   ├── NotSupportedError            the feature exists elsewhere but not in this version
    │   └── CacheTooSmallError           the KV cache cannot hold one full-length request
    ├── CheckpointError (ValueError)     files of a model are missing, damaged or do not fit the model
    ├── OutOfMemoryError (MemoryError)   the system gave no memory to start an engine
    ├── RequestError (ValueError)        one request is wrong; the others go on
    │   └── PromptTooLongError           prompt (plus max_tokens) over the context; carries the numbers
    ├── InterruptedRequestError (RuntimeError)   the program ended the request, which was in order
    └── EngineDeadError (RuntimeError)   the engine process or thread is gone

`ValueError`, `MemoryError` and `RuntimeError` are second parents, so that code written for other engines catches them
where it expects to. Messages say what happened, with the numbers, and what to do.
"""

from __future__ import annotations

import errno


class PagemillError(Exception):
    """Base of every error that a user can cause."""


class ConfigError(PagemillError, ValueError):
    """An engine argument is wrong."""


class UnknownNameError(ConfigError):
    """A name is not in its registry."""


class NotSupportedError(ConfigError):
    """A known feature that this version of pagemill does not have."""


class CacheTooSmallError(ConfigError):
    """The KV cache cannot hold one request of `max_model_len` tokens."""


class CheckpointError(PagemillError, ValueError):
    """The files of a model are missing, damaged, or do not fit the architecture."""


class OutOfMemoryError(PagemillError, MemoryError):
    """The system refused memory while an engine was started."""


class RequestError(PagemillError, ValueError):
    """One request is wrong. `param` names the field of the request, as the caller spelled it."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:
        # `param` is keyword-only; without this the error could not cross a process boundary.
        return (_rebuild_request_error, (type(self), str(self), self.param))


def _rebuild_request_error(
    kind: type[RequestError], message: str, param: str | None
) -> RequestError:
    return kind(message, param=param)


class PromptTooLongError(RequestError):
    """The prompt, or the prompt plus `max_tokens`, does not fit the context."""


class InterruptedRequestError(PagemillError, RuntimeError):
    """A request was ended before it was finished, by whoever runs the engine; the message says why."""


class EngineDeadError(PagemillError, RuntimeError):
    """The engine is gone; the message carries the reason it gave, if it could."""


def words_of(error: BaseException) -> str:
    """Return an exception's type and text; of one whose text cannot be made, the type alone."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # a caller's own class may do anything in __str__
        return type(error).__name__


# How torch, the C++ library, the loader of libraries and Python's threads say that there is no memory.
_REFUSALS = (
    "can't allocate memory", "cannot allocate memory", "bad_alloc", "failed to map segment",
    "can't start new thread",
)  # fmt: skip


def is_refusal(error: BaseException) -> bool:
    """Return whether an error says that the system refused memory."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    words = str(error).lower()
    return any(sign in words for sign in _REFUSALS)
