"""Plan one step: who computes how many tokens, and who gives way. Reads and never writes.

The order of a plan:

1. running sequences with one token left (decodes), in the order of the policy;
2. running sequences with more left (chunks of prompts, or of what is computed again): after the decodes,
   so that a long prompt never holds them up;
3. waiting sequences in the order of the policy, up to the first that does not fit. None is admitted in
   a step that preempts: it would pass the victim.

Each takes from one budget of tokens; waiting ones also need a seat (`max_num_seqs`). A waiting sequence
is admitted when the blocks for all its known tokens are free, though its first chunk may need fewer: one
that would run out of blocks halfway through its prompt is not begun. Nobody is admitted beside an
unfinished prompt, since that takes what is left of the budget, so nothing has to be set aside for it.

The plan counts blocks and never names them; the block manager's commit picks them. The commit cannot run
out: it frees all victims first, so each block that it finds shared was shared in the plan too, and a block
that a victim frees in the plan alone is one that a planned sequence then keeps instead of a copy.

Called by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from pagemill.core.policies.base import Policy
from pagemill.core.preemption import VictimQueue
from pagemill.core.sequence import Sequence


class BlockView(Protocol):
    """What the planner reads of the block manager."""

    block_size: int

    @property
    def num_free(self) -> int:
        """Return how many blocks the step may take."""
        ...

    def table(self, seq_id: int) -> list[int]:
        """Return the blocks of a sequence, to be read only."""
        ...

    def ref_count(self, block: int) -> int:
        """Return how many tables hold the block."""
        ...


@dataclass(frozen=True, slots=True)
class PlanView:
    """The state a plan is made from."""

    running: Iterable[Sequence]  # in the order of admission_key
    waiting: Iterable[Sequence]  # likewise; read only as far as sequences are admitted
    # Waiting ones with blocks; asked when blocks are short.
    holders: Callable[[], Iterable[Sequence]]
    blocks: BlockView


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The budgets of a step."""

    max_num_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class PlannedSequence:
    """One sequence's share of a step."""

    sequence: Sequence
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to commit: first the preemptions, then the shares in this order."""

    scheduled: tuple[PlannedSequence, ...]
    preempted: tuple[Sequence, ...]  # lose their blocks; never among `scheduled`


def plan_step(view: PlanView, limits: StepLimits, policy: Policy) -> StepPlan:
    """Return who computes what in the next step. Changes nothing."""
    return _Draft(view, limits, policy).plan()


class _BlockDraft:
    """The pool as it would be after what is planned so far: counts, laid over the real tables."""

    def __init__(self, view: BlockView) -> None:
        self.free = view.num_free
        self._view = view
        self._size = view.block_size
        self._refs: dict[int, int] = {}  # planned ref counts, where they differ
        self._charged: dict[int, tuple[int, list[int]]] = {}  # seq_id -> (new blocks, left blocks)

    def blocks_of(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self._size)

    def has_slot(self, sequence: Sequence) -> bool:
        """Return whether the next token costs nothing: it goes into a block of the sequence's own."""
        table = self._view.table(sequence.seq_id)
        index = sequence.num_computed // self._size
        return index < len(table) and self._ref(table[index]) == 1

    def tokens_that_fit(self, sequence: Sequence, wanted: int) -> int:
        """Return how many of the next `wanted` tokens the free blocks allow."""
        table = self._view.table(sequence.seq_id)
        room = self.free - len(self._shared(sequence, table))
        if room < 0:
            return 0
        return min(wanted, (len(table) + room) * self._size - sequence.num_computed)

    def cost_of_all(self, sequence: Sequence) -> int:
        """Return how many new blocks all known tokens need."""
        table = self._view.table(sequence.seq_id)
        num_missing = self.blocks_of(sequence.num_tokens) - len(table)
        return max(0, num_missing) + len(self._shared(sequence, table))

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Take the blocks that computing the next `num_tokens` tokens needs."""
        table = self._view.table(sequence.seq_id)
        shared = self._shared(sequence, table)
        end = sequence.num_computed + num_tokens
        num_new = max(0, self.blocks_of(end) - len(table)) + len(shared)
        if num_new == 0:
            return
        for block in shared:
            self._refs[block] = self._ref(block) - 1
        self.free -= num_new
        self._charged[sequence.seq_id] = (num_new, shared)

    def release(self, sequence: Sequence) -> None:
        """Give back what the sequence was charged and what it holds."""
        num_new, left = self._charged.pop(sequence.seq_id, (0, []))
        self.free += num_new
        for block in self._view.table(sequence.seq_id):
            if block in left:
                continue
            self._refs[block] = self._ref(block) - 1
            self.free += self._refs[block] == 0

    def frees_any(self, sequence: Sequence) -> bool:
        """Return whether releasing a waiting sequence frees a block at once.

        Whoever shares a sequence's last block shares all before it, so the last one tells.
        """
        return self._ref(self._view.table(sequence.seq_id)[-1]) == 1

    def _ref(self, block: int) -> int:
        planned = self._refs.get(block)
        return self._view.ref_count(block) if planned is None else planned

    def _shared(self, sequence: Sequence, table: list[int]) -> list[int]:
        """Return the blocks that the next token goes into, or later ones, that others hold too."""
        first = sequence.num_computed // self._size
        if first >= len(table):
            return []
        return [block for block in table[first:] if self._ref(block) > 1]


class _Draft:
    """A plan in the making."""

    def __init__(self, view: PlanView, limits: StepLimits, policy: Policy) -> None:
        self._view = view
        self._policy = policy
        self._running = list(view.running)
        self._blocks = _BlockDraft(view.blocks)
        self._tokens_left = limits.max_num_tokens
        self._seats_left = limits.max_num_seqs - len(self._running)
        self._planned: dict[int, PlannedSequence] = {}
        self._preempted: dict[int, Sequence] = {}
        self._victims: VictimQueue | None = None

    def plan(self) -> StepPlan:
        """Return the finished plan."""
        prompts = []
        for sequence in self._running:
            if sequence.num_remaining == 1:
                self._continue(sequence)
            else:
                prompts.append(sequence)
        for sequence in prompts:
            self._continue(sequence)
        self._admit()
        return StepPlan(
            scheduled=tuple(self._planned.values()),
            preempted=tuple(self._preempted.values()),
        )

    def _continue(self, sequence: Sequence) -> None:
        """Plan a running sequence as far as budget and blocks allow, taking blocks if need be."""
        if self._tokens_left == 0 or sequence.seq_id in self._preempted:
            return
        wanted = min(sequence.num_remaining, self._tokens_left)
        if sequence.num_remaining == 1 and self._blocks.has_slot(sequence):  # nearly every decode
            self._planned[sequence.seq_id] = PlannedSequence(sequence, 1)
            self._tokens_left -= 1
            return
        fitting = self._blocks.tokens_that_fit(sequence, wanted)
        while fitting == 0:
            if not self._preempt_for(sequence):
                return  # it keeps its seat and its blocks, and tries again in the next step
            wanted = min(sequence.num_remaining, self._tokens_left)
            fitting = self._blocks.tokens_that_fit(sequence, wanted)
        self._schedule(sequence, fitting)

    def _admit(self) -> None:
        """Plan waiting sequences in order, up to the first that does not fit."""
        for sequence in self._view.waiting:
            if self._seats_left == 0 or self._tokens_left == 0 or self._preempted:
                return
            if not self._has_room(sequence):
                if self._running or self._planned:
                    return
                # Nothing else can run, so what is in the way are forks that wait with their blocks.
                while not self._has_room(sequence):
                    freed = self._preempt_for(sequence)
                    assert freed, "the pool must hold one sequence of full length"
            self._seats_left -= 1
            self._schedule(sequence, min(sequence.num_remaining, self._tokens_left))

    def _has_room(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence may begin."""
        room = self._blocks.free
        if sequence.num_preemptions:
            # Each of the others may need a block soon. Without room for that, the one that comes
            # back would be preempted again, its tokens computed for nothing.
            room -= len(self._running)
        return self._blocks.cost_of_all(sequence) <= room

    def _schedule(self, sequence: Sequence, num_tokens: int) -> None:
        self._blocks.charge(sequence, num_tokens)
        self._planned[sequence.seq_id] = PlannedSequence(sequence, num_tokens)
        self._tokens_left -= num_tokens

    def _preempt_for(self, needy: Sequence) -> bool:
        if self._victims is None:
            self._victims = VictimQueue(self._running, self._view.holders(), self._policy)
        victim = self._victims.next_for(needy, self._blocks)
        if victim is None:
            return False
        planned = self._planned.pop(victim.seq_id, None)
        if planned is not None:
            self._tokens_left += planned.num_tokens
        self._blocks.release(victim)
        self._preempted[victim.seq_id] = victim
        return True
