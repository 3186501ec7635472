"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from pagemill.errors import ConfigError, EngineDeadError, PromptTooLongError, RequestError
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
        message = str(error)
        if param != error.param:
            message = f"{param}: {message}"
        too_long = isinstance(error, PromptTooLongError)
        return ApiError(message, param=param, code="context_length_exceeded" if too_long else None)
    if isinstance(error, ConfigError):
        return ApiError(str(error))
    if isinstance(error, EngineDeadError):
        return ApiError(f"the engine is gone: {error}", status=503, code="engine_dead")
    logger.error("a request failed in the server", exc_info=error)
    name = type(error).__name__
    return ApiError(f"the server failed on this request ({name}); its log has more", status=500)
