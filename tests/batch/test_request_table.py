"""Rows come, grow and go."""

from __future__ import annotations

import pytest

from pagemill.batch.request_table import RequestTable
from pagemill.messages import NewSequence, SamplingSpec, ScheduledSequence


def new(
    seq_id: int, tokens: tuple[int, ...] = (1,), prompt: int = 1, index: int = 0
) -> NewSequence:
    return NewSequence(seq_id, "r", tokens, prompt, index, SamplingSpec(seed=seq_id))


def row_of(table: RequestTable, seq_id: int) -> int:
    return int(table.rows([ScheduledSequence(seq_id, 0, 1, 0, (), 0)])[0])


def test_rows_keep_their_data_while_the_table_grows() -> None:
    table = RequestTable()
    for seq_id in range(70):
        table.add([new(seq_id, tuple(range(seq_id, seq_id + 9)), 5, seq_id % 3)])
    table.append(3, [777] * 1000)
    table.set_blocks([ScheduledSequence(3, 0, 1, 100, (6, 7), 0)])
    for seq_id in range(70):
        row = row_of(table, seq_id)
        assert table.known_tokens(row)[:9].tolist() == list(range(seq_id, seq_id + 9))
        assert table.num_prompt_tokens(row) == 5
        assert table.sample_index(row) == seq_id % 3
        assert table.spec(row).seed == seq_id
    assert table.known_tokens(row_of(table, 3)).tolist() == [*range(3, 12), *[777] * 1000]
    assert table.block_tables[row_of(table, 3), 100:102].tolist() == [6, 7]


def test_block_changes_leave_the_rest_of_a_row() -> None:
    table = RequestTable()
    table.add([new(1)])
    table.set_blocks([ScheduledSequence(1, 0, 1, 0, (5, 6, 7), 0)])
    table.set_blocks([ScheduledSequence(1, 0, 1, 1, (9,), 0)])
    table.set_blocks([ScheduledSequence(1, 0, 1, 3, (), 0)])
    assert table.block_tables[row_of(table, 1), :3].tolist() == [5, 9, 7]


def test_removed_rows_are_used_again() -> None:
    table = RequestTable()
    for seq_id in range(1000):
        table.add([new(seq_id)])
        table.remove([seq_id, 5_000_000])
    assert len(table) == 0 and len(table.num_tokens) == 16
    assert 999 not in table


def test_second_row_for_a_sequence_is_our_own_mistake() -> None:
    table = RequestTable()
    table.add([new(1)])
    with pytest.raises(AssertionError):
        table.add([new(1)])
