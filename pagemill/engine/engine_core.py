"""Steps without text: the scheduler and the ranks behind it. One thread calls it.

A step ends in a `StepReport` of tokens; whoever makes the text of them (`engine.output_processor`) may be the
same thread (`engine.llm_engine`), or another one or another process, so that the next step need not wait for it
(`engine.engine_loop`). Then a stop string is found while later steps run: `finish` ends its sequence, and
what came in between is nobody's. Only the stop strings of beams are found here: they say how a search goes on.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterable
from typing import NoReturn

from pagemill.config import EngineConfig
from pagemill.core.scheduler import Scheduler
from pagemill.device.host import refused_memory
from pagemill.engine.resolve import resolve_engine
from pagemill.engine.sample_text import text_with_stops
from pagemill.engine.stats import count_drafts, step_stats
from pagemill.engine_args import EngineArgs
from pagemill.errors import EngineDeadError, words_of
from pagemill.executor import EXECUTORS
from pagemill.executor.base import Executor, MemoryPlan
from pagemill.log import get_logger, setup_logging
from pagemill.messages import (
    AbortedRequest,
    EngineRequest,
    ExpiredRequest,
    IgnoredRequest,
    SchedulerOutput,
    StepOutput,
    StepReport,
    StepStats,
    StringStop,
)
from pagemill.tokenizer.base import Tokenizer

logger = get_logger(__name__)


class _Laps:
    """Seconds by part of a step; `since`: when the step before ended, if this one could have begun then."""

    def __init__(self, since: float | None) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()
        if since is not None:
            self.seconds["between"] = self._start - since

    def end(self, part: str) -> None:
        """Say that `part` ends now; the next begins."""
        now = time.perf_counter()
        self.seconds[part] = now - self._start
        self._start = now

    @property
    def last(self) -> float:
        """Return when the last part ended."""
        return self._start


class EngineCore:
    """Runs steps. After an error inside one it is dead: EngineDeadError for all."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        tokenizer: Tokenizer | None,
        *,
        counts: bool,
    ) -> None:
        """`tokenizer`: for stop strings of beams. `counts`: whether reports carry statistics."""
        plan = executor.memory_plan
        self.config = config
        self.executor = executor
        self.scheduler = Scheduler(
            config.scheduler,
            block_size=config.cache.block_size,
            num_blocks=plan.num_blocks,
            max_model_len=config.model.max_model_len,
            caches_prefixes=config.cache.enable_prefix_caching,
            speculative=config.speculative,
            host_tier=plan.host_tier,
            layout=plan.layout,
            text_of=lambda request: text_with_stops(request.params, tokenizer),
        )
        self._counts = counts
        self._overlaps = config.scheduler.async_scheduling
        self._flight: deque[SchedulerOutput] = deque()  # submitted, the oldest first: two at most
        self._collected: deque[StepOutput] = (
            deque()
        )  # results of the oldest of them, not taken in yet
        self._expired: list[ExpiredRequest] = []  # not reported yet
        self._ignored: list[IgnoredRequest] = []  # likewise
        self._ended: float | None = (
            None  # time.perf_counter() of the last step, if there is more to do
        )
        self._dead: str | None = None

    # ------------------------------------------------------------ requests

    def add(self, request: EngineRequest) -> None:
        """Queue a request that an `InputProcessor` made."""
        self.raise_if_dead()
        self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> StepReport | None:
        """End requests now and free their blocks; None when none of them was here.

        Unknown and ended ids are passed over: a request may end while its abort is on the way.
        """
        if self._dead is not None:
            return None  # whatever ran has ended with the engine
        aborted = []
        for request_id in request_ids:
            updates = self.scheduler.abort(request_id)
            if updates:
                aborted.append(AbortedRequest(request_id, tuple(updates)))
        return self._between_steps(tuple(aborted)) if aborted else None

    def finish(self, stops: Iterable[StringStop]) -> StepReport:
        """End the sequences that stop strings have ended; those that have ended by now are passed over."""
        for stop in stops:
            self.scheduler.finish(stop.seq_id, "stop", stop.stop)
        return self._between_steps(())

    def has_unfinished_requests(self) -> bool:
        """Return whether a step has something to do."""
        return bool(self._flight) or self.scheduler.has_unfinished()

    def reset_prefix_cache(self) -> bool:
        """Forget every computed prefix; running requests keep what they hold.

        Returns whether a restarted engine has forgotten them too: False where `kv_cache_file` cannot be
        written, which the log says. Raises EngineDeadError.
        """
        self.raise_if_dead()
        step = self.scheduler.forget_prefixes()
        if step is None:
            return self._has_its_tier()
        try:
            # What is in flight may still write under the old names: that is waited for, and forgotten too.
            while len(self._collected) < len(self._flight):
                self._collected.append(self._take(self._flight[len(self._collected)]))
            return self.scheduler.forgot(self.executor.execute(step))
        except BaseException as error:
            self.die(error)

    def _has_its_tier(self) -> bool:
        path, tier = self.config.cache.kv_cache_file, self.executor.memory_plan.host_tier
        if path is None or tier is not None:
            return True
        logger.warning(
            "kv_cache_file %s is not emptied: this engine could not open it and started without it. Remove "
            "it, if what it holds is to be forgotten",
            path,
        )
        return False

    # ------------------------------------------------------------ steps

    def step(self) -> StepReport:
        """Run one step and return what it came to. Raises EngineDeadError when it cannot go on."""
        self.raise_if_dead()
        try:
            return self._step()
        except BaseException as error:
            self.die(error)

    def _step(self) -> StepReport:
        laps = _Laps(self._ended)
        if not self._flight:
            self._launch()
        # Planned while the one before it computes, if the executor can do both.
        if self.scheduler.has_unfinished() and self.scheduler.may_overlap():
            self._launch()
        laps.end("schedule")
        scheduled = self._flight[0]
        result = self._collect(scheduled)
        self._flight.popleft()
        laps.end("execute")
        updates = self.scheduler.update(scheduled, result)
        laps.end("update")
        self._ended = laps.last if self.has_unfinished_requests() else None
        if self.config.observability.debug:
            self.scheduler.check_invariants()
        ignored, self._ignored = self._ignored, []
        expired, self._expired = self._expired, []
        return StepReport(
            time=time.monotonic(),
            ignored=tuple(ignored),
            updates=tuple(updates),
            expired=tuple(expired),
            stats=self._stats(scheduled, result, laps.seconds) if self._counts else None,
        )

    def _launch(self) -> None:
        """Plan a step and give it to the ranks, where it waits for its turn."""
        self._expired += self.scheduler.expire()
        scheduled = self.scheduler.schedule()
        self._ignored += scheduled.ignored
        self._flight.append(scheduled)
        if self._overlaps and not _is_idle(scheduled):
            self.executor.submit(scheduled)

    def _collect(self, scheduled: SchedulerOutput) -> StepOutput:
        return self._collected.popleft() if self._collected else self._take(scheduled)

    def _take(self, scheduled: SchedulerOutput) -> StepOutput:
        if _is_idle(scheduled):
            return StepOutput(scheduled.step_id, ())
        return self.executor.collect() if self._overlaps else self.executor.execute(scheduled)

    def _stats(
        self, scheduled: SchedulerOutput, result: StepOutput, seconds: dict[str, float]
    ) -> StepStats:
        return step_stats(
            self.scheduler.queue_sizes(),
            self.scheduler.cache_usage(),
            self.scheduler.host_tier_usage(),
            step=scheduled,
            lost=result.lost,
            drafts=count_drafts(result),
            timings_s=seconds | result.timings_s,
        )

    def _between_steps(self, aborted: tuple[AbortedRequest, ...]) -> StepReport:
        stats = None
        if self._counts:
            stats = step_stats(
                self.scheduler.queue_sizes(),
                self.scheduler.cache_usage(),
                self.scheduler.host_tier_usage(),
            )
        return StepReport(time=time.monotonic(), aborted=aborted, stats=stats)

    def settled(self, stats: StepStats) -> StepStats:
        """Return statistics with the queues and pools as they are now."""
        return dataclasses.replace(
            stats,
            queues=self.scheduler.queue_sizes(),
            kv_cache_usage=self.scheduler.cache_usage(),
            host_tier_usage=self.scheduler.host_tier_usage(),
        )

    # ------------------------------------------------------------ life

    @property
    def memory_plan(self) -> MemoryPlan:
        """Return where the memory went."""
        return self.executor.memory_plan

    @property
    def is_dead(self) -> bool:
        """Return whether no step can be run any more."""
        return self._dead is not None

    def die(self, error: BaseException) -> NoReturn:
        """Be dead of an error in a step, and raise it: an interrupt stays one.

        Half a step leaves scheduler and ranks in different states: nothing can be trusted from there on.
        """
        self._dead = words_of(error)
        if isinstance(error, Exception):
            raise EngineDeadError(f"the engine died in a step: {self._dead}") from error
        raise error

    def raise_if_dead(self) -> None:
        """Raise EngineDeadError when the engine is gone."""
        if self._dead is not None:
            raise EngineDeadError(f"the engine is gone: {self._dead}; start a new one")

    def check_health(self) -> None:
        """Raise EngineDeadError when the engine or a rank is gone."""
        self.raise_if_dead()
        self.executor.check_health()

    def shutdown(self) -> None:
        """End the ranks; calling it twice is harmless. A tier that lasts gets what it lacks first."""
        is_alive = not self._dead
        self._dead = self._dead or "it was shut down"
        try:
            if is_alive:
                self._finish_steps()
        except EngineDeadError as error:
            logger.warning("the last prefixes are not kept for the next start: %s", error)
        finally:
            self.executor.shutdown()

    def _finish_steps(self) -> None:
        """Take the results of what is in flight, and keep what a tier that lasts does not have yet."""
        while self._flight:
            scheduled = self._flight.popleft()
            self.scheduler.update(scheduled, self._collect(scheduled))
        last = self.scheduler.last_step()
        if last is not None:
            self.executor.execute(last)


def _is_idle(scheduled: SchedulerOutput) -> bool:
    """Return whether the ranks have nothing to do in a step."""
    return scheduled.is_empty and scheduled.block_moves.is_empty and not scheduled.removed_seq_ids


def load_parts(args: EngineArgs) -> tuple[EngineConfig, Executor, Tokenizer | None]:
    """Load the model that `args` describe. Raises ConfigError, CheckpointError or OutOfMemoryError."""
    setup_logging()
    with refused_memory("the engine was started"):
        config, tokenizer = resolve_engine(args)
        for note in config.notes:
            logger.info("%s", note)
        return config, EXECUTORS.load(config.parallel.executor)(config), tokenizer


def load_core(args: EngineArgs) -> tuple[EngineCore, Tokenizer | None]:
    """Return the core of the engine that `args` describe, loaded, and the tokenizer of its text."""
    config, executor, tokenizer = load_parts(args)
    core = EngineCore(config, executor, tokenizer, counts=config.observability.log_stats)
    return core, tokenizer
