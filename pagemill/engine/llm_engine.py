"""The engine: requests in, steps, outputs out. Synchronous; one thread calls it.

`step` reads as a sentence: schedule, execute, update, process. Holds the scheduler (planning), the
executor (computing) and the two processors (text). Called by `pagemill.llm`, by `engine.engine_loop`
for `AsyncLLMEngine`, and by programs that drive the steps themselves.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from pagemill.beam_search_params import BeamSearchParams
from pagemill.config import IN_PROCESS, EngineConfig
from pagemill.core.scheduler import Scheduler
from pagemill.engine.input_processor import InputProcessor
from pagemill.engine.output_processor import OutputProcessor
from pagemill.engine.resolve import resolve_engine
from pagemill.engine.stat_loggers import make_stat_loggers
from pagemill.engine.stats import StatLogger, StepCounts, count_drafts
from pagemill.engine_args import EngineArgs
from pagemill.errors import EngineDeadError, NotSupportedError, RequestError
from pagemill.executor import EXECUTORS
from pagemill.executor.base import Executor, MemoryPlan
from pagemill.log import get_logger, setup_logging
from pagemill.messages import (
    NO_DRAFTS,
    DraftCounts,
    EngineRequest,
    SchedulerOutput,
    SequenceUpdate,
    ServiceTerms,
    StepOutput,
)
from pagemill.outputs import RequestOutput
from pagemill.sampling_params import SamplingParams
from pagemill.tokenizer.base import Tokenizer

logger = get_logger(__name__)
E = TypeVar("E", bound="LLMEngine")


class _Laps:
    """Seconds by part of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    def end(self, part: str) -> None:
        """Say that `part` ends now; the next begins."""
        now = time.perf_counter()
        self.seconds[part] = now - self._start
        self._start = now


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
        plan = executor.memory_plan
        self.config = config
        self._executor = executor
        self._tokenizer = tokenizer
        self._scheduler = Scheduler(
            config.scheduler,
            block_size=config.cache.block_size,
            num_blocks=plan.num_blocks,
            max_model_len=config.model.max_model_len,
            caches_prefixes=config.cache.enable_prefix_caching,
            speculative=config.speculative,
            host_tier=plan.host_tier,
        )
        self._inputs = InputProcessor(
            config.model,
            config.scheduler,
            tokenizer,
            shares_process=config.parallel.executor == IN_PROCESS,
        )
        self._outputs = OutputProcessor(tokenizer)
        self._stat_loggers = list(stat_loggers)
        self._dead: str | None = None

    @classmethod
    def from_engine_args(
        cls: type[E], args: EngineArgs, *, stat_loggers: Sequence[StatLogger] | None = None
    ) -> E:
        """Load the model that `args` describe. Raises ConfigError or CheckpointError.

        `stat_loggers` None means those that the arguments ask for: the log line and Prometheus.
        """
        setup_logging()
        config, tokenizer = resolve_engine(args)
        for note in config.notes:
            logger.info("%s", note)
        executor = EXECUTORS.load(config.parallel.executor)(config)
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
        self._raise_if_dead()
        if request.request_id in self._outputs:
            raise RequestError(
                f"request_id {request.request_id!r} is in use by an unfinished request; choose "
                "another",
                param="request_id",
            )
        self._scheduler.add(request)
        self._outputs.add(request, time.monotonic())

    def abort_request(self, request_id: str | Iterable[str]) -> list[RequestOutput]:
        """End requests now and free their blocks; return their last outputs.

        Unknown and ended ids are passed over: a request may end while its abort is on the way.
        """
        if self._dead is not None:
            return []  # whatever ran has ended with the engine
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        counts, now = StepCounts(), time.monotonic()
        outputs = []
        for one in ids:
            self._outputs.note_times(self._scheduler.abort(one))
            output = self._outputs.end(one, "abort", now, counts)
            if output is not None:
                outputs.append(output)
        if outputs:
            self._record(counts)
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Return whether a step has something to do."""
        return self._scheduler.has_unfinished()

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests are running or waiting."""
        return self._scheduler.num_unfinished()

    def reset_prefix_cache(self) -> bool:
        """Forget every computed prefix and return True; running requests keep what they hold."""
        self._raise_if_dead()
        self._scheduler.forget_prefixes()
        return True

    # ------------------------------------------------------------ steps

    def step(self) -> list[RequestOutput]:
        """Run one step and return what it made. Raises EngineDeadError when it cannot go on."""
        self._raise_if_dead()
        try:
            return self._step()
        except BaseException as error:
            # Half a step leaves scheduler and ranks in different states: nothing can be trusted on.
            self._dead = f"{type(error).__name__}: {error}"
            if isinstance(error, Exception):
                raise EngineDeadError(f"the engine died in a step: {self._dead}") from error
            raise

    def _step(self) -> list[RequestOutput]:
        counts, laps = StepCounts(), _Laps()
        expired = self._scheduler.expire()
        scheduled = self._scheduler.schedule()
        laps.end("schedule")
        result = self._execute(scheduled)
        laps.end("execute")
        updates = self._scheduler.update(scheduled, result)
        laps.end("update")
        outputs = self._process(scheduled, updates, counts)
        outputs += self._outputs.expire(expired, time.monotonic(), counts)
        laps.end("process")
        self._record(counts, scheduled, laps.seconds | result.timings_s, count_drafts(result))
        return outputs

    def _execute(self, scheduled: SchedulerOutput) -> StepOutput:
        is_idle = scheduled.is_empty and scheduled.block_moves.is_empty
        if is_idle and not scheduled.removed_seq_ids:
            return StepOutput(scheduled.step_id, ())
        return self._executor.execute(scheduled)

    def _process(
        self, scheduled: SchedulerOutput, updates: Sequence[SequenceUpdate], counts: StepCounts
    ) -> list[RequestOutput]:
        now = time.monotonic()
        processed = self._outputs.process(updates, now, counts)
        for stop in processed.string_stops:
            self._scheduler.finish(stop.seq_id, "stop", stop.stop)
        if self.config.observability.debug:
            self._scheduler.check_invariants()
        return self._outputs.ignore(scheduled.ignored, now, counts) + processed.outputs

    def _record(
        self,
        counts: StepCounts,
        scheduled: SchedulerOutput | None = None,
        timings_s: dict[str, float] | None = None,
        drafts: DraftCounts = NO_DRAFTS,
    ) -> None:
        if not self._stat_loggers:
            return
        stats = counts.freeze(
            self._scheduler.queue_sizes(),
            self._scheduler.cache_usage(),
            scheduled=scheduled,
            drafts=drafts,
            host_tier_usage=self._scheduler.host_tier_usage(),
            timings_s=timings_s,
        )
        for stat_logger in self._stat_loggers:
            stat_logger.record(stats)

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
        return self._dead is not None

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
        self._raise_if_dead()
        self._executor.check_health()

    def shutdown(self) -> None:
        """End the ranks; calling it twice is harmless. A tier that lasts gets what it lacks first."""
        last = None if self._dead else self._scheduler.last_step()
        self._dead = self._dead or "it was shut down"
        try:
            if last is not None:
                self._executor.execute(last)
        except EngineDeadError as error:
            logger.warning("the last prefixes are not kept for the next start: %s", error)
        finally:
            self._executor.shutdown()

    def _raise_if_dead(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(f"the engine is gone: {self._dead}; start a new one")
