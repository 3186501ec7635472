"""What a step adds to the statistics, and the line in the log.

`engine.engine_core` makes a `StepStats` of what it knows; `engine.output_processor` counts tokens, times and
ends in a `StepCounts` and adds them. Each started request ends in exactly one `FinishedStats`, however it
ends, so counters are true when requests are aborted. Prometheus: `engine.prometheus`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Protocol

from pagemill.log import get_logger
from pagemill.messages import (
    NO_DRAFTS,
    DraftCounts,
    FinishedStats,
    LostMoves,
    QueueSizes,
    SchedulerOutput,
    StepOutput,
    StepStats,
)
from pagemill.outputs import RequestMetrics

logger = get_logger(__name__)


class StatLogger(Protocol):
    """Takes the statistics of each step, in the caller's process."""

    def record(self, stats: StepStats) -> None:
        """Take one step's statistics."""
        ...


@dataclass(slots=True)
class StepCounts:
    """What one step, or one abort between steps, has added so far."""

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    time_to_first_token_s: list[float] = field(default_factory=list)
    inter_token_latency_s: list[float] = field(default_factory=list)
    finished: list[FinishedStats] = field(default_factory=list)
    expired: list[str] = field(default_factory=list)  # deadlines that passed: "start" | "end"

    def added_to(self, stats: StepStats, timings_s: dict[str, float]) -> StepStats:
        """Return the statistics of a step with what was counted here."""
        return replace(
            stats,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generation_tokens=self.num_generation_tokens,
            time_to_first_token_s=tuple(self.time_to_first_token_s),
            inter_token_latency_s=tuple(self.inter_token_latency_s),
            finished=tuple(self.finished),
            expired=tuple(self.expired),
            timings_s=stats.timings_s | timings_s,
        )


def step_stats(
    queues: QueueSizes,
    kv_cache_usage: float,
    host_tier_usage: float,
    *,
    step: SchedulerOutput | None = None,
    lost: LostMoves | None = None,
    drafts: DraftCounts = NO_DRAFTS,
    timings_s: dict[str, float] | None = None,
) -> StepStats:
    """Return what the scheduler and the ranks know of a step, or of what was done between steps.

    `lost`: the moves of the step that could not be done.
    """
    step = step or SchedulerOutput(step_id=-1, scheduled=())
    moves = step.block_moves
    failed = frozenset(
        () if lost is None else lost.slots
    )  # no slot is written and read in one step
    num_unwritten = sum([move.slot in failed for move in moves.swap_out]) if failed else 0
    num_unread = sum([move.slot in failed for move in moves.swap_in]) if failed else 0
    return StepStats(
        queues=queues,
        kv_cache_usage=kv_cache_usage,
        num_preempted=step.num_preempted,
        num_swapped_out=step.num_swapped_out,
        prefix_lookups=step.prefix_lookups,
        num_blocks_out=len(moves.swap_out) - num_unwritten,
        num_blocks_in=len(moves.swap_in) - num_unread,
        num_blocks_unwritten=num_unwritten,
        num_blocks_unread=num_unread,
        num_blocks_copied=len(moves.copies),
        host_tier_usage=host_tier_usage,
        iteration_tokens=step.num_tokens + drafts.num_drafted,
        drafts=drafts,
        timings_s=timings_s or {},
    )


def count_drafts(result: StepOutput) -> DraftCounts:
    """Return what the drafts of a step came to."""
    drafted = [output for output in result.sequences if output.num_drafted]
    if not drafted:
        return NO_DRAFTS
    accepted = [0] * max(output.num_drafted for output in drafted)
    for output in drafted:
        run = output.tokens[0] if output.tokens else ()
        for place in range(len(run) - 1):
            accepted[place] += 1
    return DraftCounts(len(drafted), sum(output.num_drafted for output in drafted), tuple(accepted))


def finished_stats(
    metrics: RequestMetrics, finish_reason: str, num_prompt_tokens: int, token_counts: list[int]
) -> FinishedStats:
    """Return one ended request's numbers; `token_counts` has the generated tokens of each sample."""
    assert metrics.finished_time is not None
    scheduled, first = metrics.first_scheduled_time, metrics.first_token_time
    last = metrics.last_token_time
    decode_s = None if first is None or last is None else last - first
    longest = max(token_counts, default=0)
    per_token = decode_s / (longest - 1) if decode_s is not None and longest > 1 else None
    return FinishedStats(
        finish_reason=finish_reason,
        num_prompt_tokens=num_prompt_tokens,
        num_generation_tokens=sum(token_counts),
        e2e_s=metrics.finished_time - metrics.queued_time,
        queue_s=None if scheduled is None else scheduled - metrics.queued_time,
        prefill_s=None if first is None or scheduled is None else first - scheduled,
        decode_s=decode_s,
        time_per_output_token_s=per_token,
    )


class LoggingStatLogger:
    """Writes one line each interval while work is being done, and none while there is none."""

    def __init__(
        self, interval_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._since: float | None = None  # None: no work since the last line
        self._num_prompt = 0
        self._num_generation = 0
        self._num_queried = 0
        self._num_hits = 0
        self._drafts = NO_DRAFTS

    def record(self, stats: StepStats) -> None:
        """Add a step; log when the interval is over."""
        now = self._clock()
        if self._since is None or (
            # A pause is no work: the rates of what follows it are taken from its end.
            self._num_prompt == self._num_generation == 0 and now - self._since > self._interval_s
        ):
            self._since = now
        self._num_prompt += stats.num_prompt_tokens
        self._num_generation += stats.num_generation_tokens
        self._num_queried += stats.prefix_lookups.num_queried
        self._num_hits += stats.prefix_lookups.num_hits
        self._drafts = _added(self._drafts, stats.drafts)
        elapsed = now - self._since
        if elapsed < self._interval_s or elapsed <= 0:
            return
        queues = stats.queues
        logger.info(
            "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, swapped %d, waiting %d, "
            "KV cache in use %.1f%%, prefix hits %.1f%%%s",
            self._num_prompt / elapsed,
            self._num_generation / elapsed,
            queues.running,
            queues.swapped,
            queues.waiting,
            100.0 * stats.kv_cache_usage,
            100.0 * self._num_hits / max(1, self._num_queried),
            _draft_text(self._drafts),
        )
        self._since = now
        self._num_prompt = self._num_generation = 0
        self._num_queried = self._num_hits = 0
        self._drafts = NO_DRAFTS


def _added(one: DraftCounts, other: DraftCounts) -> DraftCounts:
    accepted = zip_longest(one.accepted, other.accepted, fillvalue=0)
    return DraftCounts(
        one.num_drafts + other.num_drafts,
        one.num_drafted + other.num_drafted,
        tuple(a + b for a, b in accepted),
    )


def _draft_text(drafts: DraftCounts) -> str:
    """Return the end of the line; an interval without drafts has none."""
    if not drafts.num_drafts:
        return ""
    accepted = drafts.num_accepted
    return (
        f", drafts accepted {100.0 * accepted / drafts.num_drafted:.1f}% of {drafts.num_drafted} "
        f"tokens, {1 + accepted / drafts.num_drafts:.2f} tokens a step with one"
    )
