"""The first half of a step: a plan becomes blocks, counts, and the message to the ranks.

The order matters: all found prefixes are claimed, then victims are freed, then blocks are taken. So a commit
never costs more than its plan, and neither a victim on its way to the host tier nor a new block takes what a
plan found there. Called by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable

from pagemill.core.block_manager import HOLE
from pagemill.core.planner import PlannedSequence, StepPlan
from pagemill.core.prefix_cache import NO_HITS
from pagemill.core.roster import Roster
from pagemill.core.sequence import Sequence, SequenceStatus
from pagemill.messages import (
    BlockMoves,
    IgnoredRequest,
    NewSequence,
    PrefixLookups,
    ScheduledSequence,
    SchedulerOutput,
)


class StepCommit:
    """Commits plans to one roster; numbers the steps. `clock` gives seconds of `time.monotonic`."""

    def __init__(self, roster: Roster, clock: Callable[[], float]) -> None:
        self._roster = roster
        self._blocks = roster.blocks
        self._clock = clock
        self._num_steps = 0

    def commit(self, plan: StepPlan, ignored: tuple[IgnoredRequest, ...]) -> SchedulerOutput:
        """Carry out a plan; return the step, which also answers what was `ignored`."""
        self._blocks.begin_step()
        lookups = self._claim_prefixes(plan)
        self._blocks.save_prefixes()
        num_swapped = sum([self._roster.preempt(victim) for victim in plan.preempted])
        if plan.passed:
            running = SequenceStatus.RUNNING
            num_admitted = sum(p.sequence.status is not running for p in plan.scheduled)
            for passed in plan.passed:
                passed.num_passes += num_admitted
        now = self._clock()
        scheduled: list[ScheduledSequence] = []
        new: list[NewSequence] = []
        for planned in plan.scheduled:
            sequence = planned.sequence
            if sequence.status is not SequenceStatus.RUNNING:
                self._roster.seat(sequence)
            if sequence.first_scheduled_time is None:
                sequence.first_scheduled_time = now
            scheduled.append(self._schedule(planned, new))
        output = SchedulerOutput(
            step_id=self._num_steps,
            scheduled=tuple(scheduled),
            new_sequences=tuple(new),
            removed_seq_ids=self._roster.take_removed(),
            block_moves=self._blocks.take_moves(),
            ignored=ignored,
            num_preempted=len(plan.preempted),
            num_swapped_out=num_swapped,
            prefix_lookups=lookups,
            queues=self._roster.queue_sizes(),
        )
        self._num_steps += 1
        return output

    def last(self) -> SchedulerOutput:
        """Return a step that computes nothing, and keeps what a tier that lasts does not have yet."""
        self._blocks.save_prefixes()
        output = SchedulerOutput(
            step_id=self._num_steps, scheduled=(), block_moves=self._blocks.take_moves()
        )
        self._num_steps += 1
        return output

    def forget(self) -> SchedulerOutput | None:
        """Empty the prefix cache; return the step that empties a tier which lasts.

        It computes and moves nothing, and is to be run at once: until then the prefixes are found after a
        restart.
        """
        if not self._roster.forget_prefixes():
            return None
        moves = BlockMoves(forgets_host=True)
        output = SchedulerOutput(step_id=self._num_steps, scheduled=(), block_moves=moves)
        self._num_steps += 1
        return output

    def _claim_prefixes(self, plan: StepPlan) -> PrefixLookups:
        """Hold all that the plan found; return the tokens looked up and found, first admissions only."""
        num_queried = num_hits = num_host_hits = 0
        for planned in plan.scheduled:
            sequence = planned.sequence
            if planned.hits is not NO_HITS:
                self._blocks.claim(planned.hits)
            if sequence.first_scheduled_time is None and sequence.block_names:
                sequence.num_cached_tokens = planned.hits.num_tokens
                num_queried += sequence.num_tokens
                num_hits += planned.hits.num_tokens
                num_host_hits += self._blocks.num_host_tokens(planned.hits)
        return PrefixLookups(num_queried, num_hits, num_host_hits)

    def _schedule(self, planned: PlannedSequence, new: list[NewSequence]) -> ScheduledSequence:
        """Commit one share: blocks and counts. Appends to `new`."""
        sequence = planned.sequence
        if planned.hits is not NO_HITS and planned.hits:
            self._blocks.begin(sequence, planned.hits)
            sequence.num_computed = planned.hits.num_tokens
        num_computed = sequence.num_computed
        end = num_computed + planned.num_tokens
        change = self._blocks.extend(sequence.seq_id, num_computed, end + planned.num_drafts)
        self._blocks.seal(sequence, num_computed, end)
        start, block_ids = change.start, change.block_ids
        more: tuple[tuple[int, tuple[int, ...]], ...] = ()
        if change.more:
            more = tuple([(other.start, other.block_ids) for other in change.more])
        if not sequence.has_row:
            sequence.has_row = True
            new.append(sequence.as_new())
            whole = [(0, _for_ranks(table)) for table in self._blocks.tables(sequence.seq_id)]
            (start, block_ids), more = whole[0], tuple(whole[1:])
        sequence.num_scheduled = planned.num_tokens
        self._roster.note_computed(sequence, num_computed, end)
        num_samples = 0
        group = sequence.group
        request = group.request
        if end == sequence.num_tokens and request.max_tokens > 0:
            num_samples = 1 if group.is_forked else request.num_samples
        return ScheduledSequence(
            seq_id=sequence.seq_id,
            num_computed=num_computed,
            num_tokens=planned.num_tokens,
            block_start=start,
            block_ids=block_ids,
            num_samples=num_samples,
            prompt_logprobs_from=(
                None if request.sampling.prompt_logprobs is None else _owed_from(sequence, end)
            ),
            num_drafts=planned.num_drafts,
            more_blocks=more,
        )


def _for_ranks(table: list[int]) -> tuple[int, ...]:
    """Return a table for a new row; where nobody looks any more stands block 0."""
    if not table or table[0] != HOLE:  # holes are in front
        return tuple(table)
    return tuple([0 if block == HOLE else block for block in table])


def _owed_from(sequence: Sequence, end: int) -> int | None:
    """Return the first prompt position to be scored when a step computes up to `end`; None: none.

    The step's logits, at positions [num_computed, end), score the positions after them; prompt
    positions are 1..num_prompt_tokens-1, and those delivered before a preemption are not owed again.
    """
    first = max(sequence.num_computed + 1, sequence.next_prompt_score)
    return first if first <= min(end, sequence.num_prompt_tokens - 1) else None
