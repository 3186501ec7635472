"""Every policy keeps what queues and planner rely on; the order of each."""

from __future__ import annotations

import pytest

from pagemill.core.policies import POLICIES
from pagemill.core.policies.fcfs import FirstComeFirstServed
from pagemill.core.policies.priority import STEP_S, Priority
from tests.core.fake_ranks import make_request, policy_names
from tests.core.test_planner import make_sequence
from tests.core.test_simulation import Simulation


@pytest.mark.parametrize("name", policy_names())
def test_keys_are_distinct_and_do_not_change_while_a_sequence_runs(name: str) -> None:
    policy = POLICIES.load(name)()
    root = make_sequence(0, 5)
    sequences = [root, root.fork(1, 1), root.fork(2, 2), make_sequence(3, 5), make_sequence(4, 5)]
    for key in (policy.admission_key, policy.victim_key):
        before = [key(sequence) for sequence in sequences]
        assert len(set(before)) == len(before)
        for sequence in sequences:
            sequence.append((1, 2), 0.0)
            sequence.num_computed = 3
            sequence.num_preemptions += 1
        assert [key(sequence) for sequence in sequences] == before


def test_fcfs_serves_requests_in_order_and_samples_by_index_whenever_they_were_forked() -> None:
    policy = FirstComeFirstServed()
    first, second = make_sequence(0, 5), make_sequence(1, 5)
    fork = first.fork(7, 1)
    in_order = [first, fork, second]
    assert sorted([second, fork, first], key=policy.admission_key) == in_order
    assert sorted([second, fork, first], key=policy.victim_key) == in_order


def served(*requests: tuple[str, int, float]) -> list[str]:
    """Return the order in which one seat serves (name, priority, arrival in seconds)."""
    sim = Simulation(64, 4, max_model_len=64, max_tokens=64, max_seqs=1, policy="priority")
    for name, priority, arrival_time in requests:
        sim.add(make_request(name, 8, priority=priority, arrival_time=arrival_time))
    order: list[str] = []
    while sim.scheduler.has_unfinished():
        sim.step()
        order += [name for name, samples in sim.samples.items() if samples and name not in order]
    return order


def test_lower_priority_numbers_are_served_first_and_arrival_breaks_ties() -> None:
    order = served(("low", 5, 0.0), ("plain", 0, 1.0), ("urgent", -1, 2.0), ("later", 0, 3.0))
    assert order == ["urgent", "plain", "later", "low"]


def test_waiting_makes_up_for_priority() -> None:
    assert served(("old", 1, 0.0), ("new", 0, STEP_S - 1)) == ["new", "old"]
    assert served(("old", 1, 0.0), ("new", 0, STEP_S + 1)) == ["old", "new"]


def test_running_sequence_with_the_last_turn_gives_way() -> None:
    policy = Priority()
    urgent, low = make_sequence(0, 5), make_sequence(1, 5)
    low.group.request = make_request("low", 5, priority=3)
    assert max([urgent, low], key=policy.victim_key) is low
