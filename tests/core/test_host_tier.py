"""The host tier's bookkeeping: what is kept, shared, found, given up and lost."""

from __future__ import annotations

import dataclasses

import pytest

from pagemill.core.block_manager import BlockManager
from pagemill.core.host_tier import HostTier, SwappedTable
from pagemill.core.policies.fcfs import FirstComeFirstServed
from pagemill.core.policies.walled import WalledPolicy
from pagemill.core.roster import Roster
from pagemill.host_tier_plan import HostTierPlan, MoveCosts
from pagemill.messages import SwapIn, SwapOut
from tests.core.fake_ranks import NO_PREFIXES, make_request, tier_plan
from tests.core.test_simulation import Simulation

NAMES = [bytes([number]) * 16 for number in range(10)]


def tier(num_slots: int = 8, *, mode: str = "auto", **costs: float) -> HostTier:
    plan = tier_plan(num_slots)
    plan = dataclasses.replace(plan, costs=dataclasses.replace(plan.costs, **costs))
    return HostTier(plan, 4, mode=mode)


def test_swapped_sequence_holds_its_slots_until_it_is_back() -> None:
    host = tier()
    assert host.swap_out(5, [10, 11, 12], [], 9)
    out, into = host.take_moves()
    assert out == (SwapOut(10, 0), SwapOut(11, 1), SwapOut(12, 2)) and into == ()
    assert host.table(5) == SwappedTable((0, 1, 2), 9)
    host.check()
    for slot, block in ((0, 20), (1, 21), (2, 22)):
        host.swap_in(slot, block)
    host.drop(5, after_step=True)
    assert host.usage == 3 / 8, "what this step reads is not given away in it"
    assert host.take_moves()[1] == (SwapIn(0, 20), SwapIn(1, 21), SwapIn(2, 22))
    assert host.table(5) is None and host.usage == 0.0
    host.check()


def test_only_full_blocks_have_a_name_and_only_computed_ones_move() -> None:
    host = tier()
    blocks = BlockManager(8, 4, caches_prefixes=True, tier=host)
    sequence = Roster(blocks, WalledPolicy(FirstComeFirstServed(NO_PREFIXES)), 1).enter(
        make_request("a", 13)
    )
    names = sequence.block_names
    # Two full blocks and a half; a fourth block of the table holds nothing yet.
    a, b, c, _ = blocks.extend(sequence.seq_id, 0, 13).block_ids
    sequence.num_computed = 10
    assert blocks.swap_out(sequence)
    assert host.take_moves()[0] == (
        SwapOut(a, 0, names[0]), SwapOut(b, 1, names[1]), SwapOut(c, 2)
    )  # fmt: skip
    assert host.find(names[1]) == 1 and host.find(names[2]) is None


def test_blocks_that_are_here_already_are_shared_and_not_written_again() -> None:
    host = tier()
    host.swap_out(1, [3, 4, 5], NAMES[:2], 9)
    host.take_moves()
    assert host.swap_out(2, [3, 4, 6], NAMES[:2], 11)
    assert host.take_moves()[0] == (SwapOut(6, 3),)
    assert host.table(2) == SwappedTable((0, 1, 3), 11)
    host.check()
    host.drop(1)
    host.drop(2)
    host.check()
    assert host.find(NAMES[0]) == 0, "a prefix stays after its last holder"


def test_without_room_nothing_moves_and_nothing_is_held() -> None:
    host = tier(3)
    assert host.swap_out(1, [0, 1], [], 8)
    assert not host.swap_out(2, [2, 3], [], 8)
    assert len(host.take_moves()[0]) == 2
    host.check()
    host.drop(1)
    host.keep(7, NAMES[0])
    host.take_moves()
    # A prefix that nobody holds makes room.
    assert host.swap_out(3, [1, 2, 3], [], 12)
    assert host.find(NAMES[0]) is None


@pytest.mark.parametrize(
    ("mode", "swap_s", "swaps"),
    [
        ("auto", 1e-4, True),
        ("auto", 1.0, False),
        ("swap", 1.0, True),
        ("recompute", 1e-9, False),
    ],
)
def test_preemption_swaps_when_it_is_cheaper_or_asked_for(
    mode: str, swap_s: float, swaps: bool
) -> None:
    host = tier(mode=mode, swap_out_s=swap_s, swap_in_s=swap_s)
    assert host.swap_out(1, [0, 1], [], 8) is swaps
    assert (host.take_moves()[0] != ()) is swaps


def test_long_contexts_swap_and_short_ones_compute_again() -> None:
    costs = MoveCosts(swap_out_s=3e-3, swap_in_s=3e-3, compute_token_s=1e-3, compute_context_s=1e-5)
    plan = HostTierPlan(num_slots=1000, slot_bytes=1, place="memory", costs=costs)
    swaps = [
        HostTier(plan, 4).swap_out(1, range(length // 4), [], length)
        for length in (4, 40, 80, 200, 1000)
    ]
    assert swaps == [False, False, False, True, True]


def test_evicted_prefixes_are_kept_until_the_slot_is_needed_longest_unused_first() -> None:
    host = tier(3)
    for block, name in enumerate(NAMES[:3]):
        host.keep(block, name)
        host.take_moves()
    host.keep(0, NAMES[0])  # evicted again: it is here, and was used last
    assert host.take_moves()[0] == ()
    host.keep(9, NAMES[5])
    assert host.take_moves()[0] == (SwapOut(9, 1, NAMES[5]),)
    assert [host.find(NAMES[i]) for i in (0, 1, 2, 5)] == [0, None, 2, 1]
    host.check()


def test_a_step_that_evicts_more_than_fits_writes_no_slot_twice() -> None:
    host = tier(2)
    for block, name in enumerate(NAMES[:6]):
        host.keep(block, name)
    out = host.take_moves()[0]
    assert len({move.slot for move in out}) == len(out) == 2
    host.check()


def test_what_a_plan_found_is_not_taken_for_another_block_in_the_same_step() -> None:
    host = tier(1)
    host.keep(0, NAMES[0])
    host.take_moves()
    slot = host.find(NAMES[0])
    assert slot is not None
    host.claim(slot)
    host.keep(1, NAMES[1])
    host.swap_in(slot, 4)
    assert host.take_moves() == ((), (SwapIn(slot, 4),))
    assert host.find(NAMES[0]) == slot


def test_prefixes_that_are_dear_to_copy_are_neither_kept_nor_found() -> None:
    host = tier(swap_in_s=1.0)
    host.keep(0, NAMES[0])
    assert host.take_moves() == ((), ())
    assert host.find(NAMES[0]) is None


def test_lost_slots_cost_their_sequences_what_they_had_here() -> None:
    host = tier()
    host.swap_out(1, [0, 1], NAMES[:2], 8)
    host.swap_out(2, [0, 5], [NAMES[0], NAMES[7]], 8)
    host.swap_out(3, [6], [NAMES[8]], 4)
    host.take_moves()
    assert host.lose([0]) == [1, 2]
    assert host.find(NAMES[0]) is None and host.find(NAMES[1]) == 1
    assert host.swapped() == [3]
    host.check()
    assert host.close() == [3]
    assert not host.swap_out(4, [0], [], 4)
    host.keep(0, NAMES[0])
    assert host.take_moves() == ((), ())
    host.check()


def test_forgetting_leaves_swapped_sequences_theirs() -> None:
    host = tier()
    host.swap_out(1, [0, 1], NAMES[:2], 8)
    host.keep(3, NAMES[3])
    host.take_moves()
    host.forget()
    assert host.find(NAMES[0]) is host.find(NAMES[3]) is None
    assert host.table(1) == SwappedTable((0, 1), 8)
    assert host.take_moves() == ((), ())
    host.check()


# ------------------------------------------------------------ under a scheduler


def crowded(**changes: object) -> Simulation:
    arguments: dict[str, object] = {
        "num_blocks": 8, "block_size": 4, "max_model_len": 32, "max_tokens": 64, "max_seqs": 8,
        "num_slots": 32,
    }  # fmt: skip
    return Simulation(**{**arguments, **changes})  # type: ignore[arg-type]


def test_swapped_sequences_wait_in_their_own_queue_and_compute_nothing_twice() -> None:
    sim = crowded()
    for number in range(3):
        sim.add(make_request(f"r{number}", tuple(range(number, number + 10)), max_tokens=15))
    swapped = 0
    while sim.scheduler.has_unfinished():
        step = sim.step()
        swapped = max(swapped, step.queues.swapped)
    sim.step()
    sim.check_end()
    assert swapped > 0 and sim.num_swapped == sim.num_preempted > 0
    # Each known token but the last of each request was computed once.
    assert sim.ranks.num_computed == 3 * (10 + 15 - 1)
    assert sim.ranks.num_in == sim.ranks.num_out > 0


def test_recompute_swaps_nothing() -> None:
    sim = crowded(mode="recompute")
    for number in range(3):
        sim.add(make_request(f"r{number}", tuple(range(number, number + 10)), max_tokens=15))
    sim.run()
    assert sim.num_preempted > 0 and sim.num_swapped == sim.ranks.num_out == 0
    assert sim.ranks.num_computed > 3 * (10 + 15 - 1)


def test_aborting_a_swapped_request_frees_its_slots() -> None:
    sim = crowded()
    for number in range(3):
        sim.add(make_request(f"r{number}", tuple(range(number, number + 10)), max_tokens=15))
    while not sim.scheduler.queue_sizes().swapped:
        sim.step()
    for number in range(3):
        sim.record(sim.scheduler.abort(f"r{number}"))
        sim.scheduler.check_invariants()
    assert sim.scheduler.host_tier_usage() == 0.0
    sim.run()


def test_forks_come_back_from_one_copy_of_their_prompt() -> None:
    sim = crowded(num_blocks=9, caches_prefixes=True)
    sim.add(make_request("n", tuple(range(50, 66)), num_samples=4, max_tokens=14))
    sim.run()
    assert sim.num_swapped > 0
    # Four samples of up to eight blocks, of which the four of the prompt went out once.
    assert sim.ranks.num_out <= 4 + 4 * 4


def test_evicted_prefix_comes_back_instead_of_being_computed() -> None:
    sim = crowded(caches_prefixes=True)
    prompts = [tuple(range(20 * n, 20 * n + 24)) for n in range(3)]
    for round_ in range(2):
        for number, prompt in enumerate(prompts):
            sim.add(make_request(f"r{round_}{number}", prompt, max_tokens=2))
            sim.run()
    assert sim.num_host_hits > 0 and sim.num_hits == 3 * 20
    assert sim.samples["r00"][0].token_ids == sim.samples["r10"][0].token_ids


def test_a_tier_that_lasts_gets_prefixes_as_they_are_computed_and_the_rest_at_the_end() -> None:
    sim = crowded(num_blocks=64, caches_prefixes=True, lasts=True)
    sim.add(make_request("a", tuple(range(100, 124)), max_tokens=4))
    sim.step()
    assert sim.ranks.num_out == 0, "nothing is there before the step is done"
    sim.step()
    assert sim.ranks.num_out == 6
    sim.run()
    sim.add(make_request("b", tuple(range(200, 216)), max_tokens=1))
    sim.step()
    last = sim.scheduler.last_step()
    assert last is not None and len(last.block_moves.swap_out) == 4
    sim.ranks.execute(last)
    sim.scheduler.check_invariants()
    assert sim.scheduler.last_step() is None


def test_two_requests_of_one_step_bring_a_prefix_back_once() -> None:
    sim = crowded(num_blocks=16, caches_prefixes=True)
    sim.add(make_request("a", tuple(range(100, 124)), max_tokens=1))
    sim.run()
    for other in range(3):  # these take its blocks
        sim.add(
            make_request(f"o{other}", tuple(range(200 * other, 200 * other + 30)), max_tokens=1)
        )
        sim.run()
    before = sim.ranks.num_in
    sim.add(make_request("b", tuple(range(100, 124)), max_tokens=1))
    sim.add(make_request("c", tuple(range(100, 124)), max_tokens=1))
    sim.run()
    assert sim.ranks.num_in - before <= 5
    assert sim.num_hits == 2 * 20


def test_a_block_that_does_not_come_back_is_computed_again() -> None:
    sim = crowded(caches_prefixes=True)
    prompt = tuple(range(100, 124))
    sim.add(make_request("a", prompt, max_tokens=2))
    sim.run()
    sim.add(make_request("o", tuple(range(300, 330)), max_tokens=2))
    sim.run()
    sim.ranks.spoilt = set(sim.ranks.host)
    sim.add(make_request("b", prompt, max_tokens=2, num_samples=2))
    sim.run()
    assert sim.ranks.num_lost > 0
    assert sim.samples["b"][0].token_ids == sim.samples["a"][0].token_ids


def test_the_end_of_the_tier_costs_no_request() -> None:
    sim = crowded()
    for number in range(4):
        sim.add(make_request(f"r{number}", tuple(range(number, number + 10)), max_tokens=15))
    while not sim.scheduler.queue_sizes().swapped:
        sim.step()
    sim.ranks.ends_tier = True
    sim.step()
    assert sim.scheduler.queue_sizes().swapped == 0
    sim.run()
    assert sim.scheduler.host_tier_usage() == 0.0
