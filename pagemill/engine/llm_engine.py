"""The engine: requests in, steps, outputs out. Synchronous; one thread calls it.

A step is the core's (schedule, execute, update), then text. Holds the core and the two processors of text.
Called by `pagemill.llm` and by programs that drive the steps themselves.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from pagemill.beam_search_params import BeamSearchParams
from pagemill.config import IN_PROCESS, EngineConfig
from pagemill.engine.engine_core import EngineCore, load_parts
from pagemill.engine.input_processor import InputProcessor
from pagemill.engine.output_processor import OutputProcessor
from pagemill.engine.stat_loggers import make_stat_loggers
from pagemill.engine.stats import StatLogger
from pagemill.engine_args import EngineArgs
from pagemill.errors import NotSupportedError, RequestError
from pagemill.executor.base import Executor, MemoryPlan
from pagemill.messages import EngineRequest, ServiceTerms, StepReport
from pagemill.outputs import RequestOutput
from pagemill.sampling_params import SamplingParams
from pagemill.tokenizer.base import Tokenizer

E = TypeVar("E", bound="LLMEngine")


class LLMEngine:
    """Serves requests step by step. After an error inside a step it is dead: EngineDeadError for all."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        tokenizer: Tokenizer | None,
        *,
        stat_loggers: Sequence[StatLogger] = (),
    ) -> None:
        self.config = config
        self._core = EngineCore(config, executor, tokenizer, counts=bool(stat_loggers))
        self._executor = executor
        self._tokenizer = tokenizer
        self._scheduler = self._core.scheduler
        self._inputs = InputProcessor(
            config.model,
            config.scheduler,
            tokenizer,
            shares_process=config.parallel.executor == IN_PROCESS,
        )
        self._outputs = OutputProcessor(tokenizer)
        self._stat_loggers = list(stat_loggers)

    @classmethod
    def from_engine_args(
        cls: type[E], args: EngineArgs, *, stat_loggers: Sequence[StatLogger] | None = None
    ) -> E:
        """Load the model that `args` describe. Raises ConfigError or CheckpointError.

        `stat_loggers` None means those that the arguments ask for: the log line and Prometheus.
        """
        config, executor, tokenizer = load_parts(args)
        if stat_loggers is None:
            stat_loggers = make_stat_loggers(config, executor.memory_plan)
        return cls(config, executor, tokenizer, stat_loggers=stat_loggers)

    # ------------------------------------------------------------ requests

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | BeamSearchParams | None = None,
        arrival_time: float | None = None,
        lora_request: None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        start_timeout: float | None = None,
        request_timeout: float | None = None,
    ) -> None:
        """Check a request and queue it; raises RequestError before anything is queued.

        `tenant` is whose work it is (policy "fair"). A request that is not begun after `start_timeout`
        seconds, or not finished after `request_timeout` seconds, is dropped: its last output has
        finish_reason "abort", `timed_out`, and the reason in `error`.
        """
        if lora_request is not None:
            raise NotSupportedError("lora_request: this version serves no LoRA adapters")
        terms = ServiceTerms(
            priority=priority,
            tenant=tenant,
            start_timeout=start_timeout,
            request_timeout=request_timeout,
        )
        self.add_checked(
            self._inputs.process(request_id, prompt, params, arrival_time=arrival_time, terms=terms)
        )

    def add_checked(self, request: EngineRequest) -> None:
        """Queue a request that an `InputProcessor` made; a live request_id is a RequestError."""
        self._core.raise_if_dead()
        if request.request_id in self._outputs:
            raise RequestError(
                f"request_id {request.request_id!r} is in use by an unfinished request; choose "
                "another",
                param="request_id",
            )
        self._core.add(request)
        self._outputs.add(request, time.monotonic())

    def abort_request(self, request_id: str | Iterable[str]) -> list[RequestOutput]:
        """End requests now and free their blocks; return their last outputs.

        Unknown and ended ids are passed over: a request may end while its abort is on the way.
        """
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        report = self._core.abort(ids)
        return [] if report is None else self._process(report)

    def has_unfinished_requests(self) -> bool:
        """Return whether a step has something to do."""
        return self._core.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests are running or waiting."""
        return self._scheduler.num_unfinished()

    def reset_prefix_cache(self) -> bool:
        """Forget every computed prefix and return True; running requests keep what they hold.

        False: a `kv_cache_file` could not be emptied, and a restarted engine may find them. The log says why.
        """
        return self._core.reset_prefix_cache()

    # ------------------------------------------------------------ steps

    def step(self) -> list[RequestOutput]:
        """Run one step and return what it made. Raises EngineDeadError when it cannot go on."""
        report = self._core.step()
        try:
            return self._process(report)
        except BaseException as error:
            self._core.die(error)

    def _process(self, report: StepReport) -> list[RequestOutput]:
        """Make the text of a report, and tell the core what the text has ended."""
        processed = self._outputs.process(report)
        stats = processed.stats
        if processed.string_stops or processed.broken:
            self._core.finish(processed.string_stops)
            self._core.abort(processed.broken)
            stats = stats and self._core.settled(stats)
        if stats is not None:
            for stat_logger in self._stat_loggers:
                stat_logger.record(stats)
        return [output for _, output in processed.outputs]

    # ------------------------------------------------------------ state

    @property
    def input_processor(self) -> InputProcessor:
        """Return the object that checks requests."""
        return self._inputs

    @property
    def memory_plan(self) -> MemoryPlan:
        """Return where the memory went."""
        return self._executor.memory_plan

    @property
    def stat_loggers(self) -> Sequence[StatLogger]:
        """Return who takes the statistics."""
        return tuple(self._stat_loggers)

    @property
    def errored(self) -> bool:
        """Return whether the engine is dead."""
        return self._core.is_dead

    @property
    def has_no_tokenizer(self) -> bool:
        """Return whether the engine was started with skip_tokenizer_init."""
        return self._tokenizer is None

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer; an engine without one raises ConfigError."""
        if self._tokenizer is None:
            raise NotSupportedError("the engine was started with skip_tokenizer_init")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return fresh parameters with the model's sampling defaults."""
        return self._inputs.default_params()

    def check_health(self) -> None:
        """Raise EngineDeadError when the engine or a rank is gone."""
        self._core.check_health()

    def shutdown(self) -> None:
        """End the ranks; calling it twice is harmless. A tier that lasts gets what it lacks first."""
        self._core.shutdown()
