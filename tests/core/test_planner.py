"""Plans from random states, and the order of service in small ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.core.block_manager import BlockManager
from pagemill.core.planner import MOST_PASSES, PlanView, StepLimits, StepPlan, plan_step
from pagemill.core.policies.fcfs import FirstComeFirstServed
from pagemill.core.sequence import Sequence, SequenceGroup, SequenceStatus
from tests.core.fake_ranks import NO_PREFIXES, make_request

FCFS = FirstComeFirstServed(NO_PREFIXES)


def make_sequence(
    seq_id: int, num_prompt: int, *, num_output: int = 0, num_computed: int = 0
) -> Sequence:
    request = make_request(f"r{seq_id}", num_prompt)
    sequence = Sequence(
        seq_id=seq_id,
        group=SequenceGroup(request, seq_id, 1),
        sample_index=0,
        prompt_token_ids=request.prompt_token_ids,
        num_tokens=num_prompt,
    )
    if num_output:
        sequence.append((0,) * num_output, 0.0)
    sequence.num_computed = num_computed
    return sequence


class State:
    """Sequences in two queues over a block manager."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.blocks = BlockManager(num_blocks, block_size)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []

    def run(self, sequence: Sequence) -> Sequence:
        """Put a sequence on a seat, with blocks for what it has computed."""
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)
        if sequence.num_computed and not self.blocks.table(sequence.seq_id):
            self.blocks.extend(sequence.seq_id, 0, sequence.num_computed)
        return sequence

    def holders(self) -> list[Sequence]:
        return [s for s in self.waiting if self.blocks.table(s.seq_id)]

    def smallest(self) -> list[Sequence]:
        return sorted(self.waiting, key=lambda s: s.num_remaining)

    def plan(self, max_num_tokens: int = 100, max_num_seqs: int = 10) -> StepPlan:
        view = PlanView(self.running, self.waiting, self.smallest(), self.holders, self.blocks)
        return plan_step(view, StepLimits(max_num_tokens, max_num_seqs), FCFS)


def shares(plan: StepPlan) -> dict[int, int]:
    return {planned.sequence.seq_id: planned.num_tokens for planned in plan.scheduled}


def test_decodes_come_before_prompts_and_running_before_waiting() -> None:
    state = State(100, 4)
    state.run(make_sequence(0, 50, num_computed=10))
    state.run(make_sequence(1, 8, num_output=1, num_computed=8))
    state.waiting.append(make_sequence(2, 5))
    assert list(shares(state.plan()).items()) == [(1, 1), (0, 40), (2, 5)]


def test_long_prompt_takes_what_decodes_leave_of_the_budget() -> None:
    state = State(100, 4)
    state.run(make_sequence(0, 50))
    state.run(make_sequence(1, 8, num_output=1, num_computed=8))
    assert shares(state.plan(max_num_tokens=7)) == {1: 1, 0: 6}


def test_long_prompt_leaves_half_of_the_budget_to_a_short_one() -> None:
    state = State(100, 4)
    state.run(make_sequence(0, 50))
    state.waiting.append(make_sequence(1, 2))
    assert shares(state.plan(max_num_tokens=6)) == {0: 4, 1: 2}
    state.waiting[0] = make_sequence(1, 3)
    assert shares(state.plan(max_num_tokens=6)) == {0: 3, 1: 3}


def test_prompts_that_do_not_end_take_halves_of_what_is_left() -> None:
    state = State(100, 4)
    state.waiting.extend(make_sequence(i, size) for i, size in enumerate((100, 40, 15, 1)))
    # 8 of 16 to the first, 4 of 8 to the next, 2 of 4, and the last one ends; one more is left.
    assert shares(state.plan(max_num_tokens=16)) == {0: 9, 1: 4, 2: 2, 3: 1}


def test_two_long_prompts_are_computed_one_after_the_other() -> None:
    state = State(100, 4)
    state.waiting.extend(make_sequence(i, 80) for i in range(2))
    assert shares(state.plan(max_num_tokens=16)) == {0: 16}


def test_what_an_unfinished_prompt_needs_is_set_aside() -> None:
    state = State(12, 4)
    state.run(make_sequence(0, 40))
    state.waiting.extend([make_sequence(1, 9), make_sequence(2, 8)])
    # Ten blocks are the long one's: two are left, and the second of the waiting needs no more.
    assert shares(state.plan(max_num_tokens=32)) == {0: 24, 2: 8}


def test_admission_stops_at_seats_and_at_budget() -> None:
    state = State(100, 4)
    state.waiting.extend(make_sequence(i, 6) for i in range(5))
    assert shares(state.plan(max_num_seqs=2)) == {0: 6, 1: 6}
    assert shares(state.plan(max_num_tokens=15)) == {0: 6, 1: 6, 2: 3}


def test_small_ones_pass_one_that_does_not_fit_a_bounded_number_of_times() -> None:
    state = State(4, 4)
    state.run(make_sequence(0, 8, num_output=1, num_computed=8))
    state.waiting.extend([make_sequence(1, 9), make_sequence(2, 1), make_sequence(3, 7)])
    plan = state.plan()
    assert shares(plan) == {0: 1, 2: 1}
    # The last one does not fit either, but nobody behind it is admitted.
    assert plan.passed == (state.waiting[0],)
    state.waiting[0].num_passes = MOST_PASSES
    plan = state.plan()
    assert shares(plan) == {0: 1}
    assert plan.passed == ()


def test_prompt_begins_only_when_all_its_blocks_are_free() -> None:
    state = State(9, 4)
    state.run(make_sequence(0, 8, num_output=1, num_computed=8))
    state.waiting.append(make_sequence(1, 25))
    # Six blocks are left beside the running one's third; the first chunk would need only two.
    assert shares(state.plan(max_num_tokens=9)) == {0: 1}
    state.waiting[0] = make_sequence(1, 24)
    assert shares(state.plan(max_num_tokens=9)) == {0: 1, 1: 8}


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    state = State(6, 4)
    state.run(make_sequence(0, 7, num_output=2, num_computed=8))
    state.run(make_sequence(1, 15, num_output=1, num_computed=15))
    state.waiting.append(make_sequence(2, 1))
    plan = state.plan()
    assert plan.preempted == (state.running[1],)
    assert shares(plan) == {0: 1}


def test_preempted_sequence_comes_back_only_with_a_spare_block_for_each_running_one() -> None:
    for num_blocks, num_preemptions, comes in ((6, 0, True), (6, 1, False), (8, 1, True)):
        state = State(num_blocks, 4)
        state.run(make_sequence(0, 7, num_output=1, num_computed=7))
        state.run(make_sequence(1, 7, num_output=1, num_computed=7))
        state.waiting.append(make_sequence(2, 5))
        state.waiting[0].num_preemptions = num_preemptions
        assert (2 in shares(state.plan())) == comes


def test_last_comer_gives_way_and_is_not_scheduled() -> None:
    state = State(4, 4)
    state.run(make_sequence(0, 7, num_output=2, num_computed=8))
    last = state.run(make_sequence(1, 7, num_output=2, num_computed=8))
    plan = state.plan()
    assert shares(plan) == {0: 1}
    assert plan.preempted == (last,)


def test_last_comer_without_a_block_waits_a_step_and_keeps_what_it_has() -> None:
    state = State(5, 4)
    state.run(make_sequence(0, 7, num_output=2, num_computed=8))
    state.run(make_sequence(1, 7, num_output=2, num_computed=8))
    state.waiting.append(make_sequence(2, 1))
    plan = state.plan()
    assert shares(plan) == {0: 1}
    assert plan.preempted == ()


def test_planned_decode_gives_way_to_an_older_prompt_and_its_budget_comes_back() -> None:
    state = State(3, 4)
    state.run(make_sequence(0, 9, num_computed=4))
    decode = state.run(make_sequence(1, 7, num_output=1, num_computed=7))
    plan = state.plan(max_num_tokens=5)
    assert shares(plan) == {0: 5}
    assert plan.preempted == (decode,)


def test_prompt_takes_a_smaller_chunk_before_it_takes_blocks_of_others() -> None:
    state = State(4, 4)
    state.run(make_sequence(0, 16, num_computed=4))
    state.run(make_sequence(1, 7, num_output=1, num_computed=7))
    plan = state.plan()
    assert shares(plan) == {1: 1, 0: 4}
    assert plan.preempted == ()


def forked_trio(num_blocks: int) -> State:
    """Three samples that share two blocks, the second half full; each has one token to compute."""
    state = State(num_blocks, 4)
    state.run(make_sequence(0, 6, num_output=1, num_computed=6))
    for seq_id in (1, 2):
        state.blocks.fork(0, seq_id)
        state.run(make_sequence(seq_id, 6, num_output=1, num_computed=6))
    return state


def test_last_sharer_of_a_block_writes_into_it_without_a_copy() -> None:
    plan = forked_trio(4).plan()
    assert shares(plan) == {0: 1, 1: 1, 2: 1}


def test_copy_needs_a_block_and_a_victim_that_shares_makes_it_needless() -> None:
    plan = forked_trio(3).plan()
    assert shares(plan) == {0: 1, 1: 1}
    assert [s.seq_id for s in plan.preempted] == [2]


# ---------------------------------------------------------------- properties


@dataclass(frozen=True)
class Spec:
    """One request of a random state."""

    num_prompt: int
    num_output: int
    left: int  # tokens not computed
    forks: tuple[bool, ...]  # each: has it computed a token since the fork
    seats: tuple[bool, ...]  # root and forks: running or waiting


@dataclass
class Scrambled:
    """A policy given by a table."""

    keys: list[int]

    def admission_key(self, sequence: Sequence) -> tuple[int, ...]:
        return (self.keys[sequence.seq_id % len(self.keys)], sequence.seq_id)

    def victim_key(self, sequence: Sequence) -> tuple[int, ...]:
        return (self.keys[-sequence.seq_id % len(self.keys)], sequence.seq_id)


specs = st.lists(
    st.builds(
        Spec,
        num_prompt=st.integers(1, 20),
        num_output=st.integers(0, 8),
        left=st.integers(1, 12),
        forks=st.lists(st.booleans(), max_size=3).map(tuple),
        seats=st.lists(st.booleans(), min_size=4, max_size=4).map(tuple),
    ),
    min_size=1,
    max_size=5,
)


def build(requests: list[Spec], num_blocks: int, block_size: int) -> State:
    """Make the state; the same ids and blocks for any pool that is large enough."""
    state = State(num_blocks, block_size)
    seq_id = 0
    for spec in requests:
        family = []
        root = make_sequence(seq_id, spec.num_prompt, num_output=spec.num_output)
        root.num_computed = max(0, root.num_tokens - spec.left)
        if root.num_computed and (spec.seats[0] or spec.forks):
            state.blocks.extend(root.seq_id, 0, root.num_computed)
        else:
            root.num_computed = 0
        family.append(root)
        for has_run in spec.forks if root.num_computed else ():
            fork = make_sequence(seq_id + len(family), spec.num_prompt)
            fork.append((0,) * (root.num_computed + 1 - spec.num_prompt), 0.0)
            fork.num_tokens = root.num_computed + 1
            fork.num_computed = root.num_computed
            state.blocks.fork(root.seq_id, fork.seq_id)
            if has_run:
                state.blocks.extend(fork.seq_id, fork.num_computed, fork.num_tokens)
                fork.num_computed += 1
                fork.num_tokens += 1
            family.append(fork)
        seq_id += len(family)
        for sequence, is_seated in zip(family, spec.seats, strict=False):
            if is_seated:
                state.run(sequence)
            else:
                state.waiting.append(sequence)
    return state


def snapshot(state: State) -> object:
    sequences = [*state.running, *state.waiting]
    return (
        [(s.seq_id, s.num_tokens, s.num_computed, s.num_scheduled, s.status) for s in sequences],
        {s.seq_id: list(state.blocks.table(s.seq_id)) for s in sequences},
        [state.blocks.ref_count(block) for block in range(state.blocks.num_blocks)],
        state.blocks.num_free,
    )


@settings(deadline=None, max_examples=200)
@given(
    requests=specs,
    block_size=st.sampled_from([1, 2, 4]),
    num_extra=st.integers(0, 6),
    max_num_tokens=st.integers(1, 40),
    num_spare_seats=st.integers(0, 3),
    keys=st.permutations(range(20)),
)
def test_plan_keeps_its_promises(
    requests: list[Spec],
    block_size: int,
    num_extra: int,
    max_num_tokens: int,
    num_spare_seats: int,
    keys: list[int],
) -> None:
    trial = build(requests, 1000, block_size)
    longest = max(s.num_tokens for s in [*trial.running, *trial.waiting])
    num_used = 1000 - trial.blocks.num_free
    num_blocks = max(num_used + num_extra, -(-longest // block_size))
    state = build(requests, num_blocks, block_size)
    policy = Scrambled(list(keys))
    state.running.sort(key=policy.admission_key)
    state.waiting.sort(key=policy.admission_key)
    limits = StepLimits(max_num_tokens, max(1, len(state.running) + num_spare_seats))

    before = snapshot(state)
    view = PlanView(state.running, state.waiting, state.smallest(), state.holders, state.blocks)
    plan = plan_step(view, limits, policy)
    assert snapshot(state) == before, "planning writes"
    assert plan_step(view, limits, policy) == plan, "planning depends on more than its arguments"

    given_out = shares(plan)
    preempted = {s.seq_id for s in plan.preempted}
    assert given_out, "no progress"
    assert not preempted & given_out.keys()
    assert sum(given_out.values()) <= max_num_tokens
    for planned in plan.scheduled:
        assert 1 <= planned.num_tokens <= planned.sequence.num_remaining
    seated = {s.seq_id for s in state.running} - preempted | given_out.keys()
    assert len(seated) <= limits.max_num_seqs
    if state.running:
        first = min(state.running, key=policy.victim_key)
        assert first.seq_id not in preempted, "the first gave way"
    commit(state, plan)


def commit(state: State, plan: StepPlan) -> None:
    """Commit a plan; nothing runs out, and nobody writes where another reads."""
    for victim in plan.preempted:
        state.blocks.free(victim.seq_id)
    sources: set[int] = set()
    targets: set[int] = set()
    for planned in plan.scheduled:
        sequence = planned.sequence
        end = sequence.num_computed + planned.num_tokens
        change = state.blocks.extend(sequence.seq_id, sequence.num_computed, end)
        sources.update(source for source, _ in change.copies)
        targets.update(target for _, target in change.copies)
    assert not sources & targets, "the order of copies matters"
    state.blocks.check()
    for planned in plan.scheduled:
        sequence = planned.sequence
        table = state.blocks.table(sequence.seq_id)
        first = sequence.num_computed // state.blocks.block_size
        assert all(state.blocks.ref_count(block) == 1 for block in table[first:])


class Watched:
    """A queue that counts how many of it were looked at."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self._sequences = sequences
        self.num_read = 0

    def __iter__(self) -> Iterator[Sequence]:
        for sequence in self._sequences:
            self.num_read += 1
            yield sequence


def test_plan_looks_at_a_bounded_part_of_a_long_queue() -> None:
    state = State(num_blocks=40, block_size=4)
    state.run(make_sequence(0, 100, num_computed=99))
    queue = Watched([make_sequence(i, 100) for i in range(1, 5000)])
    view = PlanView(state.running, queue, queue, state.holders, state.blocks)
    assert shares(plan_step(view, StepLimits(1000, 64), FCFS)) == {0: 1}
    assert 0 < queue.num_read < 100
    queue.num_read = 0
    plan_step(view, StepLimits(1000, 1), FCFS)
    assert queue.num_read == 0, "nobody has to be looked at when there is no seat"


def test_a_short_one_is_found_behind_any_number_of_long_ones_that_wait_for_their_turn() -> None:
    state = State(num_blocks=40_000, block_size=4)
    state.run(make_sequence(0, 900))
    state.waiting = [make_sequence(i, 900) for i in range(1, 150)] + [make_sequence(150, 5)]
    plan = state.plan(max_num_tokens=64, max_num_seqs=256)
    assert shares(plan)[150] == 5
    assert len(shares(plan)) == 2


def test_a_small_one_is_found_behind_any_number_that_do_not_fit() -> None:
    state = State(num_blocks=64, block_size=4)
    state.run(make_sequence(0, 100, num_computed=99))
    state.waiting = [make_sequence(i, 200) for i in range(1, 150)] + [make_sequence(150, 5)]
    plan = state.plan(max_num_tokens=1000, max_num_seqs=256)
    assert shares(plan) == {0: 1, 150: 5}
    assert plan.passed
    for sequence in state.waiting[:32]:
        sequence.num_passes = MOST_PASSES
    assert shares(state.plan(max_num_tokens=1000, max_num_seqs=256)) == {0: 1}, "starved"
