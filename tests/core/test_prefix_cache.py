"""What is found again, and what must not be: names of blocks, hits, eviction."""

from __future__ import annotations

import pytest

from pagemill.core.prefix_cache import root_name
from tests.core.fake_ranks import make_request
from tests.core.test_simulation import Simulation

STEM = tuple(range(100, 164))


def simulation(num_blocks: int = 64, *, block_size: int = 4, max_tokens: int = 256) -> Simulation:
    return Simulation(
        num_blocks, block_size, max_model_len=64, max_tokens=max_tokens, max_seqs=16,
        caches_prefixes=True,
    )  # fmt: skip


def run_one(sim: Simulation, request_id: str, prompt: tuple[int, ...], **request: object) -> int:
    """Run a request to its end; return how many tokens of its prompt were found."""
    before = sim.num_hits
    sim.add(make_request(request_id, prompt, **request))  # type: ignore[arg-type]
    sim.run()
    return sim.num_hits - before


def test_finished_request_leaves_its_prefix() -> None:
    sim = simulation()
    assert run_one(sim, "first", STEM[:22]) == 0
    assert run_one(sim, "second", (*STEM[:22], 7)) == 20
    assert run_one(sim, "other", (1, *STEM[1:22])) == 0


def test_generated_tokens_are_found_as_a_prompt() -> None:
    sim = simulation()
    run_one(sim, "first", STEM[:6], max_tokens=8)
    answer = tuple(sim.samples["first"][0].token_ids)
    # Of 14 tokens the last was never computed: three full blocks.
    assert run_one(sim, "second", (*STEM[:6], *answer, 5)) == 12


def test_last_token_is_computed_although_all_blocks_are_found() -> None:
    sim = simulation()
    run_one(sim, "first", STEM[:16])
    assert run_one(sim, "second", STEM[:16]) == 12


def test_equal_prompts_in_one_step_share() -> None:
    sim = simulation()
    for number in range(5):
        sim.add(make_request(f"r{number}", STEM[:32]))
    step = sim.step()
    assert [share.num_tokens for share in step.scheduled] == [32, 4, 4, 4, 4]
    sim.run()
    assert sim.num_hits == 4 * 28


def test_prompt_cut_in_chunks_is_shared_as_far_as_the_step_computes_it() -> None:
    sim = simulation(max_tokens=24)
    sim.add(make_request("long", STEM[:40]))
    sim.step()  # 24 of 40
    sim.add(make_request("same", STEM[:40]))
    step = sim.step()  # the last 16, and what is left of the budget
    assert [share.num_tokens for share in step.scheduled] == [16, 4]
    sim.run()


def test_salts_and_labels_keep_prefixes_apart() -> None:
    sim = simulation()
    run_one(sim, "plain", STEM[:22])
    assert run_one(sim, "salted", STEM[:22], salt="a") == 0
    assert run_one(sim, "again", STEM[:22], salt="a") == 20
    assert run_one(sim, "another", STEM[:22], salt="b") == 0
    names = {
        root_name(keys)
        for keys in (
            (),
            (("cache_salt", "foo"),),
            (("adapter", "foo"),),
            (("cache_salt", "f"), ("oo", "")),
            (("cache_salt", "foo"), ("adapter", "foo")),
            (("cache_saltfoo", ""),),
        )
    }
    assert len(names) == 6


def test_eviction_takes_the_longest_unused_and_tails_first() -> None:
    sim = simulation(num_blocks=16)  # 64 tokens
    run_one(sim, "old", STEM[:24], max_tokens=1)
    run_one(sim, "new", (9, *STEM[:23]), max_tokens=1)
    # 12 blocks are cached, 4 free: two more than those cost the old one two blocks of its tail.
    run_one(sim, "big", (8, *STEM[:23]), max_tokens=1)
    assert run_one(sim, "old again", STEM[:24], max_tokens=1) == 16
    # Which took the next two, of the tail of the one that is unused for longest now.
    assert run_one(sim, "new again", (9, *STEM[:23]), max_tokens=1) == 16


def test_hit_on_a_block_that_nobody_holds_costs_a_block() -> None:
    sim = simulation(num_blocks=16)
    run_one(sim, "first", STEM[:40], max_tokens=1)
    # Ten blocks are cached. Three requests claim them together, and each needs its own after that.
    for number in range(3):
        sim.add(make_request(f"r{number}", (*STEM[:40], number), max_tokens=12))
    sim.run()
    assert sim.num_hits == 3 * 40


def test_prompt_logprobs_are_computed_and_not_found() -> None:
    sim = simulation()
    run_one(sim, "first", STEM[:22])
    assert run_one(sim, "scored", STEM[:22], prompt_logprobs=1) == 0
    assert sim.prompt_scores["scored"] == list(range(1, 22))
    assert run_one(sim, "after", STEM[:22]) == 20


def test_reset_finds_nothing_and_loses_nothing() -> None:
    sim = simulation()
    run_one(sim, "first", STEM[:22])
    sim.add(make_request("running", STEM[:22], max_tokens=9))
    sim.step()
    sim.scheduler.forget_prefixes()
    sim.scheduler.check_invariants()
    sim.run()
    sim.scheduler.forget_prefixes()
    assert run_one(sim, "after", STEM[:22]) == 0


@pytest.mark.parametrize("when", ["never", "begun", "swapped", "back"])
def test_what_was_computed_before_a_reset_is_found_by_nobody_wherever_it_comes_back_from(
    when: str,
) -> None:
    sim = Simulation(
        12, 4, max_model_len=48, max_tokens=64, max_seqs=8, caches_prefixes=True, num_slots=40,
        mode="swap",
    )  # fmt: skip
    sim.add(make_request("old", STEM[30:38], max_tokens=36))
    sim.add(make_request("victim", STEM[:20], max_tokens=12))
    sim.step()
    if when == "begun":
        sim.scheduler.forget_prefixes()
    while not sim.scheduler.queue_sizes().swapped:
        sim.step()
    if when == "swapped":
        sim.scheduler.forget_prefixes()
    while sim.scheduler.queue_sizes().swapped:
        sim.step()
    if when == "back":
        sim.scheduler.forget_prefixes()
    sim.run()
    assert sim.num_swapped > 0
    answer = tuple(sim.samples["victim"][0].token_ids)
    assert (run_one(sim, "again", (*STEM[:20], *answer)) == 0) == (when != "never")


def test_the_policy_prefix_waits_for_no_block_of_a_sequence_that_a_reset_took_the_names_of() -> (
    None
):
    sim = Simulation(
        12, 4, max_model_len=48, max_tokens=64, max_seqs=8, policy="prefix", caches_prefixes=True,
        num_slots=40, mode="swap",
    )  # fmt: skip
    sim.add(make_request("old", STEM[30:38], max_tokens=36))
    sim.add(make_request("victim", STEM[:21], max_tokens=12))
    while not sim.scheduler.queue_sizes().swapped:
        sim.step()
    sim.scheduler.forget_prefixes()
    sim.run()
    queue = sim.scheduler._policy._policy._queue  # type: ignore[attr-defined]
    assert not queue._awaiting and not queue._awaited


def test_a_block_that_a_reset_finds_half_full_is_found_by_nobody() -> None:
    sim = simulation()
    sim.add(make_request("first", STEM[:3], max_tokens=9))
    sim.step()
    sim.scheduler.forget_prefixes()
    sim.run()
    answer = tuple(sim.samples["first"][0].token_ids)
    assert run_one(sim, "after", (*STEM[:3], *answer)) == 0
    assert run_one(sim, "later", (*STEM[:3], *answer)) == 8


def test_who_computes_all_again_after_a_reset_is_found() -> None:
    sim = Simulation(12, 4, max_model_len=48, max_tokens=64, max_seqs=8, caches_prefixes=True)
    sim.add(make_request("old", STEM[30:38], max_tokens=36))
    sim.add(make_request("victim", STEM[:20], max_tokens=12))
    sim.step()
    sim.scheduler.forget_prefixes()
    sim.run()
    assert sim.num_preempted > 0
    answer = tuple(sim.samples["victim"][0].token_ids)
    assert run_one(sim, "again", (*STEM[:20], *answer)) > 20


def test_samples_share_a_found_prefix() -> None:
    sim = simulation()
    run_one(sim, "first", STEM[:22])
    assert run_one(sim, "many", (*STEM[:22], 3), num_samples=4) == 20
