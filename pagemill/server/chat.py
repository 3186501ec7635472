"""POST /v1/chat/completions: messages through the model's template, streamed or whole."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pagemill.messages import EngineRequest
from pagemill.outputs import CompletionOutput, RequestOutput
from pagemill.server.errors import ApiError
from pagemill.server.logprobs import chat_logprobs, prompt_logprobs_object
from pagemill.server.middleware import api_key_of
from pagemill.server.protocol import ChatRequest, read_chat
from pagemill.server.serving import Serving, check_outcome
from pagemill.server.streaming import EventStream, closed_response, event, until_disconnect
from pagemill.server.usage import Usage


def routes(serving: Serving) -> list[Route]:
    """Return the routes of this file."""

    async def chat_completions(request: Request) -> Response:
        body = read_chat(await serving.body(request), serving.defaults)
        serving.check_model(body.model)
        text = await serving.render(body.messages, body.template)
        prompt = await serving.prompt(text, add_special_tokens=body.add_special_tokens)
        name = f"chatcmpl-{uuid.uuid4().hex}"
        ready = await serving.prepare(name, prompt, body, api_key_of(request))
        answer = _Answer(serving, body, ready)
        if body.stream is not None:
            return EventStream(answer.events())
        whole = await until_disconnect(request, answer.whole())
        return closed_response() if whole is None else JSONResponse(whole)

    return [Route("/v1/chat/completions", chat_completions, methods=["POST"])]


class _Answer:
    """The answer to one request, in the making."""

    def __init__(self, serving: Serving, body: ChatRequest, request: EngineRequest) -> None:
        self._serving = serving
        self._body = body
        self._request = request
        self._tokenizer = serving.tokenizer
        self._created = int(time.time())
        self._usage = Usage([request])

    async def whole(self) -> dict[str, Any]:
        """Return the response object, when every choice has ended."""
        final: RequestOutput | None = None
        async with aclosing(self._serving.stream(self._request)) as outputs:
            async for output in outputs:
                final = output
        if final is None:
            raise ApiError("the engine gave no answer", status=500)
        check_outcome(final)
        self._usage.note(final)
        answer = {
            **self._head("chat.completion"),
            "choices": [self._choice(choice) for choice in final.outputs],
            "usage": self._usage.as_object(),
        }
        asked = self._body.params.prompt_logprobs
        if asked is not None:
            answer["prompt_logprobs"] = prompt_logprobs_object(
                final.prompt_logprobs or [], final.prompt_token_ids, asked
            )
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = final.prompt_token_ids
        return answer

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of a stream: first every choice's role, then what is new."""
        options = self._body.stream
        assert options is not None
        usage: dict[str, Any] = {"usage": None} if options.include_usage else {}
        if options.continuous_usage:
            usage = {"usage": self._usage.as_object()}
        for index in range(self._body.params.n):
            delta = {"role": "assistant", "content": ""}
            yield self._chunk([_delta_choice(index, delta)], usage)
        async with aclosing(self._serving.stream(self._request)) as outputs:
            async for output in outputs:
                check_outcome(output)
                self._usage.note(output)
                if options.continuous_usage:
                    usage = {"usage": self._usage.as_object()}
                for choice in output.outputs:
                    made = self._delta(choice)
                    if made is not None:
                        yield self._chunk([made], usage)
        if options.include_usage:
            yield self._chunk([], {"usage": self._usage.as_object()})

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._request.request_id,
            "object": kind,
            "created": self._created,
            "model": self._serving.model_name,
        }

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> bytes:
        return event({**self._head("chat.completion.chunk"), "choices": choices, **usage})

    def _choice(self, choice: CompletionOutput) -> dict[str, Any]:
        made = {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "seed": choice.seed,
        }
        if self._body.return_token_ids:
            made["token_ids"] = choice.token_ids
        return made

    def _delta(self, choice: CompletionOutput) -> dict[str, Any] | None:
        """Return what is new in a choice, or None when nothing can be shown yet."""
        logprobs = self._logprobs(choice) if choice.token_ids else None
        show_ids = self._body.return_token_ids and choice.token_ids
        ended = choice.finish_reason is not None
        if not (choice.text or logprobs or show_ids or ended):
            return None
        # A chunk without news carries no content key: the last one often has only its reason.
        made = _delta_choice(choice.index, {"content": choice.text} if choice.text else {})
        made["logprobs"] = logprobs
        made["finish_reason"] = choice.finish_reason
        if ended:
            made["stop_reason"] = choice.stop_reason
            made["seed"] = choice.seed
        if show_ids:
            made["token_ids"] = choice.token_ids
        return made

    def _logprobs(self, choice: CompletionOutput) -> dict[str, Any] | None:
        num_top = self._body.params.logprobs
        if num_top is None:
            return None
        return chat_logprobs(choice.token_ids, choice.logprobs or [], self._tokenizer, num_top)


def _delta_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
