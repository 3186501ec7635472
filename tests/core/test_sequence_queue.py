"""Order, removal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.core.policies.fcfs import FirstComeFirstServed
from pagemill.core.sequence_queue import SequenceQueue
from tests.core.test_planner import make_sequence


@given(order=st.permutations(range(8)), taken=st.sets(st.integers(0, 7)))
def test_queue_is_sorted_whatever_is_added_and_removed(order: list[int], taken: set[int]) -> None:
    queue = SequenceQueue(FirstComeFirstServed().admission_key)
    sequences = {seq_id: make_sequence(seq_id, 1) for seq_id in order}
    for seq_id in order:
        queue.add(sequences[seq_id])
    for seq_id in taken:
        queue.remove(sequences[seq_id])
    assert [s.seq_id for s in queue] == sorted(set(order) - taken)
    assert len(queue) == 8 - len(taken)


def test_equal_keys_are_told_apart_by_id() -> None:
    queue = SequenceQueue(lambda sequence: (0,))
    first, second = make_sequence(1, 1), make_sequence(2, 1)
    queue.add(second)
    queue.add(first)
    queue.remove(second)
    assert list(queue) == [first]


def test_removing_what_is_not_queued_is_a_programming_error() -> None:
    queue = SequenceQueue(lambda sequence: (0,))
    queue.add(make_sequence(2, 1))
    with pytest.raises(AssertionError, match="sequence 1"):
        queue.remove(make_sequence(1, 1))
