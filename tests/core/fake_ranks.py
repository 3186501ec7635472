"""A stand-in for the ranks that remembers what each block slot holds.

A slot holds the hash of a token history: that is what keys and values are a function of. Each step it
drops and adds rows, copies blocks, changes tables, writes the slots of all scheduled tokens, and then
lets every scheduled sequence read its whole context: a slot that does not hold the sequence's own history
is an error. Tokens are a function of (history, sample index, position), so that what a request gets can
be computed without any scheduler (`expected_tokens`).

Layers of several kinds write into blocks of their own, each kind something else; those with a window
read no further back than it reaches.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from pagemill.cache_layout import CacheKind, CacheLayout, plain_layout
from pagemill.core.block_manager import BlockManager
from pagemill.core.policies import POLICIES
from pagemill.core.policies.base import Key, Policy, PolicySetting, WaitingQueue
from pagemill.core.sequence import Sequence
from pagemill.core.sequence_queue import SequenceQueue
from pagemill.host_tier_plan import HostTierPlan, MoveCosts
from pagemill.messages import (
    BlockMoves,
    EngineRequest,
    LostMoves,
    NewSequence,
    RequestDeadlines,
    SamplingSpec,
    ScheduledSequence,
    SchedulerOutput,
    SequenceOutput,
    StepOutput,
    TokenScores,
)
from pagemill.sampling_params import SamplingParams

VOCAB = 1000
NO_PREFIXES = PolicySetting(BlockManager(1, 1))
EMPTY = 0


def make_request(
    request_id: str,
    prompt: tuple[int, ...] | int,
    *,
    num_samples: int = 1,
    max_tokens: int = 4,
    min_tokens: int = 0,
    eos: frozenset[int] = frozenset(),
    stop_ids: frozenset[int] = frozenset(),
    prompt_logprobs: int | None = None,
    salt: str | None = None,
    priority: int = 0,
    arrival_time: float = 0.0,
    tenant: str = "",
    deadlines: RequestDeadlines | None = None,
) -> EngineRequest:
    """Return a request; a number as prompt stands for that many different tokens."""
    if isinstance(prompt, int):
        prompt = tuple((7 * i + len(request_id)) % VOCAB for i in range(prompt))
    return EngineRequest(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=prompt,
        params=SamplingParams(),
        sampling=SamplingSpec(min_tokens=min_tokens, prompt_logprobs=prompt_logprobs),
        num_samples=num_samples,
        max_tokens=max_tokens,
        eos_token_ids=eos,
        stop_token_ids=stop_ids,
        arrival_time=arrival_time,
        priority=priority,
        tenant=tenant,
        deadlines=deadlines,
        cache_keys=() if salt is None else (("cache_salt", salt),),
    )


def extend_history(history: int, token_id: int) -> int:
    """Return the hash of a history with one more token."""
    return hash((history, token_id)) or 1


def first_history(request: EngineRequest) -> int:
    """Return the history before the first token: what the contents hang on beside the tokens."""
    return hash(request.cache_keys) if request.cache_keys else EMPTY


def content(history: int, kind: int) -> int:
    """Return what a slot of one kind of layers holds after a history."""
    return history if kind == 0 else hash((history, kind)) or 1


def draw_layout(rng: random.Random, block_size: int, max_model_len: int) -> CacheLayout:
    """Return the layout of a model with windows: in all layers, or in some, of one width or two."""

    def kind(size: int, window: int | None = None) -> CacheKind:
        return CacheKind(block_tokens=size, window=window, chunk=rng.choice([1, 2, 4]))

    def window() -> int:
        return rng.randrange(1, max(2, max_model_len // 2))

    first = kind(block_size * rng.choice([1, 2, 3]))
    kinds = rng.choice(
        [
            (kind(block_size, window()),),
            (first, kind(block_size, window())),
            (first, kind(block_size, window()), kind(2 * block_size, window())),
            (kind(block_size, window()), kind(2 * block_size, window())),
        ]
    )
    return CacheLayout(kinds, cells=6)


def draw(history: int, sample_index: int, position: int) -> int:
    """Return the token that a sample gets at a position, after a history."""
    return hash((history, sample_index, position, "draw")) % VOCAB


def expected_tokens(request: EngineRequest, sample_index: int, max_model_len: int) -> list[int]:
    """Return what a sample gets, worked out one token at a time without a scheduler."""
    history = first_history(request)
    for token in request.prompt_token_ids:
        history = extend_history(history, token)
    output: list[int] = []
    while len(output) < request.max_tokens:
        position = len(request.prompt_token_ids) + len(output)
        if position == max_model_len:
            break
        token = draw(history, sample_index, position)
        output.append(token)
        history = extend_history(history, token)
        if len(output) >= request.sampling.min_tokens and (
            token in request.eos_token_ids or token in request.stop_token_ids
        ):
            break
    return output


@dataclass
class Row:
    """What the ranks know of one sequence."""

    new: NewSequence
    token_ids: list[int]
    tables: list[list[int]]  # one a kind of layers


class Shuffled(Policy):
    """A policy in which the order of service has nothing to do with the order of arrival."""

    uses_priority = False

    def __init__(self, setting: PolicySetting) -> None:
        """Take nothing of the setting."""

    def make_queue(self) -> WaitingQueue:
        """Return a queue in a scrambled order."""
        return SequenceQueue(self.running_key)

    def running_key(self, sequence: Sequence) -> Key:
        """Return a scrambled order."""
        return (sequence.seq_id * 7919 % 101, sequence.seq_id)

    def victim_key(self, sequence: Sequence) -> Key:
        """Return another scrambled order."""
        return (sequence.seq_id * 104729 % 97, sequence.seq_id)


def tier_plan(num_slots: int, *, lasts: bool = False) -> HostTierPlan:
    """Return a host tier whose moves cost nothing beside computing."""
    costs = MoveCosts(swap_out_s=1e-6, swap_in_s=1e-6, compute_token_s=1e-3, compute_context_s=0.0)
    return HostTierPlan(num_slots=num_slots, slot_bytes=1, place="memory", costs=costs, lasts=lasts)


def policy_names() -> list[str]:
    """Return the policies to test: the registered ones, and the shuffled one, registered here."""
    if "shuffled" not in POLICIES:
        POLICIES.register("shuffled", "tests.core.fake_ranks:Shuffled")
    return list(POLICIES.names())


class FakeRanks:
    """Executes steps over a pool of remembered slots."""

    def __init__(self, num_blocks: int, block_size: int, layout: CacheLayout | None = None) -> None:
        self.kinds = (layout or plain_layout(block_size)).kinds
        self.block_size = max(kind.block_tokens for kind in self.kinds)
        self.rows: dict[int, Row] = {}
        self.slots = [[EMPTY] * self.block_size for _ in range(num_blocks)]
        self.unread: tuple[int, ...] = ()  # blocks that the step did not bring in
        self.fail: set[int] = set()  # sequences whose next result is an error
        self.host: dict[int, list[int]] = {}  # slot -> what was written there
        self.spoilt: set[int] = set()  # slots that cannot be read or written in the next step
        self.ends_tier = False  # the next step says that nothing can be written any more
        self.first: dict[str, int] = {}  # request_id -> first_history; EMPTY where it is not listed
        self.num_computed = 0
        self.num_copies = self.num_out = self.num_in = self.num_lost = 0
        self.draft_rng = random.Random(0)  # which drafts are right
        self.num_drafted = self.num_accepted = 0

    def execute(self, step: SchedulerOutput) -> StepOutput:
        """Run one step."""
        self._change_rows(step)
        lost = self._swap(step.block_moves)
        self._copy_blocks(step.block_moves.copies)
        for share in step.scheduled:
            self._change_table(share)
        drafts = {share.seq_id: self._draft(share) for share in step.scheduled}
        for share in step.scheduled:
            self._write(share, drafts[share.seq_id])
        self.unread = lost.blocks if lost else ()
        outputs = tuple(
            self._read_and_draw(share, drafts[share.seq_id]) for share in step.scheduled
        )
        return StepOutput(step.step_id, outputs, lost=lost)

    def _swap(self, moves: BlockMoves) -> LostMoves | None:
        """Do the moves out, then those in; blocks and slots that are lost hold garbage."""
        written = {move.slot for move in moves.swap_out}
        assert len(written) == len(moves.swap_out), "a slot is written twice"
        assert not written & {move.slot for move in moves.swap_in}, "a slot is read and written"
        blocks, slots = [], []
        for out in moves.swap_out:
            spoilt = out.slot in self.spoilt or self.ends_tier
            self.host[out.slot] = [-1] * self.block_size if spoilt else list(self.slots[out.block])
            slots += [out.slot] * spoilt
        for into in moves.swap_in:
            spoilt = into.slot in self.spoilt
            self.slots[into.block] = (
                [-2] * self.block_size if spoilt else list(self.host[into.slot])
            )
            blocks += [into.block] * spoilt
            slots += [into.slot] * spoilt
        self.num_out += len(moves.swap_out)
        self.num_in += len(moves.swap_in)
        self.num_lost += len(slots)
        lost = LostMoves(tuple(blocks), tuple(slots), self.ends_tier)
        if self.ends_tier:
            self.host = {}
        self.spoilt, self.ends_tier = set(), False
        return lost if slots or lost.ends_tier else None

    def _change_rows(self, step: SchedulerOutput) -> None:
        for seq_id in step.removed_seq_ids:
            del self.rows[seq_id]
        for new in step.new_sequences:
            assert new.seq_id not in self.rows, "a second row for one sequence"
            self.rows[new.seq_id] = Row(new, list(new.token_ids), [[] for _ in self.kinds])
        scheduled = [share.seq_id for share in step.scheduled]
        assert len(set(scheduled)) == len(scheduled), "scheduled twice in one step"
        fresh = {new.seq_id for new in step.new_sequences}
        removed = set(step.removed_seq_ids) - fresh  # whose results were void begin again at once
        assert not set(scheduled) & removed, "scheduled and removed"
        assert fresh <= set(scheduled), "a row for nothing"

    def _copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        gathered = [list(self.slots[source]) for source, _ in copies]
        for source, target in copies:
            self.slots[target] = list(self.slots[source])
        for (_, target), contents in zip(copies, gathered, strict=True):
            assert self.slots[target] == contents, "one by one and all at once differ"
        self.num_copies += len(copies)

    def _change_table(self, share: ScheduledSequence) -> None:
        changes = ((share.block_start, share.block_ids), *share.more_blocks)
        assert len(changes) == len(self.kinds), "not a change for each kind of layers"
        for table, (start, block_ids) in zip(self.rows[share.seq_id].tables, changes, strict=True):
            assert start <= len(table), "a gap in the table"
            table[start : start + len(block_ids)] = block_ids

    def _draft(self, share: ScheduledSequence) -> list[int]:
        """Return at most `num_drafts` tokens: the right ones, up to a wrong one now and then."""
        if not share.num_drafts:
            return []
        assert share.num_samples == 1, "drafts behind several samples, or none"
        row = self.rows[share.seq_id]
        history = self._history(row, row.token_ids)
        drafts: list[int] = []
        for place in range(self.draft_rng.randint(0, share.num_drafts)):
            token = draw(history, row.new.sample_index, len(row.token_ids) + place)
            if self.draft_rng.random() < 0.25:
                token = (token + 1) % VOCAB
            drafts.append(token)
            history = extend_history(history, token)
        return drafts

    def _history(self, row: Row, token_ids: list[int]) -> int:
        history = self.first.get(row.new.request_id, EMPTY)
        for token in token_ids:
            history = extend_history(history, token)
        return history

    def _write(self, share: ScheduledSequence, drafts: list[int]) -> None:
        row = self.rows[share.seq_id]
        end = share.num_computed + share.num_tokens
        assert share.num_tokens > 0
        assert end <= len(row.token_ids), "tokens scheduled that are not known"
        history = self.first.get(row.new.request_id, EMPTY)
        for position, token in enumerate([*row.token_ids[:end], *drafts]):
            history = extend_history(history, token)
            if position >= share.num_computed:
                for number, kind in enumerate(self.kinds):
                    block, slot = divmod(position, kind.block_tokens)
                    self.slots[row.tables[number][block]][slot] = content(history, number)
        self.num_computed += share.num_tokens

    def _read_and_draw(self, share: ScheduledSequence, drafts: list[int]) -> SequenceOutput:
        row = self.rows[share.seq_id]
        end = share.num_computed + share.num_tokens
        history = self.first.get(row.new.request_id, EMPTY)
        for position, token in enumerate([*row.token_ids[:end], *drafts]):
            history = extend_history(history, token)
            if self.unread_in(row):
                continue
            for number, kind in enumerate(self.kinds):
                if kind.window is not None and position <= share.num_computed - kind.window:
                    continue
                block, slot = divmod(position, kind.block_tokens)
                assert self.slots[row.tables[number][block]][slot] == content(history, number), (
                    f"sequence {share.seq_id} reads another history at position {position}, in "
                    f"layers of kind {number}"
                )
        if share.seq_id in self.fail:
            self.fail.remove(share.seq_id)
            if share.num_samples:
                row.token_ids.append(0)
            return SequenceOutput(share.seq_id, (), error="broken on purpose")
        assert share.num_samples == 0 or end == len(row.token_ids), "drawn in mid-prompt"
        if drafts:
            return self._draw_run(row, share, drafts)
        assert share.num_samples <= 1 or end == row.new.num_prompt_tokens, "samples drawn twice"
        tokens = tuple(
            (draw(history, row.new.sample_index + index, end),)
            for index in range(share.num_samples)
        )
        if tokens:
            row.token_ids.extend(tokens[0])
        return SequenceOutput(
            share.seq_id,
            tokens,
            scores=tuple(tuple(TokenScores(t, 0.0, 1) for t in run) for run in tokens),
            prompt_scores=self._prompt_scores(row, share, end),
        )

    def _draw_run(self, row: Row, share: ScheduledSequence, drafts: list[int]) -> SequenceOutput:
        """Sample behind the known tokens and behind each draft that was sampled itself."""
        run: list[int] = []
        for wanted in (*drafts, None):
            position = len(row.token_ids)
            token = draw(self._history(row, row.token_ids), row.new.sample_index, position)
            row.token_ids.append(token)
            run.append(token)
            if token != wanted:
                break
        self.num_drafted += len(drafts)
        self.num_accepted += len(run) - 1
        scores = tuple(TokenScores(token, 0.0, 1) for token in run)
        return SequenceOutput(share.seq_id, (tuple(run),), (scores,), num_drafted=len(drafts))

    def unread_in(self, row: Row) -> bool:
        """Return whether a sequence reads a block that was not brought in: what it makes is void."""
        return any(not set(self.unread).isdisjoint(table) for table in row.tables)

    def _prompt_scores(
        self, row: Row, share: ScheduledSequence, end: int
    ) -> tuple[TokenScores, ...]:
        if share.prompt_logprobs_from is None:
            return ()
        assert share.prompt_logprobs_from > share.num_computed, "no logits for that position"
        last = min(end, row.new.num_prompt_tokens - 1)
        return tuple(
            TokenScores(row.token_ids[p], -float(p), 1)
            for p in range(share.prompt_logprobs_from, last + 1)
        )
