"""The KV pools of one rank: a pair of tensors a layer, or one pair for layers of several kinds.

Owned by `worker.worker`; the attention backend chooses the layout (dim 0 is the block), this room
allocates the pools, copies whole blocks inside them and shows their bytes to `block_mover`.

Where layers of several kinds share one pool (`cache_layout`), a block lies in one piece and holds some tokens of
all layers of a kind. With `places` layers in a block the pool is, for that kind, as many times as many small blocks:
a layer's view begins at its own place, and its block tables hold block * places.

    pool       | block 0         | block 1         |
    15 places  |. . . . . . . . .|. . . . . . . . .|    layer i sees the pool from place i on,
     3 places  |.     .     .    |.     .     .    |    and its blocks lie 15, or 3, places apart
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill.attention.base import AttentionBackend, AttentionSpec
from pagemill.cache_layout import CacheLayout, plain_layout

Pair = tuple[Tensor, Tensor]


class KVStore:
    """Pools of `num_blocks` blocks; block b is the same sequence's, and the same kind's, in all of its layers."""

    def __init__(
        self,
        backend: AttentionBackend,
        specs: Sequence[AttentionSpec],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        layout: CacheLayout | None = None,
    ) -> None:
        """`layout` None: all layers have one table of blocks of `block_size` tokens."""
        layout = layout or plain_layout(block_size, len(specs))
        self.num_blocks = num_blocks
        self.block_size = layout.kinds[0].block_tokens
        self.layout = layout
        self.layer_kinds: tuple[int, ...] | None = None  # None: there is one
        self.layers: list[Pair]
        if len(layout.kinds) == 1:
            self.layers = [
                backend.allocate_kv(spec, num_blocks, block_size, dtype, device) for spec in specs
            ]
            self._pools = [pool for pair in self.layers for pool in pair]
        else:
            first = layout.kinds[0]
            shared = backend.allocate_kv(
                specs[0], num_blocks * first.places, first.block_tokens, dtype, device
            )
            self._pools = [pool.view(num_blocks, -1) for pool in shared]
            views = {
                layer: (number, tuple(pool[place:] for pool in self._small_blocks(shared, number)))
                for number, kind in enumerate(layout.kinds)
                for place, layer in enumerate(kind.layers)
            }
            self.layer_kinds = tuple(views[layer][0] for layer in range(len(specs)))
            self.layers = [(k, v) for _, (k, v) in (views[layer] for layer in range(len(specs)))]
        self._rows: list[
            NDArray[np.uint8]
        ] = []  # a pool each, [num_blocks, bytes]; made on first use

    def _small_blocks(self, shared: Pair, number: int) -> Pair:
        """Return the pools as one kind sees them: [num_blocks * places, kv heads, block_tokens, width]."""
        kind = self.layout.kinds[number]
        k, v = (
            pool.view(
                self.num_blocks * kind.places, pool.shape[1], kind.block_tokens, pool.shape[3]
            )
            for pool in shared
        )
        return k, v

    @property
    def strides(self) -> tuple[int, ...]:
        """Return for each kind as how many blocks one counts in the views of its layers."""
        return tuple(kind.places for kind in self.layout.kinds)

    @property
    def more_sizes(self) -> tuple[int, ...]:
        """Return the tokens a block of the kinds after the first."""
        return tuple(kind.block_tokens for kind in self.layout.kinds[1:])

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all pools."""
        return sum(pool.numel() * pool.element_size() for pool in self._pools)

    def block_bytes(self, block: int) -> list[NDArray[np.uint8]]:
        """Return views of one block's bytes in host memory, a pool each: K before V, layer by layer."""
        if not self._rows:
            self._rows = [
                pool.view(len(pool), -1).view(torch.uint8).numpy() for pool in self._pools
            ]
        return [rows[block] for rows in self._rows]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (from, to), in this order: a later copy sees what an earlier one wrote."""
        for sources, targets in _independent_runs(copies):
            for pool in self._pools:
                device = pool.device
                source = torch.tensor(sources, device=device)
                pool.index_copy_(
                    0, torch.tensor(targets, device=device), pool.index_select(0, source)
                )


def _independent_runs(
    copies: Sequence[tuple[int, int]],
) -> list[tuple[list[int], list[int]]]:
    """Split copies into runs that may be done at once: no block is written and then used again."""
    runs: list[tuple[list[int], list[int]]] = []
    written: set[int] = set()
    for source, target in copies:
        if not runs or source in written or target in written:
            runs.append(([], []))
            written = set()
        runs[-1][0].append(source)
        runs[-1][1].append(target)
        written.add(target)
    return runs
