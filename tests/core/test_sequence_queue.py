"""Order, removal."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.core.policies.fcfs import arrival_key
from pagemill.core.sequence_queue import SequenceQueue
from tests.core.test_planner import make_sequence


@settings(deadline=None, max_examples=50)
@given(order=st.permutations(range(8)), taken=st.sets(st.integers(0, 7)))
def test_queue_is_sorted_whatever_is_added_and_removed(order: list[int], taken: set[int]) -> None:
    queue = SequenceQueue(arrival_key)
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


def test_queue_longer_than_a_bucket_is_sorted_too() -> None:
    queue = SequenceQueue(lambda sequence: (sequence.seq_id * 7919 % 5003,))
    sequences = [make_sequence(seq_id, 1) for seq_id in range(3000)]
    for sequence in sequences:
        queue.add(sequence)
    for sequence in sequences[::3]:
        queue.remove(sequence)
    left = [s for s in sequences if s.seq_id % 3]
    assert list(queue) == sorted(left, key=lambda s: s.seq_id * 7919 % 5003)
    assert len(queue) == len(left)
    for sequence in left:
        queue.remove(sequence)
    assert list(queue) == []


def test_place_is_that_of_the_key_when_it_was_added() -> None:
    keys = {1: 5, 2: 6}
    queue = SequenceQueue(lambda sequence: (keys[sequence.seq_id],))
    first, second = make_sequence(1, 1), make_sequence(2, 1)
    queue.add(first)
    queue.add(second)
    keys[1] = 7
    assert list(queue) == [first, second]
    queue.remove(first)
    queue.add(first)
    assert list(queue) == [second, first]
