"""Plan one step: who computes how many tokens, and who gives way. Reads and never writes.

The order of a plan:

1. running sequences with one token left (decodes), in the order of the policy;
2. running sequences with more left (chunks of prompts, or of what is computed again): after the decodes,
   so that a long prompt never holds them up;
3. waiting sequences in the order of the policy. None is admitted in a step that preempts: it would
   pass the victim;
4. what is left of the budget, to the prompts of 2 and 3 in the same order;
5. what is left then, to drafts of the sequences of 1, which preempt nobody: there are none in a step that
   preempts, and no block is taken that an unfinished prompt will need.

Each takes from one budget of tokens; waiting ones also need a seat (`max_num_seqs`).

Prompts side by side: one that does not end in this step takes half of what is left of the budget in 2 and
3, so that there is something for those behind it. Beside such a prompt another is begun only if it ends
in this step, or is less than half as long as what the longest still has to do: a short request never
waits for the whole of a long prompt, and two long ones do not slow each other down.

Blocks: a waiting sequence is admitted when the blocks for all its known tokens are free, though its first
chunk may need fewer: one that would run out of blocks halfway through its prompt is not begun. What
unfinished prompts still need is set aside. One that does not fit is passed over by smaller ones behind it;
after a step in which `MOST_PASSES` were reached nobody passes it any more, so it is not starved.

The plan counts blocks and never names them; the block manager's commit picks them. The commit cannot run
out: it frees all victims first, so each block that it finds shared was shared in the plan too, and a block
that a victim frees in the plan alone is one that a planned sequence then keeps instead of a copy.

A waiting sequence begins after the longest prefix that is in the cache, or will be when an earlier share
of the same step is computed. A block that is found and that nobody holds costs a free block, once a plan;
the plan does name those, and the commit claims all of them before it takes any other.

Called by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from pagemill.core.host_tier import SwappedTable
from pagemill.core.policies.base import VictimOrder
from pagemill.core.preemption import VictimQueue
from pagemill.core.prefix_cache import NO_HITS, HostSlot, PrefixHits
from pagemill.core.sequence import Sequence
from pagemill.step_dataclass import step_dataclass


class DraftChooser(Protocol):
    """Says how many draft tokens pay; see `draft_lengths`."""

    def choose(self, decodes: list[Sequence], num_free: int) -> list[int]:
        """Return the most drafts of each; `num_free` tokens are left of the budget."""
        ...


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

    def find(self, name: bytes) -> int | None:
        """Return the block with these contents, or None."""
        ...

    def find_slot(self, name: bytes) -> int | None:
        """Return the slot of the host tier with these contents, if bringing them back pays."""
        ...

    def swapped(self, seq_id: int) -> SwappedTable | None:
        """Return what a swapped sequence has in the host tier."""
        ...


# Once so many sequences were admitted past one that does not fit, no further one is.
MOST_PASSES = 16
# So many that cannot be admitted are looked at in a step, at most.
_LOOK_AHEAD = 32


@dataclass(frozen=True, slots=True)
class PlanView:
    """The state a plan is made from."""

    running: Iterable[Sequence]  # in the order of admission_key
    waiting: Iterable[Sequence]  # likewise; read only as far as sequences are admitted
    # Waiting ones with blocks; asked when blocks are short.
    holders: Callable[[], Iterable[Sequence]]
    blocks: BlockView
    drafts: DraftChooser | None = None  # None: no step has any


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The budgets of a step."""

    max_num_tokens: int
    max_num_seqs: int


@step_dataclass(frozen=True, slots=True)
class PlannedSequence:
    """One sequence's share of a step."""

    sequence: Sequence
    num_tokens: int
    hits: PrefixHits = NO_HITS  # blocks that the sequence begins with; the tokens come after them
    num_drafts: int = 0  # slots behind the tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to commit: first the preemptions, then the shares in this order."""

    scheduled: tuple[PlannedSequence, ...]
    preempted: tuple[Sequence, ...]  # lose their blocks; never among `scheduled`
    passed: tuple[Sequence, ...] = ()  # did not fit, and others behind them are admitted


def plan_step(view: PlanView, limits: StepLimits, policy: VictimOrder) -> StepPlan:
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
        self._held: dict[int, int] = {}  # seq_id -> blocks after what is planned, where they differ
        self._sealed: set[bytes] = set()  # by the shares planned so far

    def blocks_of(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self._size)

    def take_slot(self, sequence: Sequence) -> bool:
        """Take the place of a sequence's one token left, if it costs nothing: a block of its own has it."""
        table = self._view.table(sequence.seq_id)
        index = sequence.num_computed // self._size
        if index >= len(table) or self._ref(table[index]) != 1:
            return False
        if sequence.num_tokens % self._size == 0:
            self.seal(sequence, sequence.num_computed, sequence.num_tokens)
        return True

    def tokens_that_fit(self, sequence: Sequence, wanted: int) -> int:
        """Return how many of the next `wanted` tokens the free blocks allow."""
        table = self._view.table(sequence.seq_id)
        room = self.free - len(self._shared(sequence, table))
        if room < 0:
            return 0
        return min(wanted, (len(table) + room) * self._size - sequence.num_computed)

    def more_that_fit(self, sequence: Sequence, end: int, wanted: int, set_aside: int = 0) -> int:
        """Return how many of `wanted` tokens past a share that ends at `end` the free blocks allow.

        `set_aside` of the free blocks are not for these.
        """
        room = max(0, self.free - set_aside)
        return min(wanted, (self.held(sequence) + room) * self._size - end)

    def held(self, sequence: Sequence) -> int:
        """Return how many blocks the sequence has after what is planned."""
        return self._held.get(sequence.seq_id, len(self._view.table(sequence.seq_id)))

    def outstanding(self, sequence: Sequence) -> int:
        """Return how many blocks the sequence's known tokens need beyond those it has by then."""
        return max(0, self.blocks_of(sequence.num_tokens) - self.held(sequence))

    def hits(self, sequence: Sequence) -> PrefixHits:
        """Return the longest prefix that a sequence without blocks may begin with."""
        if sequence.num_computed or self._view.table(sequence.seq_id):
            return NO_HITS
        swapped = self._view.swapped(sequence.seq_id)
        if swapped is not None:
            return self._way_back(sequence, swapped)
        found: list[int | HostSlot | None] = []
        for name in sequence.block_names[: sequence.most_cached // self._size]:
            block: int | HostSlot | None = self._view.find(name)
            if block is None and name not in self._sealed:
                slot = self._view.find_slot(name)
                if slot is None:
                    break
                block = HostSlot(slot)
            found.append(block)
        return PrefixHits(tuple(found), len(found) * self._size)

    def _way_back(self, sequence: Sequence, swapped: SwappedTable) -> PrefixHits:
        """Return what a swapped sequence held; what the device pool has besides is not copied."""
        names = sequence.block_names[: swapped.num_tokens // self._size]
        blocks: list[int | HostSlot | None] = []
        for index, slot in enumerate(swapped.slots):
            block: int | HostSlot | None = HostSlot(slot)
            if index < len(names):
                here = self._view.find(names[index])
                if here is not None or names[index] in self._sealed:
                    block = here
            blocks.append(block)
        return PrefixHits(tuple(blocks), swapped.num_tokens)

    def cost_of_all(self, sequence: Sequence, hits: PrefixHits) -> int:
        """Return how many blocks all known tokens need, those found that nobody holds included."""
        table = self._view.table(sequence.seq_id)
        num_missing = self.blocks_of(sequence.num_tokens) - len(table) - len(hits.blocks)
        num_claimed = sum(isinstance(b, int) and self._ref(b) == 0 for b in hits.blocks)
        num_taken = num_claimed + hits.num_host
        return max(0, num_missing) + num_taken + len(self._shared(sequence, table))

    def claim(self, sequence: Sequence, hits: PrefixHits) -> None:
        """Hold what a sequence begins with; what is copied in can be found by later shares."""
        self._sealed.update(sequence.block_names[: hits.num_tokens // self._size])
        for block in hits.blocks:
            if isinstance(block, int):
                count = self._ref(block)
                self.free -= count == 0
                self._refs[block] = count + 1

    def seal(self, sequence: Sequence, start: int, end: int) -> None:
        """Let later shares find what positions [start, end) fill up."""
        first, stop = start // self._size, end // self._size
        if stop > first:
            self._sealed.update(sequence.block_names[first:stop])

    def charge(self, sequence: Sequence, num_tokens: int, hits: PrefixHits = NO_HITS) -> None:
        """Take the blocks that computing the next `num_tokens` tokens after `hits` needs."""
        self.claim(sequence, hits)
        table = self._view.table(sequence.seq_id)
        shared = self._shared(sequence, table)
        start = sequence.num_computed + hits.num_tokens
        end = start + num_tokens
        self.seal(sequence, start, end)
        held = len(table) + len(hits.blocks)
        num_new = max(0, self.blocks_of(end) - held)
        self._held[sequence.seq_id] = held + num_new
        num_new += len(shared) + hits.num_host
        if num_new == 0:
            return
        for block in shared:
            self._refs[block] = self._ref(block) - 1
        self.free -= num_new
        self._charged[sequence.seq_id] = (num_new, shared)

    def charge_more(self, sequence: Sequence, start: int, end: int) -> None:
        """Take what lengthening a share from `start` to `end` needs besides."""
        self.seal(sequence, start, end)
        num_new = max(0, self.blocks_of(end) - self.held(sequence))
        self._held[sequence.seq_id] = self.held(sequence) + num_new
        self.free -= num_new
        before, shared = self._charged.get(sequence.seq_id, (0, []))
        self._charged[sequence.seq_id] = (before + num_new, shared)

    def release(self, sequence: Sequence) -> None:
        """Give back what the sequence was charged and what it holds."""
        self._held.pop(sequence.seq_id, None)
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
        planned = self._refs.get(block) if self._refs else None
        return self._view.ref_count(block) if planned is None else planned

    def _shared(self, sequence: Sequence, table: list[int]) -> list[int]:
        """Return the blocks that the next token goes into, or later ones, that others hold too."""
        first = sequence.num_computed // self._size
        if first >= len(table):
            return []
        return [block for block in table[first:] if self._ref(block) > 1]


class _Draft:
    """A plan in the making."""

    def __init__(self, view: PlanView, limits: StepLimits, policy: VictimOrder) -> None:
        self._view = view
        self._policy = policy
        self._running = list(view.running)
        self._blocks = _BlockDraft(view.blocks)
        self._tokens_left = limits.max_num_tokens
        self._seats_left = limits.max_num_seqs - len(self._running)
        self._planned: dict[int, PlannedSequence] = {}
        self._preempted: dict[int, Sequence] = {}
        self._victims: VictimQueue | None = None
        self._prompts: list[Sequence] = []  # may take more than they got
        self._longest = 0  # most tokens that one of them has left after its share
        self._set_aside = 0  # blocks that they will need after this step
        self._unfit: list[Sequence] = []
        self._num_passed = 0  # of those, how many were passed

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
        for sequence in prompts:
            if sequence.seq_id not in self._preempted:
                self._note_prompt(sequence)
        self._admit()
        self._spend_rest()
        if self._view.drafts is not None and not self._preempted:
            self._draft(self._view.drafts)
        return StepPlan(
            scheduled=tuple(self._planned.values()),
            preempted=tuple(self._preempted.values()),
            passed=tuple(self._unfit[: self._num_passed]),
        )

    def _continue(self, sequence: Sequence) -> None:
        """Plan a running sequence as far as budget and blocks allow, taking blocks if need be."""
        if self._tokens_left == 0 or sequence.seq_id in self._preempted:
            return
        num_remaining = sequence.num_remaining
        if num_remaining == 1 and self._blocks.take_slot(sequence):  # nearly every decode
            self._planned[sequence.seq_id] = PlannedSequence(sequence, 1)
            self._tokens_left -= 1
            return
        wanted = self._share(num_remaining)
        fitting = self._blocks.tokens_that_fit(sequence, wanted)
        while fitting == 0:
            if not self._preempt_for(sequence):
                return  # it keeps its seat and its blocks, and tries again in the next step
            wanted = self._share(sequence.num_remaining)
            fitting = self._blocks.tokens_that_fit(sequence, wanted)
        self._schedule(sequence, fitting)

    def _admit(self) -> None:
        """Plan waiting sequences in order, as far as seats, tokens and blocks allow."""
        if self._seats_left == 0:
            return  # nobody has to be looked at
        num_waited = 0
        for sequence in self._view.waiting:
            if self._seats_left == 0 or self._tokens_left == 0 or self._preempted:
                return
            if len(self._unfit) + num_waited == _LOOK_AHEAD:
                return
            hits = self._blocks.hits(sequence)
            num_left = sequence.num_remaining - hits.num_tokens
            if not self._has_room(sequence, hits):
                if self._running or self._planned:
                    self._unfit.append(sequence)
                    if sequence.num_passes >= MOST_PASSES:
                        return
                    continue
                # Nothing else can run, so what is in the way are forks that wait with their blocks.
                while not self._has_room(sequence, hits):
                    freed = self._preempt_for(sequence)
                    assert freed, "the pool must hold one sequence of full length"
            if self._longest and num_left > max(self._tokens_left, self._longest // 2):
                num_waited += 1  # its turn comes when the prompts before it are done
                continue
            self._seats_left -= 1
            self._num_passed = len(self._unfit)
            self._schedule(sequence, self._share(num_left), hits)
            self._note_prompt(sequence)

    def _share(self, num_remaining: int) -> int:
        """Return the tokens of one sequence: all, or half of what is left if it does not end."""
        left = self._tokens_left
        return num_remaining if num_remaining <= left else left - left // 2

    def _note_prompt(self, sequence: Sequence) -> None:
        """Remember what a prompt still needs after the share that it has got, if any."""
        num_left = sequence.num_tokens - self._end(sequence)
        if num_left:
            self._prompts.append(sequence)
            self._longest = max(self._longest, num_left)
            self._set_aside += self._blocks.outstanding(sequence)

    def _end(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence are computed after what is planned."""
        planned = self._planned.get(sequence.seq_id)
        if planned is None:
            return sequence.num_computed
        return sequence.num_computed + planned.hits.num_tokens + planned.num_tokens

    def _spend_rest(self) -> None:
        """Give the tokens that are left to the unfinished prompts, in order."""
        for sequence in self._prompts:
            planned = self._planned.get(sequence.seq_id)
            if self._tokens_left == 0 or planned is None:
                continue
            end = self._end(sequence)
            wanted = min(sequence.num_tokens - end, self._tokens_left)
            more = self._blocks.more_that_fit(sequence, end, wanted)
            if more > 0:
                self._blocks.charge_more(sequence, end, end + more)
                self._tokens_left -= more
                self._planned[sequence.seq_id] = PlannedSequence(
                    sequence, planned.num_tokens + more, planned.hits
                )

    def _draft(self, chooser: DraftChooser) -> None:
        """Give slots for drafts to sequences that compute their last token, as far as blocks are free."""
        decodes = [
            planned.sequence
            for planned in self._planned.values()
            if planned.num_tokens == planned.sequence.num_remaining == 1
            and planned.sequence.group.is_forked
            and planned.sequence.group.request.beams is None  # what it takes is not sampled
        ]
        lengths = chooser.choose(decodes, self._tokens_left) if decodes else []
        for sequence, wanted in zip(decodes, lengths, strict=True):
            end = sequence.num_tokens
            fitting = self._blocks.more_that_fit(sequence, end, wanted, self._set_aside)
            if fitting > 0:
                self._blocks.charge_more(sequence, end, end + fitting)
                self._tokens_left -= fitting
                self._planned[sequence.seq_id] = PlannedSequence(sequence, 1, num_drafts=fitting)

    def _has_room(self, sequence: Sequence, hits: PrefixHits) -> bool:
        """Return whether a waiting sequence may begin."""
        room = self._blocks.free - self._set_aside
        if sequence.num_preemptions:
            # Each of the others may need a block soon. Without room for that, the one that comes
            # back would be preempted again, its tokens computed for nothing.
            room -= len(self._running)
        return self._blocks.cost_of_all(sequence, hits) <= room

    def _schedule(self, sequence: Sequence, num_tokens: int, hits: PrefixHits = NO_HITS) -> None:
        self._blocks.charge(sequence, num_tokens, hits)
        self._planned[sequence.seq_id] = PlannedSequence(sequence, num_tokens, hits)
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
