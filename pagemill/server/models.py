"""GET /v1/models and /v1/models/{name}: what is served, and with which defaults."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pagemill.server.serving import Serving


def routes(serving: Serving) -> list[Route]:
    """Return the routes of this file."""

    def card() -> dict[str, Any]:
        model = serving.engine.config.model
        return {
            "id": serving.model_name,
            "object": "model",
            "created": serving.created,
            "owned_by": "pagemill",
            "root": model.model,
            "parent": None,
            "max_model_len": model.max_model_len,
            "default_sampling_params": model.generation_config,
        }

    async def list_models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [card()]})

    async def one_model(request: Request) -> Response:
        serving.check_model(request.path_params["name"])
        return JSONResponse(card())

    return [
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{name:path}", one_model, methods=["GET"]),
    ]
