"""Who gives way, in which order."""

from __future__ import annotations

from dataclasses import dataclass

from pagemill.core.preemption import VictimQueue
from pagemill.core.sequence import Sequence
from tests.core.test_planner import FCFS, make_sequence


@dataclass
class Frees:
    """Says which sequences would free a block."""

    seq_ids: set[int]

    def frees_any(self, sequence: Sequence) -> bool:
        return sequence.seq_id in self.seq_ids


def victims(
    needy_id: int, running_ids: list[int], holder_ids: list[int], freeing_ids: set[int]
) -> list[int]:
    """Return everybody who gives way to one sequence, in order."""
    sequences = {i: make_sequence(i, 1) for i in [*running_ids, *holder_ids]}
    queue = VictimQueue(
        [sequences[i] for i in running_ids],
        [sequences[i] for i in holder_ids],
        FCFS,
    )
    order = []
    while victim := queue.next_for(sequences[needy_id], Frees(freeing_ids)):
        order.append(victim.seq_id)
    return order


def test_waiting_holders_that_free_a_block_give_way_before_running_ones() -> None:
    assert victims(1, [0, 1, 2, 3], [4, 5, 6], {4, 6}) == [6, 4, 3, 2]


def test_nobody_gives_way_to_a_later_one() -> None:
    assert victims(2, [0, 1, 2], [], set()) == []
    assert victims(3, [0, 3], [1, 2], {1, 2}) == []


def test_first_running_one_takes_from_everybody_and_from_sharers_last() -> None:
    assert victims(3, [3, 4], [1, 2, 5], {2}) == [2, 4, 5, 1]


def test_first_to_be_admitted_takes_from_all_that_wait_but_itself() -> None:
    assert victims(1, [], [1, 2, 3], set()) == [3, 2]
