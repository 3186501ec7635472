"""Drives a backend over a small paged cache, step by step, as the worker would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.attention.base import AttentionBackend, AttentionBatch, AttentionSpec
from tests.attention.oracle import attend_whole


@dataclass
class Whole:
    """One sequence's tensors for all its tokens, and how far it has come."""

    q: Tensor
    k: Tensor
    v: Tensor
    blocks: list[int]
    done: int = 0


class Cache:
    """A pool with blocks handed out in random order, filled with NaN where nobody has written."""

    def __init__(
        self,
        backend: AttentionBackend,
        spec: AttentionSpec,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.backend, self.spec, self.block_size = backend, spec, block_size
        self.rng = torch.Generator().manual_seed(seed)
        self.kv = backend.allocate_kv(spec, num_blocks, block_size, dtype, torch.device("cpu"))
        for pool in self.kv:
            assert pool.shape[0] == num_blocks
            # Of an int8 pool, scales that are NaN.
            pool.fill_(-1 if dtype == torch.int8 else float("nan"))
        self.free: list[int] = torch.randperm(num_blocks, generator=self.rng).tolist()
        self.dtype = dtype

    def add(self, length: int) -> Whole:
        """Make a sequence of random tensors with blocks for all of it."""
        spec = self.spec
        count = -(-length // self.block_size)
        blocks, self.free = self.free[:count], self.free[count:]
        assert len(blocks) == count

        def random(heads: int) -> Tensor:
            return torch.randn(length, heads, spec.head_dim, generator=self.rng).to(self.dtype)

        return Whole(
            random(spec.num_heads), random(spec.num_kv_heads), random(spec.num_kv_heads), blocks
        )

    def batch(self, seqs: Sequence[Whole], counts: Sequence[int]) -> AttentionBatch:
        """Return the batch in which each sequence does its next `count` tokens."""
        starts, slots = [0], []
        width = max((len(seq.blocks) for seq in seqs), default=0)
        for seq, count in zip(seqs, counts, strict=True):
            starts.append(starts[-1] + count)
            for position in range(seq.done, seq.done + count):
                block = seq.blocks[position // self.block_size]
                slots.append(block * self.block_size + position % self.block_size)
        tables = [seq.blocks + [0] * (width - len(seq.blocks)) for seq in seqs]
        return AttentionBatch(
            query_starts=tuple(starts),
            num_computed=tuple(seq.done for seq in seqs),
            block_tables=torch.tensor(tables, dtype=torch.int64).view(len(seqs), width),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            block_size=self.block_size,
        )

    def step(
        self, seqs: Sequence[Whole], counts: Sequence[int], sinks: Tensor | None = None
    ) -> list[Tensor]:
        """Run one step and return each sequence's new rows."""
        batch = self.batch(seqs, counts)
        rows = [
            [
                getattr(seq, name)[seq.done : seq.done + n]
                for seq, n in zip(seqs, counts, strict=True)
            ]
            for name in ("q", "k", "v")
        ]
        empty = torch.zeros(0, 1, self.spec.head_dim, dtype=self.dtype)
        heads = (self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads)
        q, k, v = (
            torch.cat(parts) if parts else empty.expand(0, n, -1)
            for parts, n in zip(rows, heads, strict=True)
        )
        plan = self.backend.prepare(batch)
        out = self.backend.forward(self.spec, q, k, v, self.kv, plan, sinks)
        assert out.shape == q.shape
        assert out.dtype == q.dtype
        for seq, count in zip(seqs, counts, strict=True):
            seq.done += count
        return list(out.split(list(counts))) if counts else []


def run_to_end(
    cache: Cache, seqs: Sequence[Whole], chunk: int, sinks: Tensor | None = None
) -> list[Tensor]:
    """Run all sequences to their ends, each `chunk` tokens a step; return all rows by sequence."""
    rows: list[list[Tensor]] = [[] for _ in seqs]
    while any(seq.done < len(seq.q) for seq in seqs):
        counts = [min(chunk, len(seq.q) - seq.done) for seq in seqs]
        for seq_rows, new in zip(rows, cache.step(seqs, counts, sinks), strict=True):
            seq_rows.append(new)
    return [torch.cat(seq_rows) for seq_rows in rows]


def check_rows(
    cache: Cache, seqs: Sequence[Whole], rows: Sequence[Tensor], sinks: Tensor | None = None
) -> None:
    """Compare all rows of float32 sequences with the oracle."""
    for seq, got in zip(seqs, rows, strict=True):
        want = attend_whole(cache.spec, seq.q, seq.k, seq.v, sinks)
        assert (got.double() - want).abs().max() < 1e-5
