"""What the server needs of an engine: the part of `AsyncLLMEngine` that it calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from pagemill.beam_search_params import BeamSearchParams
from pagemill.config import EngineConfig
from pagemill.engine.input_processor import LengthRule
from pagemill.engine.stats import StatLogger
from pagemill.messages import PLAIN_TERMS, EngineRequest, ServiceTerms
from pagemill.outputs import RequestOutput
from pagemill.sampling_params import SamplingParams
from pagemill.tokenizer.base import Tokenizer


class EngineClient(Protocol):
    """An engine that may live in another process."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer; with skip_tokenizer_init there is none to ask for."""
        ...

    @property
    def stat_loggers(self) -> Sequence[StatLogger]:
        """Return who takes the statistics in this process."""
        ...

    async def prepare(
        self,
        prompt: Any,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        *,
        terms: ServiceTerms = PLAIN_TERMS,
        length_rule: LengthRule = LengthRule.CLAMP,
    ) -> EngineRequest:
        """Check a request without queueing it; raises RequestError."""
        ...

    def stream(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        """Queue a prepared request and yield its outputs; closing the generator aborts it."""
        ...

    async def check_health(self) -> None:
        """Raise EngineDeadError when the engine is gone."""
        ...

    def interrupt(self, reason: str) -> None:
        """End every request; their streams raise InterruptedRequestError with the reason."""
        ...

    def kill(self) -> None:
        """End the engine at once, whatever it does just now; `shutdown` is still to be called."""
        ...

    def shutdown(self) -> None:
        """End the engine; calling it twice is harmless."""
        ...
