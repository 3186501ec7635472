"""Ref counts and the free list."""

from __future__ import annotations

import pytest

from pagemill.core.block_pool import BlockPool


def test_block_is_free_again_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool.share(block)
    pool.release(block)
    assert (pool.num_free, pool.num_used, pool.ref_count(block)) == (2, 1, 1)
    pool.release(block)
    assert (pool.num_free, pool.num_used, pool.num_cached) == (3, 0, 0)
    pool.check()


def test_every_block_is_handed_out_once() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate() for _ in range(5)) == [0, 1, 2, 3, 4]
    with pytest.raises(AssertionError, match="promised a block"):
        pool.allocate()


def test_free_block_cannot_be_shared_or_released() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="block 1 is not in use"):
        pool.share(1)
    with pytest.raises(AssertionError, match="block 0 is not in use"):
        pool.release(0)


def test_check_sees_a_block_that_is_neither_free_nor_used() -> None:
    pool = BlockPool(2)
    pool._free.pop()
    with pytest.raises(AssertionError, match="1 free"):
        pool.check()


def test_check_sees_a_block_freed_twice() -> None:
    pool = BlockPool(2)
    pool._free.append(0)
    with pytest.raises(AssertionError, match="twice"):
        pool.check()
