"""POST /tokenize and /detokenize: the served model's own tokenizer, over HTTP."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pagemill.sampling_params import shown
from pagemill.server.errors import ApiError
from pagemill.server.logprobs import token_text
from pagemill.server.protocol import read_detokenize, read_tokenize
from pagemill.server.serving import Serving


def routes(serving: Serving) -> list[Route]:
    """Return the routes of this file."""

    async def tokenize(request: Request) -> Response:
        body = read_tokenize(await serving.body(request))
        serving.check_model(body.model)
        text = body.prompt
        if text is None:
            assert body.messages is not None and body.template is not None
            text = await serving.render(body.messages, body.template)
        ids = await serving.encode(text, add_special_tokens=body.add_special_tokens)
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": serving.engine.config.model.max_model_len,
            "tokens": ids,
            "token_strs": None,
        }
        if body.return_token_strs:
            answer["token_strs"] = [token_text(serving.tokenizer, i) for i in ids]
        return JSONResponse(answer)

    async def detokenize(request: Request) -> Response:
        body = read_detokenize(await serving.body(request))
        serving.check_model(body.model)
        tokenizer = serving.need_tokenizer()
        tokens = body.tokens
        for token_id in (min(tokens), max(tokens)) if tokens else ():
            if not 0 <= token_id < tokenizer.vocab_size:
                raise ApiError(
                    f"tokens holds {shown(token_id)}; ids are from 0 to {tokenizer.vocab_size - 1}",
                    param="tokens",
                )
        return JSONResponse({"prompt": await serving.decode(tokens, body.skip_special_tokens)})

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]
