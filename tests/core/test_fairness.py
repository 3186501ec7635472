"""Short requests beside long ones, small beside large: nobody waits for the whole of another."""

from __future__ import annotations

import pytest

from pagemill.core.planner import MOST_PASSES
from pagemill.core.policies import POLICIES
from tests.core.fake_ranks import make_request
from tests.core.test_simulation import Simulation

REGISTERED = tuple(name for name in POLICIES.names() if name != "shuffled")


def first_token_steps(sim: Simulation, max_steps: int) -> dict[str, int]:
    """Run some steps; return the step, counted from 1, in which each request got its first token."""
    first: dict[str, int] = {}
    for number in range(1, max_steps + 1):
        sim.step()
        for request_id, samples in sim.samples.items():
            if any(sample.token_ids for sample in samples.values()):
                first.setdefault(request_id, number)
    return first


@pytest.mark.parametrize("policy", REGISTERED)
def test_short_requests_do_not_wait_for_a_prompt_of_twenty_budgets(policy: str) -> None:
    budget = 32
    sim = Simulation(
        num_blocks=64,
        block_size=16,
        max_model_len=1000,
        max_tokens=budget,
        max_seqs=16,
        policy=policy,
    )
    sim.add(make_request("long", 20 * budget))
    sim.step()
    for number in range(5):
        sim.add(make_request(f"short{number}", 10))
    first = first_token_steps(sim, 6)
    assert sorted(first) == [f"short{number}" for number in range(5)]
    sim.run()


@pytest.mark.parametrize("policy", REGISTERED)
def test_long_prompt_goes_on_while_short_requests_keep_coming(policy: str) -> None:
    budget = 32
    sim = Simulation(
        num_blocks=64,
        block_size=16,
        max_model_len=1000,
        max_tokens=budget,
        max_seqs=16,
        policy=policy,
    )
    sim.add(make_request("long", 20 * budget))
    first: dict[str, int] = {}
    for number in range(60):
        sim.add(make_request(f"short{number}", 30, max_tokens=1))
        sim.step()
        if sim.samples["long"]:
            first.setdefault("long", number)
    # At least half of the budget is its own in every step.
    assert first["long"] <= 42
    sim.run()


@pytest.mark.parametrize("policy", REGISTERED)
def test_request_without_blocks_lets_smaller_ones_pass_and_is_not_starved(policy: str) -> None:
    sim = Simulation(
        num_blocks=16, block_size=4, max_model_len=64, max_tokens=256, max_seqs=64, policy=policy
    )
    sim.add(make_request("holder", 20, max_tokens=40))
    sim.step()
    sim.add(make_request("big", 60))
    served_before_big = []
    for number in range(200):
        name = f"small{number}"
        sim.add(make_request(name, 4, max_tokens=3))
        sim.step()
        served_before_big = [n for n, s in sim.samples.items() if n.startswith("small") and s]
        if sim.samples["big"]:
            break
    assert sim.samples["big"], "the big one is starved"
    assert 1 <= len(served_before_big) <= 2 * MOST_PASSES + 1
    sim.run()
