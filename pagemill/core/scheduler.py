"""The scheduler: who computes what in each step, and what becomes of the results.

Owns the sequences, the two queues and the block tables. A step is

    schedule()   plan (pure, `planner`), then commit: blocks, queues, counts -> SchedulerOutput
    update()     append tokens, token stops, forks                           -> SequenceUpdate

and between steps requests are added, aborted, or finished by a string stop. One step is in flight at most.
Sequences are waiting or running; a queue of swapped ones would stand beside the two.

Called by `engine.llm_engine`, from one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from pagemill.config import SchedulerConfig
from pagemill.core.block_manager import BlockManager
from pagemill.core.planner import PlannedSequence, PlanView, StepLimits, StepPlan, plan_step
from pagemill.core.policies import POLICIES
from pagemill.core.sequence import Sequence, SequenceCounter, SequenceGroup, SequenceStatus
from pagemill.core.sequence_queue import SequenceQueue
from pagemill.core.stop_checker import check_tokens
from pagemill.errors import CacheTooSmallError, RequestError
from pagemill.messages import (
    BlockMoves,
    EngineRequest,
    IgnoredRequest,
    NewSequence,
    PrefixLookups,
    QueueSizes,
    ScheduledSequence,
    SchedulerOutput,
    SequenceOutput,
    SequenceUpdate,
    StepOutput,
    TokenScores,
)


class Scheduler:
    """Plans steps over one pool of blocks and keeps every sequence from arrival to end."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        caches_prefixes: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        num_needed = -(-max_model_len // block_size)
        if num_blocks < num_needed:
            raise CacheTooSmallError(
                f"one request of max_model_len={max_model_len} tokens needs {num_needed} KV blocks of "
                f"{block_size} tokens, but the cache has {num_blocks} ({num_blocks * block_size} "
                f"tokens). Lower max_model_len to {num_blocks * block_size} or raise "
                "kv_cache_memory_bytes or gpu_memory_utilization"
            )
        self._max_model_len = max_model_len
        self._clock = clock  # seconds; a simulation has its own
        self._limits = StepLimits(config.max_num_batched_tokens, config.max_num_seqs)
        self._policy = POLICIES.load(config.policy)()
        self._blocks = BlockManager(num_blocks, block_size, caches_prefixes=caches_prefixes)
        self._waiting = SequenceQueue(self._policy.admission_key)
        self._running = SequenceQueue(self._policy.admission_key)
        self._groups: dict[str, SequenceGroup] = {}  # unfinished, by request_id
        self._sequences: dict[int, Sequence] = {}  # unfinished, by seq_id
        self._seq_ids = SequenceCounter()
        self._num_added = 0
        self._num_steps = 0
        self._ignored: dict[str, tuple[EngineRequest, IgnoredRequest]] = {}  # to be answered
        self._removed: list[int] = []  # ended since the last step, rows still on the ranks
        self._in_flight: int | None = None  # step_id of the step that has no result yet

    # ------------------------------------------------------------ requests

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError when its id is taken by an unfinished one.

        A request that can never run is answered by the next `schedule` among `ignored`.
        """
        request_id = request.request_id
        if request_id in self._groups or request_id in self._ignored:
            raise RequestError(
                f"request_id {request_id!r} belongs to an unfinished request; choose another",
                param="request_id",
            )
        reason = self._why_ignored(request)
        if reason is not None:
            self._ignored[request_id] = (request, IgnoredRequest(request_id, reason))
            return
        group = SequenceGroup(request, self._num_added, request.num_samples)
        self._num_added += 1
        root = Sequence(
            seq_id=self._seq_ids.take(),
            group=group,
            sample_index=0,
            prompt_token_ids=request.prompt_token_ids,
            num_tokens=len(request.prompt_token_ids),
        )
        self._groups[request_id] = group
        self._blocks.name_blocks(root)
        self._register(root)
        self._waiting.add(root)

    def abort(self, request_id: str) -> list[SequenceUpdate]:
        """End a request; its blocks are free at once. Unknown and ended ids give an empty list."""
        if request_id in self._ignored:
            request, _ = self._ignored.pop(request_id)
            return [
                SequenceUpdate(
                    seq_id=self._seq_ids.take(),
                    request_id=request_id,
                    sample_index=index,
                    finish_reason="abort",
                )
                for index in range(request.num_samples)
            ]
        group = self._groups.get(request_id)
        return [] if group is None else self._end_group(group, "abort")

    def finish(self, seq_id: int, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence for a reason found outside (a string stop); unknown or ended: nothing."""
        sequence = self._sequences.get(seq_id)
        if sequence is not None:
            assert sequence.output_token_ids, (
                "a sequence without output has no text that could stop"
            )
            self._end(sequence, reason, stop_reason)

    def has_unfinished(self) -> bool:
        """Return whether a request is queued, running, or waits for its refusal."""
        return bool(self._groups or self._ignored)

    def num_unfinished(self) -> int:
        """Return the number of such requests."""
        return len(self._groups) + len(self._ignored)

    def queue_sizes(self) -> QueueSizes:
        """Return the number of sequences in each queue; samples not forked yet are in none."""
        return QueueSizes(running=len(self._running), waiting=len(self._waiting))

    def cache_usage(self) -> float:
        """Return the share of KV blocks in use, 0..1."""
        return self._blocks.usage

    def forget_prefixes(self) -> None:
        """Empty the prefix cache: nothing computed so far is found again."""
        self._blocks.forget_prefixes()

    def check_invariants(self) -> None:
        """Assert that blocks, queues and counts agree. For tests and `--debug`: it reads everything."""
        self._blocks.check()
        block_size = self._blocks.block_size
        queued = {s.seq_id: SequenceStatus.WAITING for s in self._waiting}
        queued.update((s.seq_id, SequenceStatus.RUNNING) for s in self._running)
        assert len(queued) == len(self._waiting) + len(self._running), "queued twice"
        assert queued.keys() == self._sequences.keys(), "queues and sequences differ"
        assert set(self._blocks.holders()) <= queued.keys(), "an ended sequence holds blocks"
        assert len(self._running) <= self._limits.max_num_seqs, "more sequences than seats"
        for sequence in self._sequences.values():
            assert sequence.status is queued[sequence.seq_id], "status and queue differ"
            end = sequence.num_computed + sequence.num_scheduled
            assert 0 <= end <= sequence.num_tokens, "more tokens computed than known"
            num_held = len(self._blocks.table(sequence.seq_id)) * block_size
            assert num_held >= end, "computed tokens without a block"
            num_named = len(sequence.block_names)
            assert num_named in (0, sequence.num_tokens // block_size), "full blocks without a name"
        for group in self._groups.values():
            hidden = 0 if group.is_forked else group.request.num_samples - 1
            assert group.num_unfinished == len(group.sequences) + hidden, "samples miscounted"

    # ------------------------------------------------------------ plan and commit

    def schedule(self) -> SchedulerOutput:
        """Plan the next step and commit it. The result of the step before must have been given."""
        assert self._in_flight is None, f"step {self._in_flight} has no result yet"
        view = PlanView(
            running=self._running,
            waiting=self._waiting,
            holders=self._waiting_holders,
            blocks=self._blocks,
        )
        return self._commit(plan_step(view, self._limits, self._policy))

    def _commit(self, plan: StepPlan) -> SchedulerOutput:
        for victim in plan.preempted:
            self._preempt(victim)
        num_admitted = sum(p.sequence.status is SequenceStatus.WAITING for p in plan.scheduled)
        for passed in plan.passed:
            passed.num_passes += num_admitted
        now = self._clock()
        scheduled: list[ScheduledSequence] = []
        new: list[NewSequence] = []
        copies: list[tuple[int, int]] = []
        lookups = PrefixLookups(*self._claim_prefixes(plan))
        for planned in plan.scheduled:
            sequence = planned.sequence
            if sequence.status is SequenceStatus.WAITING:
                self._seat(sequence)
            if sequence.first_scheduled_time is None:
                sequence.first_scheduled_time = now
            scheduled.append(self._schedule(planned, new, copies))
        output = SchedulerOutput(
            step_id=self._num_steps,
            scheduled=tuple(scheduled),
            new_sequences=tuple(new),
            removed_seq_ids=tuple(self._removed),
            block_moves=BlockMoves(tuple(copies)),
            ignored=tuple(answer for _, answer in self._ignored.values()),
            num_preempted=len(plan.preempted),
            prefix_lookups=lookups,
            queues=self.queue_sizes(),
        )
        self._removed.clear()
        self._ignored.clear()
        self._num_steps += 1
        if scheduled:
            self._in_flight = output.step_id
        return output

    def _claim_prefixes(self, plan: StepPlan) -> tuple[int, int]:
        """Hold all that the plan found; return the tokens looked up and found, first admissions only."""
        num_queried = num_hits = 0
        for planned in plan.scheduled:
            sequence = planned.sequence
            self._blocks.claim(planned.hits)
            if sequence.first_scheduled_time is None and sequence.block_names:
                sequence.num_cached_tokens = len(planned.hits) * self._blocks.block_size
                num_queried += sequence.num_tokens
                num_hits += sequence.num_cached_tokens
        return num_queried, num_hits

    def _schedule(
        self, planned: PlannedSequence, new: list[NewSequence], copies: list[tuple[int, int]]
    ) -> ScheduledSequence:
        """Commit one share: blocks and counts. Appends to `new` and `copies`."""
        sequence = planned.sequence
        if planned.hits:
            self._blocks.begin(sequence, planned.hits)
            sequence.num_computed = len(planned.hits) * self._blocks.block_size
        num_computed = sequence.num_computed
        end = num_computed + planned.num_tokens
        change = self._blocks.extend(sequence.seq_id, num_computed, end)
        self._blocks.seal(sequence, num_computed, end)
        copies.extend(change.copies)
        start, block_ids = change.start, change.block_ids
        if not sequence.has_row:
            sequence.has_row = True
            new.append(sequence.as_new())
            start, block_ids = 0, tuple(self._blocks.table(sequence.seq_id))
        sequence.num_scheduled = planned.num_tokens
        num_samples = 0
        group = sequence.group
        if end == sequence.num_tokens and group.request.max_tokens > 0:
            num_samples = 1 if group.is_forked else group.request.num_samples
        return ScheduledSequence(
            seq_id=sequence.seq_id,
            num_computed=num_computed,
            num_tokens=planned.num_tokens,
            block_start=start,
            block_ids=block_ids,
            num_samples=num_samples,
            prompt_logprobs_from=_owed_from(sequence, end),
        )

    def _seat(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        sequence.num_passes = 0
        sequence.status = SequenceStatus.RUNNING
        self._running.add(sequence)

    def _preempt(self, victim: Sequence) -> None:
        self._blocks.free(victim.seq_id)
        victim.num_computed = 0
        victim.num_preemptions += 1
        if victim.has_row:
            victim.has_row = False
            self._removed.append(victim.seq_id)
        if victim.status is SequenceStatus.RUNNING:
            self._running.remove(victim)
            victim.status = SequenceStatus.WAITING
            self._waiting.add(victim)

    def _waiting_holders(self) -> Iterable[Sequence]:
        holders = (self._sequences[seq_id] for seq_id in self._blocks.holders())
        return [s for s in holders if s.status is SequenceStatus.WAITING]

    # ------------------------------------------------------------ results

    def update(self, scheduled: SchedulerOutput, result: StepOutput) -> list[SequenceUpdate]:
        """Take a step's results in; return what is new, for the output processor.

        Results of sequences that ended since `schedule` are dropped.
        """
        assert result.step_id == scheduled.step_id, (
            f"the result of step {result.step_id} was given for step {scheduled.step_id}"
        )
        if scheduled.scheduled:
            assert self._in_flight == scheduled.step_id, (
                f"step {scheduled.step_id} is not in flight"
            )
            self._in_flight = None
        now = self._clock()
        updates: list[SequenceUpdate] = []
        for share, output in zip(scheduled.scheduled, result.sequences, strict=True):
            assert share.seq_id == output.seq_id, "results are not in the order of the step"
            sequence = self._sequences.get(share.seq_id)
            if sequence is None:
                continue
            sequence.num_computed += sequence.num_scheduled
            sequence.num_scheduled = 0
            if share.prompt_logprobs_from is not None:
                sequence.next_prompt_score = sequence.num_computed + 1
            updates.extend(self._take(sequence, share, output, now))
        return updates

    def _take(
        self, sequence: Sequence, share: ScheduledSequence, output: SequenceOutput, now: float
    ) -> list[SequenceUpdate]:
        """Take one sequence's result in."""
        group = sequence.group
        if output.error is not None:
            if not group.is_forked:  # no sample can go on without the prompt
                return self._end_group(group, "error", error=output.error)
            return [self._end(sequence, "error", error=output.error)]
        assert len(output.tokens) == share.num_samples, "not one run of tokens a sample"
        if share.num_samples == 0:
            if sequence.num_computed == sequence.num_tokens:  # max_tokens is 0
                return self._end_group(group, "length", prompt_scores=output.prompt_scores)
            if output.prompt_scores:
                return [_news(sequence, prompt_scores=output.prompt_scores)]
            return []
        forks = [] if group.is_forked else self._fork(sequence)
        group.is_forked = True
        updates = [
            self._append(sample, output, index, now)
            for index, sample in enumerate((sequence, *forks))
        ]
        for fork in forks:
            if fork.status is SequenceStatus.WAITING:
                self._seat_fork(fork)
        return updates

    def _fork(self, root: Sequence) -> list[Sequence]:
        """Make the other samples of a request whose prompt is computed; they hold its blocks."""
        forks = []
        for index in range(1, root.group.request.num_samples):
            fork = root.fork(self._seq_ids.take(), index)
            self._register(fork)
            self._blocks.fork(root.seq_id, fork.seq_id)
            self._waiting.add(fork)
            forks.append(fork)
        return forks

    def _seat_fork(self, fork: Sequence) -> None:
        """Seat a fork at once if a seat is free: it is a decode, and should not wait for prompts."""
        if len(self._running) < self._limits.max_num_seqs:
            self._seat(fork)

    def _append(
        self, sequence: Sequence, output: SequenceOutput, index: int, now: float
    ) -> SequenceUpdate:
        """Append run `index` of the output to a sequence, and end it where a token stops it."""
        run = output.tokens[index]
        assert run, "a sample without a token"
        request = sequence.group.request
        stop = check_tokens(run, len(sequence.output_token_ids), request, self._max_model_len)
        kept = run[: stop.num_kept]
        sequence.append(kept, now)
        self._blocks.name_blocks(sequence)
        scores = output.scores[index][: stop.num_kept] if output.scores else ()
        prompt_scores = output.prompt_scores if index == 0 else ()
        if stop.finish_reason is None:
            return _news(sequence, token_ids=kept, scores=scores, prompt_scores=prompt_scores)
        return self._end(
            sequence,
            stop.finish_reason,
            stop.stop_reason,
            token_ids=kept,
            scores=scores,
            prompt_scores=prompt_scores,
        )

    # ------------------------------------------------------------ ends

    def _end(
        self,
        sequence: Sequence,
        reason: str,
        stop_reason: int | str | None = None,
        *,
        token_ids: tuple[int, ...] = (),
        scores: tuple[TokenScores, ...] = (),
        prompt_scores: tuple[TokenScores, ...] = (),
        error: str | None = None,
    ) -> SequenceUpdate:
        """Take a sequence out of everything and free its blocks."""
        self._blocks.free(sequence.seq_id)
        is_running = sequence.status is SequenceStatus.RUNNING
        (self._running if is_running else self._waiting).remove(sequence)
        if sequence.has_row:
            sequence.has_row = False
            self._removed.append(sequence.seq_id)
        sequence.status = SequenceStatus.FINISHED
        sequence.num_scheduled = 0
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        group = sequence.group
        del self._sequences[sequence.seq_id]
        del group.sequences[sequence.seq_id]
        group.num_unfinished -= 1
        if group.num_unfinished == 0:
            del self._groups[group.request_id]
        return _news(
            sequence,
            token_ids=token_ids,
            scores=scores,
            prompt_scores=prompt_scores,
            error=error,
        )

    def _end_group(
        self,
        group: SequenceGroup,
        reason: str,
        *,
        prompt_scores: tuple[TokenScores, ...] = (),
        error: str | None = None,
    ) -> list[SequenceUpdate]:
        """End every unfinished sample of a request; the root's update carries `prompt_scores`."""
        if not group.is_forked:  # samples that are a number only get their end too
            root = next(iter(group.sequences.values()))
            for index in range(1, group.request.num_samples):
                fork = root.fork(self._seq_ids.take(), index)
                self._register(fork)
                self._waiting.add(fork)
            group.is_forked = True
        return [
            self._end(
                sequence,
                reason,
                prompt_scores=prompt_scores if sequence.sample_index == 0 else (),
                error=error,
            )
            for sequence in list(group.sequences.values())
        ]

    # ------------------------------------------------------------ small parts

    def _register(self, sequence: Sequence) -> None:
        self._sequences[sequence.seq_id] = sequence
        sequence.group.sequences[sequence.seq_id] = sequence

    def _why_ignored(self, request: EngineRequest) -> str | None:
        """Return why a request can never run, or None."""
        num_prompt = len(request.prompt_token_ids)
        if num_prompt == 0:
            return "the prompt has 0 tokens; give it at least one"
        limit = self._max_model_len - (request.max_tokens > 0)
        if num_prompt > limit:
            room = (
                "" if limit == self._max_model_len else ", which must leave room for one more token"
            )
            return (
                f"the prompt has {num_prompt} tokens, but max_model_len is {self._max_model_len}"
                f"{room}; shorten the prompt to at most {limit} tokens"
            )
        return None


def _owed_from(sequence: Sequence, end: int) -> int | None:
    """Return the first prompt position to be scored when a step computes up to `end`.

    The step's logits, at positions [num_computed, end), score the positions after them; prompt
    positions are 1..num_prompt_tokens-1, and those delivered before a preemption are not owed again.
    """
    if sequence.group.request.sampling.prompt_logprobs is None:
        return None
    first = max(sequence.num_computed + 1, sequence.next_prompt_score)
    return first if first <= min(end, sequence.num_prompt_tokens - 1) else None


def _news(
    sequence: Sequence,
    *,
    token_ids: tuple[int, ...] = (),
    scores: tuple[TokenScores, ...] = (),
    prompt_scores: tuple[TokenScores, ...] = (),
    error: str | None = None,
) -> SequenceUpdate:
    """Return what changed for a sequence, with its state as it is now."""
    return SequenceUpdate(
        seq_id=sequence.seq_id,
        request_id=sequence.group.request_id,
        sample_index=sequence.sample_index,
        token_ids=token_ids,
        scores=scores,
        prompt_scores=prompt_scores,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        error=error,
        num_cached_tokens=sequence.num_cached_tokens,
        num_preemptions=sequence.num_preemptions,
        first_scheduled_time=sequence.first_scheduled_time,
    )
