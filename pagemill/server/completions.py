"""POST /v1/completions: several prompts in one request, echo, logprobs, streamed or whole.

Choice j of prompt i has the index i * n + j.
"""

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
from pagemill.server.logprobs import (
    TextOffsets,
    completion_logprobs,
    prompt_logprobs_object,
)
from pagemill.server.middleware import api_key_of
from pagemill.server.protocol import CompletionRequest, read_completion
from pagemill.server.serving import Prompt, Serving, check_outcome
from pagemill.server.streaming import (
    EventStream,
    closed_response,
    event,
    merge,
    until_disconnect,
)
from pagemill.server.usage import Usage
from pagemill.tokenizer.base import Tokenizer


def routes(serving: Serving) -> list[Route]:
    """Return the routes of this file."""

    async def completions(request: Request) -> Response:
        body = read_completion(await serving.body(request), serving.defaults)
        serving.check_model(body.model)
        add = body.add_special_tokens
        prompts = [await serving.prompt(p, add_special_tokens=add) for p in body.prompts]
        answer = _Answer(serving, body, prompts)
        await answer.prepare(api_key_of(request))
        if body.stream is not None:
            return EventStream(answer.events())
        whole = await until_disconnect(request, answer.whole())
        return closed_response() if whole is None else JSONResponse(whole)

    return [Route("/v1/completions", completions, methods=["POST"])]


class _Choice:
    """What a streamed choice has said so far."""

    def __init__(self, offsets: TextOffsets) -> None:
        self.offsets = offsets
        self.has_echoed = False


class _Answer:
    """The answer to one request, in the making."""

    def __init__(self, serving: Serving, body: CompletionRequest, prompts: list[Prompt]) -> None:
        self._serving = serving
        self._body = body
        self._prompts = prompts
        self._tokenizer: Tokenizer | None = serving.tokenizer
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._choices: dict[int, _Choice] = {}
        self._requests: list[EngineRequest] = []
        self._usage = Usage([])

    async def prepare(self, api_key: str | None) -> None:
        """Check every prompt before any is queued."""
        body = self._body
        for i, prompt in enumerate(self._prompts):
            name = f"{self._id}-{i}"
            request = await self._serving.prepare(name, prompt, body, api_key)
            self._requests.append(request)
        self._usage = Usage(self._requests)

    async def whole(self) -> dict[str, Any]:
        """Return the response object, when every choice has ended."""
        finals: dict[int, RequestOutput] = {}
        async with aclosing(merge(self._streams())) as outputs:
            async for index, output in outputs:
                finals[index] = output
        choices = []
        for index, output in sorted(finals.items()):
            check_outcome(output)
            self._usage.note(output)
            choices += [self._choice(index, output, choice) for choice in output.outputs]
        return {**self._head(), "choices": choices, "usage": self._usage.as_object()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of a stream."""
        options = self._body.stream
        assert options is not None
        usage: dict[str, Any] = {"usage": None} if options.include_usage else {}
        async with aclosing(merge(self._streams())) as outputs:
            async for index, output in outputs:
                check_outcome(output)
                self._usage.note(output)
                if options.continuous_usage:
                    usage = {"usage": self._usage.as_object()}
                for choice in output.outputs:
                    chunk = self._choice(index, output, choice)
                    if _says_something(chunk):
                        yield event({**self._head(), "choices": [chunk], **usage})
        if options.include_usage:
            yield event({**self._head(), "choices": [], "usage": self._usage.as_object()})

    def _streams(self) -> list[AsyncGenerator[RequestOutput, None]]:
        return [self._serving.stream(request) for request in self._requests]

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._serving.model_name,
        }

    def _choice(
        self, prompt_index: int, output: RequestOutput, choice: CompletionOutput
    ) -> dict[str, Any]:
        """Return a choice: all of it, or what is new, its echo included."""
        body = self._body
        index = prompt_index * body.params.n + choice.index
        state = self._choices.get(index)
        if state is None:
            skip = body.params.skip_special_tokens
            offsets = TextOffsets(self._tokenizer, skip_special_tokens=skip)
            state = self._choices[index] = _Choice(offsets)
        echoes = body.echo and not state.has_echoed
        state.has_echoed = True
        made: dict[str, Any] = {
            "index": index,
            "text": (self._prompt_text(prompt_index, output) if echoes else "") + choice.text,
            "logprobs": self._logprobs(output, choice, state, echoes=echoes),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if choice.finish_reason is not None:
            made["seed"] = choice.seed
        asked = body.params.prompt_logprobs
        if body.stream is None and asked is not None and not body.echo:
            entries = output.prompt_logprobs or []
            made["prompt_logprobs"] = prompt_logprobs_object(
                entries, output.prompt_token_ids, asked
            )
        if body.return_token_ids:
            made["token_ids"] = choice.token_ids
            if body.stream is None or echoes:
                made["prompt_token_ids"] = output.prompt_token_ids
        return made

    def _prompt_text(self, prompt_index: int, output: RequestOutput) -> str:
        """Return the text that echo repeats: the client's own, or that of the ids that were used."""
        prompt = self._prompts[prompt_index]
        if prompt.text is not None and not output.num_truncated_prompt_tokens:
            return prompt.text
        if self._tokenizer is None:
            return ""
        known = [t for t in output.prompt_token_ids if t < self._tokenizer.vocab_size]
        skip = self._body.params.skip_special_tokens
        return self._tokenizer.decode(known, skip_special_tokens=skip)

    def _logprobs(
        self, output: RequestOutput, choice: CompletionOutput, state: _Choice, *, echoes: bool
    ) -> dict[str, Any] | None:
        num_top = self._body.params.logprobs
        if num_top is None:
            return None
        token_ids, entries = list(choice.token_ids), list(choice.logprobs or [])
        prompt_entries = output.prompt_logprobs if echoes else None
        if prompt_entries is not None:
            token_ids = output.prompt_token_ids + token_ids
            return completion_logprobs(
                token_ids, [*prompt_entries, *entries], self._tokenizer, state.offsets, num_top
            )
        if not token_ids:
            return None if self._body.stream is not None else _no_logprobs()
        return completion_logprobs(token_ids, entries, self._tokenizer, state.offsets, num_top)


def _no_logprobs() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _says_something(chunk: dict[str, Any]) -> bool:
    """Return whether a chunk is worth sending: held-back text makes empty ones."""
    return bool(
        chunk["text"]
        or chunk["logprobs"] is not None
        or chunk["finish_reason"] is not None
        or chunk.get("token_ids")
    )
