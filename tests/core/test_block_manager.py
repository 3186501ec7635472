"""Tables, forks and copy-on-write."""

from __future__ import annotations

import pytest

from pagemill.core.block_manager import BlockManager, TableChange


def test_table_grows_by_whole_blocks_and_only_the_new_ones_are_told() -> None:
    blocks = BlockManager(8, 4)
    assert blocks.extend(1, 0, 6) == TableChange(0, (0, 1), ())
    assert blocks.extend(1, 6, 8) == TableChange(2, (), ())
    assert blocks.extend(1, 8, 9) == TableChange(2, (2,), ())
    assert blocks.usage == 3 / 8
    blocks.check()


def test_fork_shares_blocks_and_costs_none() -> None:
    blocks = BlockManager(8, 4)
    blocks.extend(1, 0, 6)
    blocks.fork(1, 2)
    assert blocks.table(2) == blocks.table(1)
    assert blocks.num_free == 6
    blocks.free(1)
    assert blocks.num_free == 6
    blocks.free(2)
    assert blocks.num_free == 8
    blocks.check()


def test_writer_into_a_shared_block_gets_its_own_copy_and_the_last_sharer_writes_in_place() -> None:
    blocks = BlockManager(8, 4)
    blocks.extend(1, 0, 6)
    blocks.fork(1, 2)
    assert blocks.extend(2, 6, 7) == TableChange(1, (2,), ((1, 2),))
    assert blocks.extend(1, 6, 7) == TableChange(2, (), ())
    assert (blocks.table(1), blocks.table(2)) == ([0, 1], [0, 2])
    blocks.check()


def test_full_shared_blocks_are_not_copied() -> None:
    blocks = BlockManager(8, 4)
    blocks.extend(1, 0, 8)
    blocks.fork(1, 2)
    assert blocks.extend(2, 8, 9) == TableChange(2, (2,), ())
    assert blocks.ref_count(0) == blocks.ref_count(1) == 2


def test_shared_block_with_nothing_computed_is_replaced_without_a_copy() -> None:
    blocks = BlockManager(8, 4)
    blocks.extend(1, 0, 8)
    blocks.fork(1, 2)
    # Sequence 2 goes on from position 4: its second block holds nothing it would read.
    assert blocks.extend(2, 4, 8) == TableChange(1, (2,), ())
    blocks.check()


def test_freeing_a_sequence_without_blocks_is_fine() -> None:
    blocks = BlockManager(8, 4)
    blocks.free(7)
    assert blocks.table(7) == []


def test_check_sees_a_ref_count_without_a_table() -> None:
    blocks = BlockManager(8, 4)
    blocks.extend(1, 0, 4)
    blocks._pool.share(0)
    with pytest.raises(AssertionError, match="ref count 2"):
        blocks.check()
