"""Sequences: one sample of a request each, with its counts, its state and its times.

The three counts are intervals over token positions (drawn in `messages`): `num_computed` tokens have
their keys and values in the cache, `num_scheduled` more are being computed by the step in flight, and
`num_tokens` are known. Where steps overlap, one of the known tokens may be a place only: the step in flight
draws it, and its id comes with that step's result (`num_pending`). There is no prefill and no decode phase: a sequence is whatever it still has to
compute, and a step that reaches `num_tokens` produces the next token.

Owned and changed by the scheduler alone; the planner and the policies read. Blocks belong to the block
manager, by `seq_id`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from pagemill.core.beam_search import BeamSearch
from pagemill.messages import EngineRequest, NewSequence

PENDING = -1  # stands for the id of a token that a step in flight is drawing


class SequenceStatus(enum.Enum):
    """Which queue holds a sequence."""

    WAITING = "waiting"  # never run, preempted, or forked with no seat free; may hold blocks
    SWAPPED = "swapped"  # preempted, and what it computed is in the host tier; holds no blocks
    RUNNING = "running"  # has a seat; keeps its blocks from step to step
    PAUSED = "paused"  # a computed beam that waits for its mates; in no queue, may hold blocks
    FINISHED = "finished"  # in no queue, holds nothing


class SequenceCounter:
    """Hands out sequence ids: one counter for the life of an engine, no id is used twice."""

    def __init__(self) -> None:
        self._next = 0

    def take(self) -> int:
        """Return the next id."""
        taken = self._next
        self._next += 1
        return taken


@dataclass(slots=True)
class DraftRecord:
    """How a sequence's drafts did lately: tokens that were compared with samples, and were right."""

    num_compared: float = 0.0
    num_right: float = 0.0
    num_idle: int = 0  # steps since it had a draft

    def take(self, num_compared: int, num_right: int, forgetting: float) -> None:
        """Count one draft; `forgetting` is the weight of those before it."""
        self.num_compared = forgetting * self.num_compared + num_compared
        self.num_right = forgetting * self.num_right + num_right
        self.num_idle = 0


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """One request and its samples.

    The root sequence (sample 0) computes the prompt; the other samples are forked from it when the
    prompt ends, and share the prompt's blocks. Until then they exist as a number only.
    """

    request: EngineRequest
    number: int  # order of arrival at the scheduler
    num_unfinished: int  # samples, those not forked yet included
    is_forked: bool = False  # the first tokens of all samples were drawn
    sequences: dict[int, Sequence] = field(default_factory=dict)  # unfinished, by seq_id
    beams: BeamSearch | None = None  # then the sequences are the running beams, not samples

    @property
    def request_id(self) -> str:
        """Return the caller's name for the request."""
        return self.request.request_id

    @property
    def is_begun(self) -> bool:
        """Return whether something was computed for the request; asked while it is unfinished."""
        return any(s.first_scheduled_time is not None for s in self.sequences.values())

    @property
    def arrival_time(self) -> float:
        """Return when the request arrived, in seconds of `time.time`."""
        return self.request.arrival_time


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request."""

    seq_id: int
    group: SequenceGroup
    sample_index: int
    prompt_token_ids: tuple[int, ...]  # one tuple, shared by all samples
    num_tokens: int  # known: prompt and output
    output_token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_scheduled: int = 0
    num_pending: int = 0  # 1: the last known token is a place, the step in flight draws it
    counted_step: int = -1  # the last step that was counted as computed before its result came
    status: SequenceStatus = SequenceStatus.WAITING
    has_row: bool = False  # the ranks hold a row for it
    next_prompt_score: int = 1  # first prompt position whose logprobs were not delivered
    # Contents of the full blocks of known tokens, see `prefix_cache`; empty where nobody asks for them.
    block_names: list[bytes] = field(default_factory=list)
    more_names: list[list[bytes]] = field(default_factory=list)  # of further kinds of layers
    # It was computed before the prefix cache was emptied, so that nobody may find it: its blocks get no names.
    is_nameless: bool = False
    num_cached_tokens: int = 0  # found in the cache when it was first admitted
    num_preemptions: int = 0
    num_served: int = 0  # leading tokens that were computed once, or found in the cache
    num_passes: int = (
        0  # others admitted before it while its blocks were missing, since its last turn
    )
    drafting: DraftRecord | None = None  # None: it has never been able to have a draft
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    # Seconds of `time.monotonic`; a forked sequence has its root's first_scheduled_time.
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Return the length of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_remaining(self) -> int:
        """Return how many known tokens are neither computed nor in flight."""
        return self.num_tokens - self.num_computed - self.num_scheduled

    @property
    def most_cached(self) -> int:
        """Return how many leading tokens may come from the cache: a step must have a row to compute.

        Logprobs of prompt tokens come from the rows before them, which are computed for that.
        """
        most = self.num_tokens - 1
        wants_scores = self.group.request.sampling.prompt_logprobs is not None
        if wants_scores and self.next_prompt_score < self.num_prompt_tokens:
            most = min(most, self.next_prompt_score - 1)
        return most

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the known tokens at positions start..stop-1."""
        num_prompt = len(self.prompt_token_ids)
        if stop <= num_prompt:
            return self.prompt_token_ids[start:stop]
        output = self.output_token_ids[max(0, start - num_prompt) : stop - num_prompt]
        return (*self.prompt_token_ids[start:], *output)

    def expect(self) -> None:
        """Count the token that the step in flight draws as known."""
        assert self.num_pending == 0, "one step draws one token"
        self.output_token_ids.append(PENDING)
        self.num_tokens += 1
        self.num_pending = 1

    @property
    def num_output(self) -> int:
        """Return how many output tokens have an id."""
        return len(self.output_token_ids) - self.num_pending

    def append(self, token_ids: tuple[int, ...], now: float) -> None:
        """Append tokens that a step made at `now` (seconds of `time.monotonic`); one may be expected."""
        if self.num_pending:
            self.output_token_ids.pop()
            self.num_tokens -= 1
            self.num_pending = 0
        self.output_token_ids.extend(token_ids)
        self.num_tokens += len(token_ids)
        if self.first_token_time is None:
            self.first_token_time = now
        self.last_token_time = now

    def fork(self, seq_id: int, sample_index: int) -> Sequence:
        """Return a sibling that has the prompt, computed as far as here, and no output."""
        return Sequence(
            seq_id=seq_id,
            group=self.group,
            sample_index=sample_index,
            prompt_token_ids=self.prompt_token_ids,
            num_tokens=self.num_prompt_tokens,
            num_computed=self.num_computed,
            # Prompt logprobs are one per request; the root delivers them.
            next_prompt_score=self.num_prompt_tokens,
            block_names=list(self.block_names),
            more_names=[list(names) for names in self.more_names],
            is_nameless=self.is_nameless,
            num_cached_tokens=self.num_cached_tokens,
            num_served=self.num_served,
            first_scheduled_time=self.first_scheduled_time,
        )

    def continue_as(self, seq_id: int, sample_index: int) -> Sequence:
        """Return a sibling that has all tokens of this one, computed as far as here."""
        sibling = self.fork(seq_id, sample_index)
        sibling.output_token_ids = list(self.output_token_ids)
        sibling.num_tokens = self.num_tokens
        sibling.num_preemptions = self.num_preemptions
        sibling.first_token_time = self.first_token_time
        return sibling

    def as_new(self) -> NewSequence:
        """Return the message that gives the ranks a row."""
        assert self.num_pending == 0, "a new row needs every token's id"
        request = self.group.request
        return NewSequence(
            seq_id=self.seq_id,
            request_id=request.request_id,
            token_ids=(*self.prompt_token_ids, *self.output_token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            sample_index=self.sample_index,
            sampling=request.sampling,
            cache_salt=request.cache_salt,
        )
