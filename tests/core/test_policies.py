"""Every policy keeps what queues and planner rely on; the order of each."""

from __future__ import annotations

import pytest

from pagemill.core.policies import POLICIES
from pagemill.core.policies.fcfs import FirstComeFirstServed
from tests.core.fake_ranks import policy_names
from tests.core.test_planner import make_sequence


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
