"""Slots for drafts, and what becomes of them: planned last, named when certain, given back."""

from __future__ import annotations

from pagemill.config import SchedulerConfig
from pagemill.core.scheduler import Scheduler
from pagemill.messages import SchedulerOutput, SequenceOutput, SequenceUpdate, StepOutput
from tests.core.fake_ranks import make_request
from tests.core.test_simulation import Simulation, drafting


def make_scheduler(
    *, num_blocks: int = 100, num_drafts: int = 6, max_tokens: int = 64, max_model_len: int = 100
) -> Scheduler:
    config = SchedulerConfig(max_num_batched_tokens=max_tokens, max_num_seqs=8, policy="fcfs")
    return Scheduler(
        config, block_size=4, num_blocks=num_blocks, max_model_len=max_model_len,
        caches_prefixes=True, speculative=drafting(num_drafts),
    )  # fmt: skip


def do_step(
    scheduler: Scheduler, *runs: tuple[int, ...]
) -> tuple[SchedulerOutput, list[SequenceUpdate]]:
    """Run a step in which the sequences get these runs in turn, and (1,) after them."""
    left = list(runs)
    step = scheduler.schedule()
    outputs = tuple(
        SequenceOutput(
            share.seq_id,
            (left.pop(0) if left else (1,),) * share.num_samples,
            num_drafted=share.num_drafts,
        )
        for share in step.scheduled
    )
    updates = scheduler.update(step, StepOutput(step.step_id, outputs))
    scheduler.check_invariants()
    return step, updates


def test_a_decode_has_slots_for_drafts_and_a_prompt_has_none() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("r", 5, max_tokens=20))
    first, _ = do_step(scheduler)
    second, _ = do_step(scheduler)
    assert [share.num_drafts for share in first.scheduled] == [0]
    [share] = second.scheduled
    assert (share.num_computed, share.num_tokens, share.num_drafts) == (5, 1, 6)
    assert len(share.block_ids) == 1  # positions 5..11 need a third block beside the two


def test_accepted_drafts_count_as_computed_and_rejected_slots_are_given_back() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("r", 5, max_tokens=40))
    do_step(scheduler)
    assert scheduler.cache_usage() == 0.02
    do_step(scheduler, (2, 3))  # one of six drafts; their slots reached into a third block
    assert scheduler.cache_usage() == 0.02
    step, _ = do_step(scheduler, (4, 5))
    [share] = step.scheduled
    assert (share.num_computed, share.num_tokens) == (7, 1)
    assert scheduler.cache_usage() == 0.03  # 10 tokens


def test_blocks_that_accepted_drafts_fill_are_found_by_the_next_request() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("one", 5, max_tokens=9))
    prompt = make_request("one", 5).prompt_token_ids
    do_step(scheduler)
    do_step(scheduler, (2, 3, 4, 5, 6, 7, 8))  # all six drafts: 12 positions are computed
    do_step(scheduler, (9,))
    assert not scheduler.has_unfinished()
    again = (*prompt, 1, 2, 3, 4, 5, 6, 7, 8)
    other = (*prompt, 1, 2, 3, 9, 5, 6, 7, 8)
    scheduler.add(make_request("two", again, max_tokens=1))
    _, updates = do_step(scheduler)
    assert updates[0].num_cached_tokens == 12
    scheduler.add(make_request("three", other, max_tokens=1))
    _, updates = do_step(scheduler)
    assert updates[0].num_cached_tokens == 8


def test_a_stop_inside_a_run_cuts_it() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("r", 5, max_tokens=40, eos=frozenset({3})))
    do_step(scheduler)
    _, updates = do_step(scheduler, (2, 3, 4, 5))
    assert (updates[0].token_ids, updates[0].finish_reason) == ((2, 3), "stop")
    assert not scheduler.has_unfinished() and scheduler.cache_usage() == 0.0


def test_drafts_take_what_is_left_of_the_budget() -> None:
    scheduler = make_scheduler(max_tokens=6)
    scheduler.add(make_request("a", 3, max_tokens=20))
    scheduler.add(make_request("b", 3, max_tokens=20))
    do_step(scheduler)
    step, _ = do_step(scheduler)
    assert [share.num_drafts for share in step.scheduled] == [4, 0]
    scheduler.add(make_request("c", 4, max_tokens=20))
    step, _ = do_step(scheduler)
    assert [share.num_drafts for share in step.scheduled] == [0, 0, 0]  # the prompt took it


def test_drafts_preempt_nobody() -> None:
    scheduler = make_scheduler(num_blocks=5, max_model_len=20)
    scheduler.add(make_request("a", (1, 2, 3, 4, 5, 6, 7), max_tokens=10))
    scheduler.add(make_request("b", (2, 3, 4, 5, 6, 7, 8), max_tokens=10))
    do_step(scheduler)
    step, _ = do_step(scheduler)  # one block is free: positions 8..11 of one of them
    assert step.num_preempted == 0
    assert [share.num_drafts for share in step.scheduled] == [4, 0]


def test_every_sample_gets_its_own_tokens_with_drafts_in_a_crowded_pool() -> None:
    sim = Simulation(
        12, 4, max_model_len=40, max_tokens=32, max_seqs=6, caches_prefixes=True, num_drafts=5
    )
    for number in range(12):
        sim.add(make_request(f"r{number}", 3 + number, num_samples=1 + number % 3, max_tokens=20))
    sim.run()
    assert sim.num_preempted > 0
    assert sim.ranks.num_accepted > 50
    assert sim.ranks.num_drafted > sim.ranks.num_accepted
