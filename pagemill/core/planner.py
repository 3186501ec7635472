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

Blocks: a waiting sequence is admitted when the blocks for all its known tokens are free (of layers with a
window, for the most that it needs at once), though its first chunk may need fewer: one that would run out of blocks halfway through its prompt is not begun. What
unfinished prompts still need is set aside. One that does not fit is passed over by smaller ones behind it;
after a step in which `MOST_PASSES` were reached nobody passes it any more, so it is not starved.

Looking costs time, so the order of the policy is followed until `_LOOK_AHEAD` could not be admitted. If there are
more behind those, the smallest of all that wait come next: so many long ones never hide a short one.

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

from pagemill.core.block_draft import BlockDraft, BlockView
from pagemill.core.policies.base import VictimOrder
from pagemill.core.preemption import VictimQueue
from pagemill.core.prefix_cache import NO_HITS, PrefixHits
from pagemill.core.sequence import Sequence
from pagemill.step_dataclass import step_dataclass


class DraftChooser(Protocol):
    """Says how many draft tokens pay; see `draft_lengths`."""

    def choose(self, decodes: list[Sequence], num_free: int) -> list[int]:
        """Return the most drafts of each; `num_free` tokens are left of the budget."""
        ...


# Once so many sequences were admitted past one that does not fit, no further one is.
MOST_PASSES = 16
# So many that cannot be admitted are looked at in a step, at most, in either order.
_LOOK_AHEAD = 32


@dataclass(frozen=True, slots=True)
class PlanView:
    """The state a plan is made from."""

    # In the order of admission_key; without those that cannot go on before the step in flight has a result.
    running: Iterable[Sequence]
    waiting: Iterable[Sequence]  # likewise; read only as far as sequences are admitted
    smallest: Iterable[Sequence]  # the same ones, those with the fewest tokens first; read likewise
    # Waiting ones with blocks; asked when blocks are short.
    holders: Callable[[], Iterable[Sequence]]
    blocks: BlockView
    drafts: DraftChooser | None = None  # None: no step has any
    num_held_up: int = 0  # have seats and blocks, and wait for the result of the step in flight


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


class _Draft:
    """A plan in the making."""

    def __init__(self, view: PlanView, limits: StepLimits, policy: VictimOrder) -> None:
        self._view = view
        self._policy = policy
        self._running = list(view.running)
        self._blocks = BlockDraft(view.blocks)
        self._tokens_left = limits.max_num_tokens
        self._num_others = len(self._running) + view.num_held_up  # have seats
        self._seats_left = limits.max_num_seqs - self._num_others
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
            if sequence.num_remaining != 1:
                prompts.append(sequence)
            elif not self._decode(sequence):
                self._continue(sequence)
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

    def _decode(self, sequence: Sequence) -> bool:
        """Plan the one token left of a running sequence, if that costs no block: nearly every decode."""
        if self._tokens_left == 0 or (self._preempted and sequence.seq_id in self._preempted):
            return False
        if not self._blocks.take_slot(sequence):
            return False
        self._planned[sequence.seq_id] = PlannedSequence(sequence, 1)
        self._tokens_left -= 1
        return True

    def _continue(self, sequence: Sequence) -> None:
        """Plan a running sequence as far as budget and blocks allow, taking blocks if need be."""
        if self._tokens_left == 0 or sequence.seq_id in self._preempted:
            return
        wanted = self._share(sequence.num_remaining)
        fitting = self._blocks.tokens_that_fit(sequence, wanted)
        while fitting == 0:
            if not self._preempt_for(sequence):
                return  # it keeps its seat and its blocks, and tries again in the next step
            wanted = self._share(sequence.num_remaining)
            fitting = self._blocks.tokens_that_fit(sequence, wanted)
        self._schedule(sequence, fitting)

    def _admit(self) -> None:
        """Plan waiting sequences as far as seats, tokens and blocks allow: in order, then by size."""
        seen: set[int] = set()
        if self._seats_left and not self._admit_from(self._view.waiting, seen):
            self._admit_from(self._view.smallest, seen)

    def _admit_from(self, waiting: Iterable[Sequence], seen: set[int]) -> bool:
        """Admit those of one order that were not `seen`; False: nobody behind `_LOOK_AHEAD` was looked at."""
        num_failed = 0
        for sequence in waiting:
            if self._seats_left == 0 or self._tokens_left == 0 or self._preempted:
                return True
            if num_failed == _LOOK_AHEAD:
                return False
            if sequence.seq_id in seen:
                continue
            seen.add(sequence.seq_id)
            hits = self._blocks.hits(sequence)
            num_left = sequence.num_remaining - hits.num_tokens
            if not self._has_room(sequence, hits):
                if self._num_others or self._planned:
                    num_failed += 1
                    self._unfit.append(sequence)
                    if sequence.num_passes >= MOST_PASSES:
                        return True
                    continue
                # Nothing else can run, so what is in the way are forks that wait with their blocks.
                while not self._has_room(sequence, hits):
                    freed = self._preempt_for(sequence)
                    assert freed, "the pool must hold one sequence of full length"
            if self._longest and num_left > max(self._tokens_left, self._longest // 2):
                num_failed += 1  # its turn comes when the prompts before it are done
                continue
            self._begin(sequence, hits, num_left)
        return True

    def _begin(self, sequence: Sequence, hits: PrefixHits, num_left: int) -> None:
        """Give a waiting sequence that has room its seat and its first share."""
        self._seats_left -= 1
        self._num_passed = len(self._unfit)
        share = self._share(num_left)
        if self._blocks.lets_go:  # the blocks for a chunk are there, not those for all of it
            share = self._blocks.first_that_fit(sequence, hits, share, self._set_aside)
            assert share > 0, "room was found for all of it"
        self._schedule(sequence, share, hits)
        self._note_prompt(sequence)

    def _share(self, num_remaining: int) -> int:
        """Return the tokens of one sequence: all, or half of what is left if it does not end."""
        left = self._tokens_left
        return num_remaining if num_remaining <= left else left - left // 2

    def _note_prompt(self, sequence: Sequence) -> None:
        """Remember what a prompt still needs after the share that it has got, if any."""
        start, end = self._ends(sequence)
        num_left = sequence.num_tokens - end
        if num_left:
            self._prompts.append(sequence)
            self._longest = max(self._longest, num_left)
            self._set_aside += self._blocks.outstanding(sequence, start, end)

    def _ends(self, sequence: Sequence) -> tuple[int, int]:
        """Return how many tokens of a sequence are computed before and after what is planned."""
        planned = self._planned.get(sequence.seq_id)
        if planned is None:
            return sequence.num_computed, sequence.num_computed
        start = sequence.num_computed + planned.hits.num_tokens
        return start, start + planned.num_tokens

    def _spend_rest(self) -> None:
        """Give the tokens that are left to the unfinished prompts, in order."""
        for sequence in self._prompts:
            planned = self._planned.get(sequence.seq_id)
            if self._tokens_left == 0 or planned is None:
                continue
            _, end = self._ends(sequence)
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
            room -= self._num_others
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
