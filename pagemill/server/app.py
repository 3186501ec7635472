"""The ASGI application: the route table, and what surrounds the routes.

A route is one new file with `routes(serving)` and one line in `ROUTE_FILES`.
"""

from __future__ import annotations

import importlib
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from pagemill.server.errors import ApiError
from pagemill.server.middleware import ApiKeys, RequestLog, answer_errors
from pagemill.server.serving import Serving

ROUTE_FILES = (
    "pagemill.server.completions",
    "pagemill.server.chat",
    "pagemill.server.tokenizing",
    "pagemill.server.models",
    "pagemill.server.probes",
)


def build_app(serving: Serving) -> Starlette:
    """Return the application over one `Serving`."""
    settings = serving.settings
    routes = [
        answer_errors(route)
        for name in ROUTE_FILES
        for route in importlib.import_module(name).routes(serving)
    ]
    middleware = [] if settings.disable_log_requests else [Middleware(RequestLog)]
    middleware.append(
        Middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    )
    if settings.api_key:
        middleware.append(Middleware(ApiKeys, keys=settings.api_key))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: _http_error},
    )
    app.router.redirect_slashes = False  # a POST to a path with a slash too many is a 404
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer an unknown path (404) or method (405) in the shape of all errors."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    messages = {
        404: f"{what}: there is no such path here",
        405: f"{what}: this path does not take {request.method}",
    }
    status = error.status_code
    headers = dict(error.headers) if error.headers else None
    code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    message = messages.get(status, error.detail)
    return ApiError(message, status=status, code=code, headers=headers).response()
