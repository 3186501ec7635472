"""The scheduler's promises, one by one, in small services."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys

import pytest

from pagemill.config import SchedulerConfig
from pagemill.core.policies import POLICIES
from pagemill.core.scheduler import Scheduler
from pagemill.errors import CacheTooSmallError, RequestError, UnknownNameError
from pagemill.messages import (
    EngineRequest,
    SchedulerOutput,
    SequenceOutput,
    SequenceUpdate,
    StepOutput,
    TokenScores,
)
from tests.core.fake_ranks import make_request
from tests.core.test_simulation import Simulation


def make_scheduler(
    *,
    num_blocks: int = 100,
    block_size: int = 4,
    max_model_len: int = 100,
    max_tokens: int = 64,
    max_seqs: int = 8,
    policy: str = "fcfs",
) -> Scheduler:
    config = SchedulerConfig(
        max_num_batched_tokens=max_tokens, max_num_seqs=max_seqs, policy=policy
    )
    return Scheduler(
        config, block_size=block_size, num_blocks=num_blocks, max_model_len=max_model_len
    )


def answer(step: SchedulerOutput, *runs: tuple[int, ...]) -> StepOutput:
    """Return a result in which every sample of every sequence gets the next of `runs`, or (1,)."""
    left = list(runs)
    return StepOutput(
        step.step_id,
        tuple(
            SequenceOutput(
                share.seq_id,
                tuple(left.pop(0) if left else (1,) for _ in range(share.num_samples)),
            )
            for share in step.scheduled
        ),
    )


def do_step(
    scheduler: Scheduler, *runs: tuple[int, ...]
) -> tuple[SchedulerOutput, list[SequenceUpdate]]:
    step = scheduler.schedule()
    updates = scheduler.update(step, answer(step, *runs))
    scheduler.check_invariants()
    return step, updates


# ---------------------------------------------------------------- configuration


def test_cache_that_holds_no_full_request_is_refused_with_the_numbers() -> None:
    with pytest.raises(CacheTooSmallError, match=r"100 tokens needs 25 .* has 24 \(96 tokens\)"):
        make_scheduler(num_blocks=24)
    make_scheduler(num_blocks=24, max_model_len=96)  # the advice works


def test_unknown_policy_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="'lottery'; known: .*fcfs"):
        make_scheduler(policy="lottery")
    assert "fcfs" in POLICIES


def test_the_planning_wing_runs_without_torch() -> None:
    code = "import sys, pagemill.core.scheduler; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------- who can run at all


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_got"), [(9, 1, 1), (9, 5, 1), (8, 5, 2), (10, 0, 0)]
)
def test_prompt_at_the_limit_gets_what_the_context_leaves(
    num_prompt: int, max_tokens: int, num_got: int
) -> None:
    sim = Simulation(3, 4, max_model_len=10, max_tokens=64, max_seqs=2)
    request = make_request("r", num_prompt, max_tokens=max_tokens, prompt_logprobs=0)
    sim.add(request)
    sim.run()
    sample = sim.samples["r"][0]
    assert (len(sample.token_ids), sample.finish_reason) == (num_got, "length")
    assert sim.prompt_scores["r"] == list(range(1, num_prompt))


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "words"),
    [(10, 1, "10 tokens.*10, which.*at most 9"), (11, 0, "11 tokens.*10; .*at most 10"),
     (500, 4, "500 tokens.*max_model_len is 10"), (0, 4, "0 tokens")],
)  # fmt: skip
def test_prompt_over_the_limit_is_answered_at_once_with_both_numbers(
    num_prompt: int, max_tokens: int, words: str
) -> None:
    scheduler = make_scheduler(max_model_len=10)
    scheduler.add(make_request("long", num_prompt, max_tokens=max_tokens))
    scheduler.add(make_request("fine", 3))
    assert scheduler.num_unfinished() == 2
    step, _ = do_step(scheduler)
    assert [(a.request_id, len(step.scheduled)) for a in step.ignored] == [("long", 1)]
    assert re.search(words, step.ignored[0].message)
    assert scheduler.num_unfinished() == 1
    assert do_step(scheduler)[0].ignored == ()


def test_live_request_id_cannot_be_taken_and_an_ended_one_can() -> None:
    scheduler = make_scheduler(max_model_len=10)
    scheduler.add(make_request("a", 3, max_tokens=1))
    scheduler.add(make_request("b", 30))
    for request_id in ("a", "b"):
        with pytest.raises(RequestError, match=f"'{request_id}'") as caught:
            scheduler.add(make_request(request_id, 3))
        assert caught.value.param == "request_id"
    do_step(scheduler)
    scheduler.add(make_request("a", 3))
    scheduler.add(make_request("b", 3))
    assert scheduler.num_unfinished() == 2


# ---------------------------------------------------------------- messages of a step


def test_prompt_is_computed_in_chunks_and_the_last_one_draws() -> None:
    scheduler = make_scheduler(max_tokens=4)
    scheduler.add(make_request("r", 10))
    shares = [do_step(scheduler)[0].scheduled[0] for _ in range(4)]
    assert [(s.num_computed, s.num_tokens, s.num_samples) for s in shares] == [
        (0, 4, 0), (4, 4, 0), (8, 2, 1), (10, 1, 1)
    ]  # fmt: skip


def test_only_what_changed_of_a_table_is_told() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("r", 7, max_tokens=9))
    steps = [do_step(scheduler)[0] for _ in range(3)]
    assert [(s.scheduled[0].block_start, s.scheduled[0].block_ids) for s in steps] == [
        (0, (0, 1)), (2, ()), (2, (2,))
    ]  # fmt: skip
    assert [len(s.new_sequences) for s in steps] == [1, 0, 0]


def test_row_of_an_ended_sequence_is_removed_by_the_next_step_even_if_it_is_empty() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("r", 3, max_tokens=1))
    step, updates = do_step(scheduler)
    assert updates[0].finish_reason == "length"
    assert not scheduler.has_unfinished()
    last = scheduler.schedule()
    assert last.is_empty
    assert last.removed_seq_ids == (step.scheduled[0].seq_id,)
    assert scheduler.schedule().removed_seq_ids == ()


def test_step_crosses_a_process() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("r", 3, num_samples=2))
    step, _ = do_step(scheduler)
    assert pickle.loads(pickle.dumps(step)) == step


def test_second_step_before_the_result_of_the_first_is_a_programming_error() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("r", 3))
    step = scheduler.schedule()
    with pytest.raises(AssertionError, match="step 0 has no result"):
        scheduler.schedule()
    with pytest.raises(AssertionError, match="the result of step 5"):
        scheduler.update(step, StepOutput(5, ()))


def test_queue_sizes_and_usage_are_those_after_planning() -> None:
    scheduler = make_scheduler(max_seqs=2, num_blocks=25)
    for name in "abc":
        scheduler.add(make_request(name, 5))
    assert scheduler.queue_sizes().waiting == 3
    step = scheduler.schedule()
    assert (step.queues.running, step.queues.waiting, step.queues.swapped) == (2, 1, 0)
    assert scheduler.cache_usage() == 4 / 25


# ---------------------------------------------------------------- several samples


def test_samples_share_the_prompt_and_each_writes_its_own_block() -> None:
    scheduler = make_scheduler(num_blocks=25)
    scheduler.add(make_request("r", 10, num_samples=3))
    first, updates = do_step(scheduler, (11,), (12,), (13,))
    assert first.scheduled[0].num_samples == 3
    assert [(u.sample_index, u.token_ids) for u in updates] == [(0, (11,)), (1, (12,)), (2, (13,))]
    assert scheduler.cache_usage() == 3 / 25
    second, _ = do_step(scheduler)
    assert [(s.num_computed, s.num_tokens, s.num_samples) for s in second.scheduled] == [
        (10, 1, 1)
    ] * 3
    assert [(n.sample_index, n.token_ids[10:]) for n in second.new_sequences] == [
        (1, (12,)), (2, (13,))
    ]  # fmt: skip
    assert [source for source, _ in second.block_moves.copies] == [2, 2]
    assert scheduler.cache_usage() == 5 / 25


def test_sample_that_ends_with_its_first_token_leaves_the_others_running() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("r", 10, num_samples=3, eos=frozenset({9})))
    _, updates = do_step(scheduler, (9,), (12,), (9,))
    assert [u.finish_reason for u in updates] == ["stop", None, "stop"]
    step, _ = do_step(scheduler)
    assert [n.sample_index for n in step.new_sequences] == [1]
    assert len(step.scheduled) == 1


def test_more_samples_than_seats_take_turns_and_keep_the_prompt_blocks() -> None:
    sim = Simulation(25, 4, max_model_len=100, max_tokens=64, max_seqs=2)
    sim.add(make_request("r", 10, num_samples=7, max_tokens=5))
    sim.step()
    assert sim.scheduler.queue_sizes().waiting == 5
    sim.run()
    assert sim.ranks.num_computed == 10 + 7 * 4, "the prompt was computed once"


def test_forks_with_a_seat_do_not_wait_behind_a_long_prompt() -> None:
    scheduler = make_scheduler(max_tokens=8)
    scheduler.add(make_request("samples", 8, num_samples=3, max_tokens=20))
    scheduler.add(make_request("long", 60))
    do_step(scheduler)
    for _ in range(3):
        step, _ = do_step(scheduler)
        assert [s.num_tokens for s in step.scheduled] == [1, 1, 1, 5]


def test_samples_are_drawn_once_though_the_root_is_computed_again() -> None:
    sim = Simulation(8, 4, max_model_len=32, max_tokens=64, max_seqs=8)
    sim.add(make_request("a", 12, max_tokens=18))
    sim.add(make_request("b", 10, num_samples=3, max_tokens=12))
    sim.run()
    assert sim.num_preempted > 0


# ---------------------------------------------------------------- preemption


def test_budget_for_one_and_a_half_requests_changes_loses_and_doubles_no_token() -> None:
    sim = Simulation(12, 4, max_model_len=32, max_tokens=64, max_seqs=8)
    for name in ("a", "b", "c", "d"):
        sim.add(make_request(name, 10, max_tokens=22, prompt_logprobs=1))
    sim.run()
    assert sim.num_preempted > 0


def test_preempted_sequence_loses_its_row_and_comes_back_with_its_output() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    scheduler.add(make_request("a", 7, max_tokens=9))
    scheduler.add(make_request("b", 7, max_tokens=9))
    first, _ = do_step(scheduler, (1,), (2,))
    do_step(scheduler, (1,), (3,))
    step, _ = do_step(scheduler)
    lost = first.scheduled[1].seq_id
    assert (step.removed_seq_ids, step.num_preempted) == ((lost,), 1)
    assert [s.seq_id for s in step.scheduled] == [first.scheduled[0].seq_id]
    assert (step.queues.running, step.queues.waiting) == (1, 1)
    while not (step := do_step(scheduler)[0]).new_sequences:
        assert step.num_preempted == 0
    assert step.new_sequences[0].token_ids[7:] == (2, 3)
    assert [(s.num_computed, s.num_tokens) for s in step.scheduled] == [(0, 9)]
    assert step.scheduled[0].block_start == 0
    assert len(step.scheduled[0].block_ids) == 3
    _, updates = do_step(scheduler)
    assert updates[0].num_preemptions == 1


def test_prompt_logprobs_are_owed_once_over_chunks_and_preemptions() -> None:
    scheduler = make_scheduler(max_tokens=4)
    scheduler.add(make_request("r", 10, prompt_logprobs=1))
    owed = [do_step(scheduler)[0].scheduled[0].prompt_logprobs_from for _ in range(4)]
    assert owed == [1, 5, 9, None]
    scheduler = make_scheduler(max_tokens=3)
    scheduler.add(make_request("r", 7, prompt_logprobs=1))
    owed = [do_step(scheduler)[0].scheduled[0].prompt_logprobs_from for _ in range(3)]
    assert owed == [1, 4, None], "the last position of a prompt scores nothing of it"


# ---------------------------------------------------------------- results


def test_any_number_of_tokens_is_taken_and_cut_after_the_stop() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("r", 3, max_tokens=9, stop_ids=frozenset({5})))
    do_step(scheduler, (1, 2))
    step, updates = do_step(scheduler)
    assert (step.scheduled[0].num_computed, step.scheduled[0].num_tokens) == (3, 2)
    step = scheduler.schedule()
    run = (4, 5, 6)
    scores = tuple(TokenScores(token, -1.0, 1) for token in run)
    result = SequenceOutput(step.scheduled[0].seq_id, (run,), scores=(scores,))
    (update,) = scheduler.update(step, StepOutput(step.step_id, (result,)))
    assert (update.token_ids, update.scores) == ((4, 5), scores[:2])
    assert (update.finish_reason, update.stop_reason) == ("stop", 5)
    assert scheduler.cache_usage() == 0.0


def test_chunk_in_mid_prompt_is_no_news() -> None:
    scheduler = make_scheduler(max_tokens=4)
    scheduler.add(make_request("r", 10))
    assert do_step(scheduler)[1] == []


def test_max_tokens_zero_ends_every_sample_without_a_token() -> None:
    sim = Simulation(25, 4, max_model_len=100, max_tokens=4, max_seqs=8)
    sim.add(make_request("r", 10, max_tokens=0, num_samples=2, prompt_logprobs=1))
    sim.run()
    assert [s.finish_reason for s in sim.samples["r"].values()] == ["length", "length"]
    assert sim.prompt_scores["r"] == list(range(1, 10))


def fail_first(step: SchedulerOutput) -> StepOutput:
    result = answer(step)
    broken = SequenceOutput(step.scheduled[0].seq_id, (), error="not finite")
    return StepOutput(step.step_id, (broken, *result.sequences[1:]))


def test_failure_while_the_prompt_is_computed_ends_all_samples_and_no_other_request() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("bad", 3, num_samples=3))
    scheduler.add(make_request("good", 3))
    step = scheduler.schedule()
    updates = scheduler.update(step, fail_first(step))
    assert [(u.request_id, u.sample_index, u.finish_reason, u.error) for u in updates] == [
        ("bad", 0, "error", "not finite"),
        ("bad", 1, "error", "not finite"),
        ("bad", 2, "error", "not finite"),
        ("good", 0, None, None),
    ]
    scheduler.check_invariants()
    assert scheduler.num_unfinished() == 1


def test_failure_of_one_sample_leaves_the_others_running() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("r", 3, num_samples=3))
    do_step(scheduler)
    step = scheduler.schedule()
    updates = scheduler.update(step, fail_first(step))
    assert [u.finish_reason for u in updates] == ["error", None, None]
    assert len(do_step(scheduler)[0].scheduled) == 2


def test_string_stop_found_outside_frees_the_blocks_at_once() -> None:
    scheduler = make_scheduler(max_seqs=1)
    scheduler.add(make_request("r", 3, num_samples=2))
    _, updates = do_step(scheduler)
    for update in updates:  # the first runs, the second waits for a seat
        scheduler.finish(update.seq_id, "stop", "\n")
        scheduler.check_invariants()
        scheduler.finish(update.seq_id, "stop", "\n")
    assert not scheduler.has_unfinished()
    assert scheduler.cache_usage() == 0.0
    assert scheduler.schedule().removed_seq_ids == (updates[0].seq_id,)


def test_times_are_taken_in_order() -> None:
    scheduler = make_scheduler(max_tokens=4)
    scheduler.add(make_request("r", 6, num_samples=2))
    group = scheduler._roster.groups["r"]
    _, updates = do_step(scheduler)
    (root,) = group.sequences.values()
    assert root.first_token_time is None
    _, updates = do_step(scheduler)
    do_step(scheduler)
    for sequence in group.sequences.values():
        assert sequence.first_scheduled_time == updates[0].first_scheduled_time
        assert sequence.first_token_time is not None and sequence.last_token_time is not None
        assert updates[0].first_scheduled_time is not None
        assert updates[0].first_scheduled_time <= sequence.first_token_time
        assert sequence.first_token_time <= sequence.last_token_time
    assert group.arrival_time == 0.0


# ---------------------------------------------------------------- aborts


def run_beside(num_steps: int, *, in_flight: bool, request: EngineRequest) -> Simulation:
    """Abort a request after some steps, beside another one that must not notice."""
    sim = Simulation(25, 4, max_model_len=64, max_tokens=8, max_seqs=4)
    sim.add(request)
    sim.add(make_request("other", 9, max_tokens=12))
    for _ in range(num_steps):
        sim.step()
    if in_flight:
        step, result = sim.begin_step()
    sim.record(sim.scheduler.abort(request.request_id))
    sim.scheduler.check_invariants()
    if in_flight:
        sim.end_step(step, result)
    assert sim.scheduler.abort(request.request_id) == []
    assert sim.scheduler.num_unfinished() == 1
    sim.run()
    return sim


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 6])
@pytest.mark.parametrize("num_samples", [1, 3, 6])
def test_abort_at_any_point_leaves_no_trace(
    num_steps: int, in_flight: bool, num_samples: int
) -> None:
    request = make_request("gone", 20, num_samples=num_samples, max_tokens=30)
    sim = run_beside(num_steps, in_flight=in_flight, request=request)
    assert {s.finish_reason for s in sim.samples["gone"].values()} == {"abort"}
    assert sim.samples["other"][0].finish_reason == "length"


def test_abort_of_an_unknown_or_ended_request_is_nothing() -> None:
    scheduler = make_scheduler()
    assert scheduler.abort("never seen") == []
    scheduler.add(make_request("r", 3, max_tokens=1))
    do_step(scheduler)
    assert scheduler.abort("r") == []
    assert not scheduler.has_unfinished()


def test_abort_frees_blocks_before_the_next_step() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("r", 30, num_samples=4))
    do_step(scheduler)
    do_step(scheduler)
    assert scheduler.cache_usage() > 0
    assert [u.finish_reason for u in scheduler.abort("r")] == ["abort"] * 4
    assert scheduler.cache_usage() == 0.0


def test_request_that_waits_for_its_refusal_can_be_aborted() -> None:
    scheduler = make_scheduler(max_model_len=10)
    scheduler.add(make_request("long", 30, num_samples=2))
    assert [u.sample_index for u in scheduler.abort("long")] == [0, 1]
    assert not scheduler.has_unfinished()
    assert scheduler.schedule().ignored == ()


# ---------------------------------------------------------------- progress


@pytest.mark.parametrize("num_samples", [1, 8])
def test_tight_pool_is_left_behind_without_computing_everything_again_and_again(
    num_samples: int,
) -> None:
    sim = Simulation(40, 4, max_model_len=128, max_tokens=64, max_seqs=32)
    num_needed = 0
    for number in range(32 // num_samples):
        sim.add(make_request(f"r{number}", 20, num_samples=num_samples, max_tokens=40))
        num_needed += 20 + num_samples * 39
    sim.run(max_steps=2000)
    assert sim.num_preempted > 0
    assert sim.ranks.num_computed < 2.5 * num_needed
