"""The moves of a step: blocks out to the host tier, blocks in from it, copies inside the device pool.

In this order, before the step's forward pass. What could not be done is told to the scheduler, which has
it computed again: a damaged slot or a full disk costs time, never a request. The store of a CPU device is a
file (`tier_file`); a device with memory of its own brings a `HostStore` in pinned memory.

Owned by `worker.model_runner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pagemill.batch.kv_store import KVStore
from pagemill.batch.tier_file import advice
from pagemill.log import get_logger
from pagemill.messages import BlockMoves, LostMoves, SwapIn, SwapOut

logger = get_logger(__name__)


class HostStore(Protocol):
    """Slots of one block each, outside the device pool. `parts`: the block's bytes, pool by pool."""

    place: str

    @property
    def lasts(self) -> bool:
        """Return whether it is found again after a restart."""
        ...

    def write(self, slot: int, name: bytes | None, parts: Sequence[Any]) -> None:
        """Write a block; raises OSError when nothing more can be written."""
        ...

    def read(self, slot: int, parts: Sequence[Any]) -> bool:
        """Read a block into `parts`; return whether it is what was written."""
        ...

    def forget(self) -> None:
        """Let nothing be found after a restart."""
        ...

    def close(self) -> None:
        """Let go of the memory or the file."""
        ...


class BlockMover:
    """Moves blocks between one rank's pools and its host store, if it has one."""

    def __init__(self, kv: KVStore, host: HostStore | None = None) -> None:
        self._kv = kv
        self._host = host
        self._num_unread = 0
        self._num_told = 0  # of them, when the log last said how many

    def move(self, moves: BlockMoves) -> LostMoves | None:
        """Do all moves of a step; None: all were done."""
        lost = None
        if moves.forgets_host or moves.swap_out or moves.swap_in:
            lost = self._swap(moves)
        if moves.copies:
            self._kv.copy_blocks(moves.copies)
        return lost

    def close(self) -> None:
        """Let go of the host store."""
        if self._host is not None:
            self._host.close()
            self._host = None

    def _swap(self, moves: BlockMoves) -> LostMoves | None:
        unwritten = self._write(moves)
        unread = self._read(moves.swap_in)
        ends = unwritten is not None
        if ends and self._host is not None and not self._host.lasts:
            self.close()  # one that lasts may be told to forget what it holds
        slots = tuple(move.slot for move in (*(unwritten or ()), *unread))
        if not slots and not ends:
            return None
        return LostMoves(tuple(move.block for move in unread), slots, ends)

    def _write(self, moves: BlockMoves) -> list[SwapOut] | None:
        """Write blocks out; return what was not written, or None when the store goes on."""
        done = 0
        try:
            if moves.forgets_host and self._host is not None:
                self._host.forget()
            for move in moves.swap_out:
                assert self._host is not None, "a move out, and no host tier"
                self._host.write(move.slot, move.name, self._kv.block_bytes(move.block))
                done += 1
        except OSError as error:
            assert self._host is not None
            logger.warning(
                "host tier: %s cannot be written: %s. Going on without it: prefixes that are evicted "
                "and sequences that are preempted are computed again. %s, or choose "
                "another swap_dir or kv_cache_file, and restart",
                self._host.place,
                error.strerror or error,
                advice(error),
            )
            return list(moves.swap_out[done:])
        return None

    def _read(self, moves: Sequence[SwapIn]) -> list[SwapIn]:
        """Read blocks in; return those that did not come."""
        assert self._host is not None or not moves, "a move in, and no host tier"
        unread = [
            move
            for move in moves
            if self._host is not None
            and not self._host.read(move.slot, self._kv.block_bytes(move.block))
        ]
        self._num_unread += len(unread)
        # One line for all that a start finds; a medium that goes on failing is told of ever less often.
        if self._num_unread > 2 * self._num_told:
            self._num_told = self._num_unread
            assert self._host is not None
            logger.warning(
                "host tier: %d blocks so far of %s were damaged or could not be read; what they held is "
                "computed anew",
                self._num_unread,
                self._host.place,
            )
        return unread
