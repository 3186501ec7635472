"""What surrounds every route: API keys, one log line a request, errors in one shape."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagemill.log import get_logger
from pagemill.server.errors import ApiError, to_api_error
from pagemill.server.streaming import CLIENT_CLOSED, closed_response

logger = get_logger(__name__)

# What a load balancer and a scraper ask carries no key.
OPEN_PATHS = ("/health", "/ready", "/version", "/metrics")

_API_KEY = "pagemill.api_key"  # of the scope: the key that the request carried

Endpoint = Callable[[Request], Awaitable[Response]]


def api_key_of(request: Request) -> str | None:
    """Return the key that a request was let in with; None where no key is asked for."""
    key: str | None = request.scope.get(_API_KEY)
    return key


def answer_errors(route: Route) -> Route:
    """Return the route with an endpoint that turns exceptions into error responses."""
    inner: Endpoint = route.endpoint

    async def endpoint(request: Request) -> Response:
        try:
            return await inner(request)
        except ClientDisconnect:  # before the body was complete
            return closed_response()
        except Exception as error:
            return to_api_error(error).response()

    methods = sorted((route.methods or set()) - {"HEAD"})
    return Route(route.path, endpoint, methods=methods, name=route.name)


class ApiKeys:
    """Asks for one of the keys, as `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        is_open = (
            scope["type"] != "http" or scope["method"] == "OPTIONS" or _path(scope) in OPEN_PATHS
        )
        key = self._known(Headers(scope=scope).get("authorization", ""))
        if is_open or key is not None:
            scope[_API_KEY] = key
            await self._app(scope, receive, send)
            return
        refusal = ApiError(
            "the API key is missing or wrong; send the header 'Authorization: Bearer KEY'",
            status=401,
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal.response()(scope, receive, send)

    def _known(self, header: str) -> str | None:
        """Return the key that a header carries, if it is one of ours."""
        kind, _, key = header.partition(" ")
        said = key.strip().encode()
        # Every key is compared, in constant time each: the answer's time tells nothing.
        matches = [hmac.compare_digest(said, known) for known in self._keys]
        return said.decode() if kind.lower() == "bearer" and any(matches) else None


class RequestLog:
    """Logs one line a request when it is over; a client that left shows as 499.

    What machines ask every few seconds (`OPEN_PATHS`) shows at the level DEBUG only.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request and log its outcome."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
        status = CLIENT_CLOSED
        complete = False

        async def watched(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body", False):
                complete = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            client = scope.get("client")
            path = _path(scope)
            logger.log(
                logging.DEBUG if path in OPEN_PATHS else logging.INFO,
                "%s %s %s %d %.3f s",
                client[0] if client else "-",
                scope["method"],
                quote(path),  # as on the wire: no line breaks, no control characters
                status if complete else CLIENT_CLOSED,
                time.monotonic() - start,
            )


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if root and path.startswith(root) else path
