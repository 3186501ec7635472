"""GET /health, /ready, /version and /metrics: what machines ask a server."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pagemill.engine.prometheus import PrometheusStatLogger
from pagemill.server.errors import ApiError
from pagemill.server.serving import Serving
from pagemill.version import __version__

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def routes(serving: Serving) -> list[Route]:
    """Return the routes of this file."""

    async def health(request: Request) -> Response:
        await serving.engine.check_health()
        return Response(status_code=200)

    async def ready(request: Request) -> Response:
        await serving.engine.check_health()
        return JSONResponse({"status": "ready", "model": serving.model_name})

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics(request: Request) -> Response:
        for stat_logger in serving.engine.stat_loggers:
            if isinstance(stat_logger, PrometheusStatLogger):
                return Response(stat_logger.render(), media_type=METRICS_TYPE)
        raise ApiError("metrics are off (--disable-log-stats)", status=404, code="metrics_off")

    return [
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
