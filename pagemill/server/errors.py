"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
from typing import Any

from starlette.responses import JSONResponse

from pagemill.errors import (
    ConfigError,
    EngineDeadError,
    InterruptedRequestError,
    PromptTooLongError,
    RequestError,
)
from pagemill.log import get_logger

logger = get_logger(__name__)

BAD_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


class ApiError(Exception):
    """An answer that is an error. `param` is the field as the client spelled it."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """Return the JSON object of this error."""
        kind = BAD_REQUEST if self.status < 500 else SERVER_ERROR
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """Return the error as a whole response."""
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def to_api_error(error: Exception, renames: dict[str, str] | None = None) -> ApiError:
    """Translate an exception of the engine; `renames` maps SamplingParams fields to the body's.

    An exception that is nobody's input becomes a 500 and goes to the log with its traceback.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        param = (renames or {}).get(error.param or "", error.param)
        message = _renamed(str(error), error.param, param)
        too_long = isinstance(error, PromptTooLongError)
        return ApiError(message, param=param, code="context_length_exceeded" if too_long else None)
    if isinstance(error, ConfigError):
        return ApiError(str(error))
    if isinstance(error, InterruptedRequestError):
        return leaving(str(error))
    if isinstance(error, EngineDeadError):
        return ApiError(f"the engine is gone: {error}", status=503, code="engine_dead")
    logger.error("a request failed in the server", exc_info=error)
    name = type(error).__name__
    return ApiError(f"the server failed on this request ({name}); its log has more", status=500)


def leaving(message: str) -> ApiError:
    """Return the 503 of a server that is being ended."""
    headers = {"Retry-After": "1"}
    return ApiError(message, status=503, code="shutting_down", headers=headers)


def _renamed(message: str, name: str | None, shown_as: str | None) -> str:
    """Return a message that calls a field what the client calls it."""
    if name is None or shown_as is None or name == shown_as:
        return message
    renamed, count = re.subn(rf"\b{name}\b", shown_as, message)
    return renamed if count else f"{shown_as}: {message}"
