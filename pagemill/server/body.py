"""Reads a request's body: size limit, content type, JSON. Errors are 400 or 413, never 422."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from pagemill.server.errors import ApiError

_JSON_TYPES = ("", "application/json")


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """Return the body as a dict. Raises ApiError for everything that is no JSON object."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind not in _JSON_TYPES and not kind.endswith("+json"):
        raise ApiError(
            f"content type {kind!r} is not read here; send application/json",
            code="unsupported_content_type",
        )
    raw = await _read(request, max_bytes)
    try:
        # Strictly UTF-8: json itself would guess other encodings and let half characters pass.
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ApiError(f"the body is not valid JSON: {error.msg} at {where}") from None
    except RecursionError:
        raise ApiError("the body is not valid JSON: it is nested too deeply") from None
    except ValueError as error:  # numbers of more digits than Python converts
        raise ApiError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(f"the body must be a JSON object, not a {type(value).__name__}")
    if b"\\u" in raw:
        _refuse_half_characters(value)
    return value


def _refuse_half_characters(value: dict[str, Any]) -> None:
    """Refuse an escaped surrogate without its other half: no tokenizer and no answer can hold it."""
    for name, field in value.items():
        try:
            json.dumps([name, field], ensure_ascii=False).encode()
        except RecursionError:
            raise ApiError("the body is not valid JSON: it is nested too deeply") from None
        except UnicodeEncodeError:
            shown = name.encode(errors="replace").decode()
            raise ApiError(
                f"{shown} holds half a character (a lone surrogate escape)", param=shown
            ) from None


async def _read(request: Request, max_bytes: int) -> bytes:
    told = request.headers.get("content-length", "")
    if told.isdigit() and int(told) > max_bytes:
        raise _too_large(int(told), max_bytes)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise _too_large(size, max_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(size: int, max_bytes: int) -> ApiError:
    return ApiError(
        f"the body has {size} bytes or more; the limit is {max_bytes} (--max-body-bytes)",
        status=413,
        code="request_too_large",
    )
