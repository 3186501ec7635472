"""The engine for asyncio programs and for the server: many streams over one engine.

The core of the engine runs in a thread or in a process of its own (`home`); this object checks requests,
hands them over, makes text of the tokens that come back, and gives each caller an async generator of its
outputs. Text is made in a thread of the home's, while the core goes on with the next step; a stop string is
told to the core when it is found. It imports no torch: with `home="process"` neither does the process it
lives in.

The core knows a request by a key that is used once, so a request_id may come again as soon as its stream has
ended, whatever the core still has to say of the one before.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, TypeVar

from pagemill.beam_search_params import BeamSearchParams
from pagemill.config import IN_PROCESS, EngineConfig
from pagemill.engine.engine_loop import (
    Abort,
    EngineDead,
    EngineHome,
    Finish,
    FromEngine,
    ResetPrefixCache,
    StepNews,
)
from pagemill.engine.input_processor import InputProcessor, LengthRule
from pagemill.engine.mailbox import Item, Mailbox
from pagemill.engine.output_processor import OutputProcessor
from pagemill.engine.stat_loggers import make_stat_loggers
from pagemill.engine.stats import StatLogger
from pagemill.engine_args import EngineArgs
from pagemill.errors import (
    EngineDeadError,
    InterruptedRequestError,
    NotSupportedError,
    PagemillError,
    RequestError,
    words_of,
)
from pagemill.executor.base import MemoryPlan
from pagemill.log import get_logger, setup_logging
from pagemill.messages import PLAIN_TERMS, EngineRequest, ServiceTerms
from pagemill.outputs import RequestOutput
from pagemill.registry import Registry
from pagemill.sampling_params import SamplingParams
from pagemill.tokenizer.base import Tokenizer

logger = get_logger(__name__)

A = TypeVar("A", bound="AsyncLLMEngine")
HomeMaker = Callable[[EngineArgs], tuple[EngineHome, Tokenizer | None]]

# Where an engine can live. A home is made, loaded, from engine arguments.
HOMES: Registry[HomeMaker] = Registry(
    "engine home",
    {
        "thread": "pagemill.engine.engine_thread:make_home",
        "process": "pagemill.engine.engine_process:make_home",
    },
)
# Prompts of more characters, or token ids, are read in a thread, so that other streams do not wait.
_LONG_PROMPT = 4096


class AsyncLLMEngine:
    """Many streams over one engine."""

    def __init__(
        self,
        home: EngineHome,
        tokenizer: Tokenizer | None,
        *,
        stat_loggers: Sequence[StatLogger] | None = None,
    ) -> None:
        self._home = home
        self._tokenizer = tokenizer
        self._inputs = InputProcessor(
            home.config.model,
            home.config.scheduler,
            tokenizer,
            shares_process=home.shares_process and home.config.parallel.executor == IN_PROCESS,
        )
        if stat_loggers is None:
            stat_loggers = make_stat_loggers(home.config, home.memory_plan)
        self._stat_loggers = tuple(stat_loggers)
        self._outputs = OutputProcessor(tokenizer)
        self._streams: dict[str, Mailbox] = {}  # by key
        self._keys: dict[str, str] = {}  # by request_id, of the streams that are open
        # Callers who wait for an emptied prefix cache, in their order.
        self._resets: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[bool]]] = deque()
        self._dead: str | None = None
        self._ids = itertools.count()
        home.start(self._deliver)

    @classmethod
    def from_engine_args(
        cls: type[A],
        args: EngineArgs,
        *,
        home: str = "thread",
        stat_loggers: Sequence[StatLogger] | None = None,
    ) -> A:
        """Load the model that `args` describe and return when it is ready.

        `home` is "thread" (the engine runs in this process) or "process" (in its own). What keeps the
        engine from starting is raised here, with its own type and message, wherever it happened.
        """
        setup_logging()
        made, tokenizer = HOMES.load(home)(args)
        return cls(made, tokenizer, stat_loggers=stat_loggers)

    # ------------------------------------------------------------ requests

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        lora_request: None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        start_timeout: float | None = None,
        request_timeout: float | None = None,
        length_rule: LengthRule = LengthRule.CLAMP,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the request's outputs as `sampling_params.output_kind` says.

        A generator that is left early aborts its request and frees its blocks. Raises RequestError for
        a bad request and EngineDeadError when the engine is gone. Tenant and timeouts: see
        `LLMEngine.add_request`.
        """
        if lora_request is not None:
            raise NotSupportedError("lora_request: this version serves no LoRA adapters")
        request = await self.prepare(
            prompt,
            sampling_params,
            request_id,
            terms=ServiceTerms(
                priority=priority,
                tenant=tenant,
                start_timeout=start_timeout,
                request_timeout=request_timeout,
            ),
            length_rule=length_rule,
        )
        async with contextlib.aclosing(self.stream(request)) as outputs:
            async for output in outputs:
                yield output

    async def prepare(
        self,
        prompt: Any,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        *,
        terms: ServiceTerms = PLAIN_TERMS,
        length_rule: LengthRule = LengthRule.CLAMP,
    ) -> EngineRequest:
        """Check a request without queueing it; `stream` runs it. Raises RequestError."""
        self._raise_if_dead()
        if request_id is None:
            request_id = f"request-{next(self._ids)}"

        def process() -> EngineRequest:
            return self._inputs.process(
                request_id, prompt, sampling_params, terms=terms, length_rule=length_rule
            )

        if _length(prompt) > _LONG_PROMPT:
            return await asyncio.to_thread(process)
        return process()

    async def stream(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        """Queue a prepared request and yield its outputs; leaving early aborts it."""
        request_id = request.request_id
        self._raise_if_dead()
        if request_id in self._keys:
            raise RequestError(
                f"request_id {request_id!r} is in use by an unfinished request; choose another",
                param="request_id",
            )
        key = f"{request_id}#{next(self._ids)}"
        mailbox = self._streams[key] = Mailbox(request.params.output_kind)
        self._keys[request_id] = key
        queued = finished = False
        try:
            self._raise_if_dead()  # whoever dies from here on sees the stream
            self._outputs.add(request, time.monotonic(), key)
            self._home.send(dataclasses.replace(request, request_id=key, prompt=None))
            queued = True
            while not finished:
                news = await mailbox.take()
                if isinstance(news, PagemillError):
                    finished = True
                    raise news
                finished = news.finished
                yield news
        finally:
            del self._streams[key], self._keys[request_id]
            if queued and not finished and self._dead is None:
                self._home.send(Abort((key,)))

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests; their streams get a last output with finish_reason "abort"."""
        ids = (request_id,) if isinstance(request_id, str) else request_id
        keys = [self._keys[one] for one in ids if one in self._keys]
        if keys and self._dead is None:
            self._home.send(Abort(tuple(keys)))

    def interrupt(self, reason: str) -> None:
        """End every request: it is aborted, and its stream raises InterruptedRequestError with the reason."""
        keys = tuple(self._streams)
        self._tell_all(lambda: InterruptedRequestError(reason))
        if keys and self._dead is None:
            self._home.send(Abort(keys))

    async def reset_prefix_cache(self) -> bool:
        """Forget every computed prefix and return True: no request sent later finds one.

        It has happened when this returns, in a `kv_cache_file` too; False: that could not be emptied, and the
        log says why. Raises EngineDeadError.
        """
        self._raise_if_dead()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[bool] = loop.create_future()
        self._resets.append((loop, done))
        self._home.send(ResetPrefixCache())
        if self._dead is not None:  # of whoever dies from here on, `_die` tells
            raise self._death()
        return await done

    # ------------------------------------------------------------ news from the engine

    def _deliver(self, message: FromEngine) -> None:
        """Take a message in the home's thread: make text, and pass it on to the event loops."""
        try:
            if isinstance(message, EngineDead):
                self._die(message.reason)
            elif isinstance(message, StepNews):
                self._distribute(self._items(message))
                for reset in message.resets:
                    self._end_reset(reset)
        except BaseException as error:  # every stream is told; else all would wait for ever
            logger.exception("the outputs of the engine cannot be passed on")
            self._die(f"its outputs cannot be passed on: {words_of(error)}")

    def _items(self, message: StepNews) -> list[tuple[str, Item]]:
        """Return what the streams get, by key; tell the core what the text has ended."""
        items: list[tuple[str, Item]] = [*message.refused]
        for key, _ in message.refused:
            self._outputs.drop(key)
        for report in message.reports:
            processed = self._outputs.process(report)
            if processed.string_stops:
                self._home.send(Finish(tuple(processed.string_stops)))
            if processed.broken:
                self._home.send(Abort(tuple(processed.broken)))
            if processed.stats is not None:
                for stat_logger in self._stat_loggers:
                    stat_logger.record(processed.stats)
            items += processed.outputs
        return items

    def _distribute(self, items: list[tuple[str, Item]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[str, Mailbox, Item]]] = {}
        for key, item in items:
            mailbox = self._streams.get(key)
            if mailbox is not None:  # else it was left
                by_loop.setdefault(mailbox.loop, []).append((key, mailbox, item))
        for loop, puts in by_loop.items():
            self._put_in(loop, puts)

    def _put_in(
        self, loop: asyncio.AbstractEventLoop, puts: Sequence[tuple[str, Mailbox, Item]]
    ) -> None:
        def run() -> None:
            full = tuple([key for key, mailbox, item in puts if not mailbox.put(item)])
            if full and self._dead is None:
                logger.warning("%d streams are ended: nobody reads them", len(full))
                self._home.send(Abort(full))

        # A loop that was closed has no callers left.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(run)

    def _die(self, reason: str) -> None:
        self._dead = self._dead or reason
        self._tell_all(self._death)
        while self._resets:
            self._end_reset(self._death())

    def _end_reset(self, outcome: bool | EngineDeadError) -> None:
        loop, done = self._resets.popleft()

        def run() -> None:
            if done.done():
                return  # nobody waits any more
            if isinstance(outcome, EngineDeadError):
                done.set_exception(outcome)
            else:
                done.set_result(outcome)

        with contextlib.suppress(RuntimeError):  # a loop that was closed has no callers left
            loop.call_soon_threadsafe(run)

    def _tell_all(self, error: Callable[[], PagemillError]) -> None:
        for key, mailbox in list(self._streams.items()):
            self._put_in(mailbox.loop, [(key, mailbox, error())])

    def _death(self) -> EngineDeadError:
        return EngineDeadError(f"the engine is gone: {self._dead}; start a new one")

    # ------------------------------------------------------------ state

    @property
    def config(self) -> EngineConfig:
        """Return the settled configuration."""
        return self._home.config

    @property
    def memory_plan(self) -> MemoryPlan:
        """Return where the memory went."""
        return self._home.memory_plan

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer; an engine without one raises NotSupportedError."""
        if self._tokenizer is None:
            raise NotSupportedError("the engine was started with skip_tokenizer_init")
        return self._tokenizer

    async def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return fresh parameters with the model's sampling defaults."""
        return self._inputs.default_params()

    @property
    def stat_loggers(self) -> Sequence[StatLogger]:
        """Return who takes the statistics in this process."""
        return self._stat_loggers

    @property
    def is_running(self) -> bool:
        """Return whether requests can be served."""
        return self._dead is None

    @property
    def errored(self) -> bool:
        """Return whether the engine is gone."""
        return self._dead is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Return why the engine is gone, or None."""
        return None if self._dead is None else self._death()

    async def check_health(self) -> None:
        """Raise EngineDeadError when the engine is gone."""
        self._raise_if_dead()
        self._home.check_health()

    def kill(self) -> None:
        """End the engine at once, whatever it does just now; `shutdown` is still to be called."""
        self._die("it was killed")
        self._home.kill()

    def shutdown(self) -> None:
        """End the engine; open streams get EngineDeadError. Calling it twice is harmless."""
        self._die("it was shut down")
        self._home.close()

    def _raise_if_dead(self) -> None:
        if self._dead is not None:
            raise self._death()


def _length(prompt: Any) -> int:
    """Return about how much a prompt is to read; what is no prompt is refused elsewhere."""
    if isinstance(prompt, Mapping):
        return max((_length(value) for value in prompt.values()), default=0)
    return len(prompt) if isinstance(prompt, (str, list, tuple)) else 0
