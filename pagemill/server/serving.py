"""`Serving`: what every route shares: the engine once it is there, the model's name, text to tokens.

Made by `launch` (or a test) and handed to each route file by `app`. The engine is attached when it is
ready; until then, and after it died, routes that need it answer 503.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from pagemill.engine.input_processor import LengthRule
from pagemill.errors import RequestError
from pagemill.messages import EngineRequest, ServiceTerms
from pagemill.outputs import RequestOutput
from pagemill.server.body import read_json
from pagemill.server.engine_client import EngineClient
from pagemill.server.errors import ApiError, leaving, to_api_error
from pagemill.server.protocol import GenerationRequest, TemplateOptions
from pagemill.server.settings import ServerArgs
from pagemill.tokenizer.base import Tokenizer

# Texts of up to this many characters, or tokens, are worked on in the event loop: a hop to a thread would
# cost more.
SHORT_TEXT = 2000


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the engine gets it; `text` is None when the client sent token ids."""

    text: str | None
    token_ids: list[int]


class Serving:
    """One served model."""

    def __init__(
        self, settings: ServerArgs, model_name: str, *, chat_template: str | None = None
    ) -> None:
        self.settings = settings
        self.model_name = model_name
        self.created = int(time.time())
        self._chat_template = chat_template
        self._engine: EngineClient | None = None
        self._failure: str | None = None
        self._closing = asyncio.Event()
        self._interrupted: str | None = None

    def attach(self, engine: EngineClient) -> None:
        """Take the engine, which is ready; it knows the name it serves under."""
        self._engine = engine
        self.model_name = engine.config.model.served_model_name

    def fail(self, reason: str) -> None:
        """Note that there is no engine any more."""
        self._failure = reason

    def close(self) -> None:
        """Finish what is being answered and take nothing new, bodies half sent included."""
        self._closing.set()

    def interrupt(self, reason: str) -> None:
        """End what is being answered, and what would begin to be, with an error that says why."""
        self._interrupted = reason
        if self._engine is not None:
            self._engine.interrupt(reason)

    @property
    def engine(self) -> EngineClient:
        """Return the engine, or raise the 503 that says why there is none."""
        if self._failure is not None:
            raise ApiError(f"the engine is gone: {self._failure}", status=503, code="engine_dead")
        if self._engine is None:
            raise ApiError(
                "the model is being loaded; try again in a moment",
                status=503,
                code="not_ready",
                headers={"Retry-After": "1"},
            )
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Return the engine's tokenizer; None with skip_tokenizer_init."""
        engine = self.engine
        return None if engine.config.model.skip_tokenizer_init else engine.tokenizer

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the sampling defaults that the model brings."""
        return self.engine.config.model.generation_config

    async def body(self, request: Request) -> dict[str, Any]:
        """Return the request's JSON object, once there is an engine to answer it."""
        reading = asyncio.create_task(read_json(request, self.settings.max_body_bytes))
        closing = asyncio.create_task(self._closing.wait())
        try:
            await asyncio.wait({reading, closing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            closing.cancel()
            if not reading.done():
                reading.cancel()
        if not reading.done():
            raise leaving("the server is leaving and takes no new requests")
        data = reading.result()
        _ = self.engine
        return data

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served; no name means the one there is."""
        if name is not None and name != self.model_name:
            raise ApiError(
                f"the model {name!r} is not served here; this server has {self.model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def need_tokenizer(self) -> Tokenizer:
        """Return the tokenizer, or raise the 400 of a server without one."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ApiError(
                "this server was started with --skip-tokenizer-init: give prompt as token ids",
                param="prompt",
            )
        return tokenizer

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""
        tokenizer = self.need_tokenizer()
        if len(text) <= SHORT_TEXT:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(
            tokenizer.encode, text, add_special_tokens=add_special_tokens
        )

    async def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """Return the text of token ids, which are in the vocabulary."""
        decode = self.need_tokenizer().decode
        if len(token_ids) <= SHORT_TEXT:
            return decode(token_ids, skip_special_tokens=skip_special_tokens)
        return await asyncio.to_thread(decode, token_ids, skip_special_tokens=skip_special_tokens)

    async def prompt(self, given: str | list[int], *, add_special_tokens: bool) -> Prompt:
        """Return a prompt's ids, and its text if it came as text."""
        if isinstance(given, str):
            return Prompt(given, await self.encode(given, add_special_tokens=add_special_tokens))
        return Prompt(None, given)

    async def render(self, messages: list[dict[str, Any]], options: TemplateOptions) -> str:
        """Return the messages as the model's template writes them."""
        tokenizer = self.need_tokenizer()
        try:
            return await asyncio.to_thread(
                tokenizer.apply_chat_template,
                messages,
                tools=options.tools,
                chat_template=options.chat_template or self._chat_template,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                **options.variables,
            )
        except RequestError as error:
            raise ApiError(str(error), param=error.param or "messages") from None

    async def prepare(
        self, request_id: str, prompt: Prompt, body: GenerationRequest, api_key: str | None
    ) -> EngineRequest:
        """Check a request without queueing it. Lengths are strict: nothing is cut unasked."""
        ready: dict[str, Any] = {"prompt_token_ids": prompt.token_ids}
        if prompt.text is not None:
            ready["prompt"] = prompt.text
        if body.cache_salt is not None:
            ready["cache_salt"] = body.cache_salt
        try:
            return await self.engine.prepare(
                ready,
                body.beams or body.params,
                request_id,
                terms=self._terms(body.terms, api_key),
                length_rule=LengthRule.STRICT,
            )
        except RequestError as error:
            raise to_api_error(error, body.renames) from None

    def _terms(self, asked: ServiceTerms, api_key: str | None) -> ServiceTerms:
        """Return what a body asks for, with the server's own timeouts where it asks for none.

        The tenant is the API key where there are several; where one key, or none, is everybody's, the
        body's `user` tells them apart.
        """
        settings = self.settings
        by_key = api_key if len(settings.api_key) > 1 else None
        return dataclasses.replace(
            asked,
            tenant=asked.tenant if by_key is None else by_key,
            start_timeout=_first(asked.start_timeout, settings.start_timeout),
            request_timeout=_first(asked.request_timeout, settings.request_timeout),
        )

    def stream(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        """Queue a prepared request and return its outputs."""
        if self._interrupted is not None:
            raise leaving(self._interrupted)
        return self.engine.stream(request)


def _first(asked: float | None, default: float | None) -> float | None:
    return default if asked is None else asked


def check_outcome(output: RequestOutput) -> None:
    """Raise the 504 of a request whose time was over, or the 500 of one that could not be finished."""
    if output.timed_out:
        raise ApiError(
            output.error or "the request's time was over", status=504, code="deadline_exceeded"
        )
    if any(choice.finish_reason == "error" for choice in output.outputs):
        raise ApiError(
            output.error or "the engine could not finish this request",
            status=500,
            code="generation_failed",
        )
