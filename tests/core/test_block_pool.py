"""Ref counts and the free list."""

from __future__ import annotations

import pytest

from pagemill.core.block_pool import BlockPool


def test_block_is_free_again_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(3)
    block, _ = pool.allocate()
    pool.share(block)
    pool.release(block)
    assert (pool.num_free, pool.num_used, pool.ref_count(block)) == (2, 1, 1)
    pool.release(block)
    assert (pool.num_free, pool.num_used, pool.num_cached) == (3, 0, 0)
    pool.check()


def test_every_block_is_handed_out_once() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate()[0] for _ in range(5)) == [0, 1, 2, 3, 4]
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
    pool._num_touched = 1  # block 0 is nowhere
    with pytest.raises(AssertionError, match="1 free"):
        pool.check()


def test_check_sees_a_block_freed_twice() -> None:
    pool = BlockPool(2)
    pool.release(pool.allocate()[0])
    pool._free.append(0)
    with pytest.raises(AssertionError, match="twice"):
        pool.check()


def test_cached_block_that_is_taken_tells_its_name_once() -> None:
    pool = BlockPool(1)
    block, evicted = pool.allocate()
    pool.seal(block, b"a")
    pool.release(block)
    assert evicted is None and pool.find(b"a") == block
    assert pool.allocate() == (block, b"a")
    assert pool.find(b"a") is None
    pool.release(block)
    assert pool.allocate() == (block, None)


def test_block_without_its_name_is_free_or_goes_on() -> None:
    pool = BlockPool(2)
    used, _ = pool.allocate()
    cached, _ = pool.allocate()
    for block, name in ((used, b"u"), (cached, b"c")):
        pool.seal(block, name)
    pool.release(cached)
    for block in (used, cached, cached):
        pool.unname(block)
        pool.check()
    assert (pool.num_free, pool.num_used, pool.num_cached) == (1, 1, 0)
    assert pool.find(b"u") is pool.find(b"c") is None


def test_contents_from_before_are_found_and_taken_in_order() -> None:
    pool = BlockPool(6, [(4, b"old"), (1, b"new"), (2, b"old")])
    pool.check()
    assert (pool.num_free, pool.num_cached) == (4, 2)
    assert (pool.find(b"old"), pool.find(b"new")) == (4, 1)
    assert [pool.allocate() for _ in range(6)] == [
        (0, None), (2, None), (3, None), (5, None), (4, b"old"), (1, b"new"),
    ]  # fmt: skip
