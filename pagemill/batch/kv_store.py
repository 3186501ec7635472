"""The KV pools of one rank, a pair of tensors a layer.

Owned by `worker.worker`; the attention backend chooses the layout (dim 0 is the block), this room
allocates the pools, copies whole blocks inside them and shows their bytes to `block_mover`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill.attention.base import AttentionBackend, AttentionSpec


class KVStore:
    """Pools of `num_blocks` blocks in every layer; block b is the same sequence's in all of them."""

    def __init__(
        self,
        backend: AttentionBackend,
        specs: Sequence[AttentionSpec],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers: list[tuple[Tensor, Tensor]] = [
            backend.allocate_kv(spec, num_blocks, block_size, dtype, device) for spec in specs
        ]

        self._rows: list[
            NDArray[np.uint8]
        ] = []  # a pool each, [num_blocks, bytes]; made on first use

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all pools."""
        return sum(pool.numel() * pool.element_size() for pair in self.layers for pool in pair)

    def block_bytes(self, block: int) -> list[NDArray[np.uint8]]:
        """Return views of one block's bytes in host memory, a pool each, K before V, layer by layer."""
        if not self._rows:
            pools = [pool for pair in self.layers for pool in pair]
            self._rows = [pool.view(len(pool), -1).view(torch.uint8).numpy() for pool in pools]
        return [rows[block] for rows in self._rows]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (from, to), in this order: a later copy sees what an earlier one wrote."""
        for sources, targets in _independent_runs(copies):
            for pair in self.layers:
                for pool in pair:
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
