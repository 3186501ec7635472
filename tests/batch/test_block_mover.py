"""Moves of a step: their order, and what is told when one cannot be done."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.batch.block_mover import BlockMover
from pagemill.batch.kv_store import KVStore
from pagemill.batch.tier_file import TierFile
from pagemill.messages import BlockMoves, LostMoves, SwapIn, SwapOut
from tests.batch.test_kv_store import make_store

NUM_BLOCKS = 6


class Shelf:
    """A `HostStore` in a dict; slots in `broken` cannot be read, and `room` bounds what is written."""

    place = "a shelf"
    lasts = False

    def __init__(self, room: int = 100) -> None:
        self.slots: dict[int, list[bytes]] = {}
        self.names: dict[int, bytes | None] = {}
        self.broken: set[int] = set()
        self.room = room
        self.is_closed = False

    def write(self, slot: int, name: bytes | None, parts: Sequence[Any]) -> None:
        if len(self.slots) == self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.slots[slot] = [bytes(part) for part in parts]
        self.names[slot] = name

    def read(self, slot: int, parts: Sequence[Any]) -> bool:
        if slot in self.broken:
            return False
        for part, held in zip(parts, self.slots[slot], strict=True):
            part[:] = memoryview(held)
        return True

    def forget(self) -> None:
        self.names = {}

    def close(self) -> None:
        self.is_closed = True


def numbered() -> KVStore:
    """Return pools in which block b holds b everywhere."""
    store = make_store(NUM_BLOCKS)
    for pair in store.layers:
        for pool in pair:
            pool[:] = torch.arange(float(NUM_BLOCKS))[:, None, None, None]
    return store


def held(store: KVStore) -> list[float]:
    """Return what each block holds, the same in all pools."""
    pools = [pool.flatten(1) for pair in store.layers for pool in pair]
    whole = torch.cat(pools, dim=1)
    assert (whole == whole[:, :1]).all(), "a part of a block moved"
    return whole[:, 0].tolist()


def test_a_block_goes_out_and_comes_back_elsewhere_byte_for_byte(tmp_path: Path) -> None:
    store = numbered()
    host = TierFile.temporary(str(tmp_path), store.size_bytes // NUM_BLOCKS)
    mover = BlockMover(store, host)
    assert mover.move(BlockMoves(swap_out=(SwapOut(2, 0, b"x" * 16), SwapOut(4, 9)))) is None
    assert held(store) == [0, 1, 2, 3, 4, 5]
    assert mover.move(BlockMoves(swap_in=(SwapIn(9, 0), SwapIn(0, 5)))) is None
    assert held(store) == [4, 1, 2, 3, 4, 2]
    mover.close()
    mover.close()


def test_out_comes_before_in_and_in_before_copies() -> None:
    store, host = numbered(), Shelf()
    host.write(7, None, store.block_bytes(5))
    # Block 1 is written out, then overwritten from slot 7, and that is copied.
    moves = BlockMoves(copies=((1, 2),), swap_out=(SwapOut(1, 0),), swap_in=(SwapIn(7, 1),))
    assert BlockMover(store, host).move(moves) is None
    assert held(store) == [0, 5, 5, 3, 4, 5]
    BlockMover(store, host).move(BlockMoves(swap_in=(SwapIn(0, 3),)))
    assert held(store)[3] == 1


def test_slot_that_cannot_be_read_is_told_and_the_others_are_done() -> None:
    store, host = numbered(), Shelf()
    for slot in range(3):
        host.write(slot, None, store.block_bytes(slot))
    host.broken = {1}
    moves = BlockMoves(swap_in=(SwapIn(0, 5), SwapIn(1, 4), SwapIn(2, 3)))
    assert BlockMover(store, host).move(moves) == LostMoves((4,), (1,))
    assert held(store)[5] == 0 and held(store)[3] == 2


def test_blocks_that_do_not_come_back_are_one_line_with_their_number(
    own_log: pytest.LogCaptureFixture,
) -> None:
    own_log.set_level(logging.WARNING, logger="pagemill")
    store, host = numbered(), Shelf()
    host.broken = set(range(100))
    mover = BlockMover(store, host)
    for first in range(0, 8, 4):
        mover.move(BlockMoves(swap_in=tuple(SwapIn(first + i, i) for i in range(4))))
    (line,) = own_log.messages
    assert "4 blocks so far of a shelf were damaged" in line
    mover.move(BlockMoves(swap_in=(SwapIn(8, 0),)))
    assert len(own_log.messages) == 2 and "9 blocks so far" in own_log.messages[1]


def test_full_disk_ends_the_tier_says_so_and_does_the_rest_of_the_step(
    own_log: pytest.LogCaptureFixture,
) -> None:
    own_log.set_level(logging.WARNING, logger="pagemill")
    store, host = numbered(), Shelf(room=2)
    host.write(8, None, store.block_bytes(3))
    mover = BlockMover(store, host)
    moves = BlockMoves(
        copies=((2, 5),),
        swap_out=(SwapOut(0, 0), SwapOut(1, 1), SwapOut(2, 2)),
        swap_in=(SwapIn(8, 4),),
    )
    assert mover.move(moves) == LostMoves((), (1, 2), ends_tier=True)
    assert held(store) == [0, 1, 2, 3, 3, 2]
    assert host.is_closed
    assert "a shelf cannot be written: No space left on device. Going on without it" in own_log.text
    assert mover.move(BlockMoves(copies=((1, 0),))) is None


def test_forgetting_comes_first_and_a_store_that_cannot_forget_ends() -> None:
    store, host = numbered(), Shelf()
    host.write(1, b"n" * 16, store.block_bytes(1))
    mover = BlockMover(store, host)
    moves = BlockMoves(swap_out=(SwapOut(2, 2, b"m" * 16),), forgets_host=True)
    assert mover.move(moves) is None
    assert host.names == {2: b"m" * 16}

    def full() -> None:
        raise OSError(errno.EIO, "Input/output error")

    host.forget = full  # type: ignore[method-assign]
    assert mover.move(BlockMoves(forgets_host=True)) == LostMoves((), (), ends_tier=True)


def test_a_store_that_lasts_and_cannot_be_written_any_more_is_still_told_to_forget() -> None:
    store, host = numbered(), Shelf(room=0)
    host.lasts, host.names = True, {5: b"n" * 16}
    mover = BlockMover(store, host)
    lost = mover.move(BlockMoves(swap_out=(SwapOut(0, 0, b"m" * 16),)))
    assert lost == LostMoves((), (0,), ends_tier=True)
    assert mover.move(BlockMoves(forgets_host=True)) is None
    assert host.names == {}
    mover.close()
    assert host.is_closed


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "Free disk space"),
        (errno.EDQUOT, "Free disk space"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EIO, "See what is wrong with that place"),
    ],
)
def test_the_advice_fits_what_happened(
    number: int, advice: str, own_log: pytest.LogCaptureFixture
) -> None:
    own_log.set_level(logging.WARNING, logger="pagemill")
    store, host = numbered(), Shelf()

    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    host.write = fails  # type: ignore[method-assign]
    BlockMover(store, host).move(BlockMoves(swap_out=(SwapOut(0, 0),)))
    (line,) = own_log.messages
    assert advice in line and ("Free disk space" in line) == (advice == "Free disk space")


def test_an_engine_without_a_tier_may_be_told_to_forget() -> None:
    assert BlockMover(numbered()).move(BlockMoves(forgets_host=True)) is None
