"""Attention over the paged cache by the native kernels: `csrc/attention`, whose header has the layout.

Called through `base.AttentionBackend` by the worker and by every attention layer. A row's bits depend on
its own query, the keys it sees and their positions; not on chunks, batch mates, threads or block size.

A step costs one call to prepare, which hands over the block tables, and one call a layer, which writes
the cache and attends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill import native
from pagemill.attention.base import AttentionBatch, AttentionSpec
from pagemill.config import int8_token_bytes
from pagemill.device import host
from pagemill.device.host_memory import lazy_zeros

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_CACHE_DTYPES = {**_DTYPES, torch.int8: 2}
_LARGE_SCRATCH = 1 << 17  # from here on in whole pages of 2 MiB; csrc/common/scratch.h says why
_HUGE_PAGE = 1 << 21


class CPUPlan:
    """What the layers of one step share: the native plan, and the tensors that it points into."""

    __slots__ = ("native", "_held")

    def __init__(self, batch: AttentionBatch) -> None:
        tables, slots = batch.block_tables, batch.slot_mapping
        if not (tables.is_contiguous() and slots.is_contiguous()):
            tables, slots = tables.contiguous(), slots.contiguous()
        assert tables.dtype == slots.dtype == torch.int64
        assert len(tables) == batch.num_seqs and len(slots) == batch.query_starts[-1]
        self._held = (tables, slots)
        self.native = native.required().AttentionPlan(
            batch.query_starts,
            batch.num_computed,
            tables.data_ptr(),
            tables.shape[1],
            slots.data_ptr(),
            batch.block_size,
            batch.kind,
        )


class CPUAttention:
    """The native backend of CPUs. Its scratch memory is kept from call to call."""

    name = "cpu"
    cache_dtypes = ("float32", "bfloat16", "int8")

    def __init__(self) -> None:
        self._attention = native.required().attention
        self.scratch = torch.empty(0, dtype=torch.uint8)

    def allocate_kv(
        self,
        spec: AttentionSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """Return zeroed K and V pools, each num_blocks * num_kv_heads * block_size * head_dim numbers.

        What stands where inside a block is the kernels' own affair. In int8 a head's token takes
        `int8_token_bytes`, its scale among them, so that a block moves as one.
        """
        assert device.type == "cpu"
        assert dtype in _CACHE_DTYPES
        width = int8_token_bytes(spec.head_dim) if dtype == torch.int8 else spec.head_dim
        shape = (num_blocks, spec.num_kv_heads, block_size, width)
        return lazy_zeros(shape, dtype), lazy_zeros(shape, dtype)

    def prepare(self, batch: AttentionBatch) -> CPUPlan:
        """Return the step's plan."""
        return CPUPlan(batch)

    def forward(
        self,
        spec: AttentionSpec,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: tuple[Tensor, Tensor],
        plan: CPUPlan,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write k and v to the cache, then attend; see `AttentionBackend.forward`."""
        k_pool, v_pool = kv
        out = torch.empty(q.shape, dtype=q.dtype)
        q_token, q_head, q_step = q.stride()
        k_token, k_head, k_step = k.stride()
        v_token, v_head, v_step = v.stride()
        if not q_step == k_step == v_step == 1:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
            return self.forward(spec, q, k, v, kv, plan, sinks)
        if sinks is not None:
            sinks = sinks.to(torch.float32).contiguous()
        needed = 0
        while True:
            if needed > self.scratch.numel():
                self.grow_scratch(needed)
            needed = self._attention(
                plan.native,
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_dim,
                spec.scale,
                spec.logit_softcap or 0.0,
                spec.sliding_window or 0,
                _DTYPES[q.dtype],
                _CACHE_DTYPES[k_pool.dtype],
                q.data_ptr(),
                q_token,
                q_head,
                k.data_ptr(),
                k_token,
                k_head,
                v.data_ptr(),
                v_token,
                v_head,
                k_pool.data_ptr(),
                v_pool.data_ptr(),
                k_pool.shape[0],
                0 if sinks is None else sinks.data_ptr(),
                out.data_ptr(),
                self.scratch.data_ptr(),
                self.scratch.numel(),
            )
            if not needed:
                return out

    def grow_scratch(self, size_bytes: int) -> None:
        """Replace the scratch memory by a larger piece, which is nobody's temporary."""
        self.scratch = lazy_zeros((_taken(size_bytes),), torch.uint8)

    def peak_bytes(
        self,
        spec: AttentionSpec,
        max_tokens: int,
        max_seqs: int,
        max_len: int,
        dtype: torch.dtype,
        block_size: int = 16,
    ) -> int:
        """Return an upper bound of what one `forward` holds beside its arguments, the plan included."""
        extension = native.required()
        scratch = extension.attention_scratch_bytes(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            max_tokens,
            max_len,
            max(extension.num_threads(), host.num_threads(None)),
        )
        result = max_tokens * spec.num_heads * spec.head_dim * dtype.itemsize
        sinks = 4 * spec.num_heads
        # Units of work, about a hundred bytes each, of layers of two kinds; no sequence has fewer than one
        # a key head, and there are no more than a key head and token.
        units = 2 * 2 * 128 * spec.num_kv_heads * min(max_tokens, max_seqs + max_tokens)
        return _taken(scratch) + result + sinks + units


def _taken(size_bytes: int) -> int:
    """Return the scratch memory that is taken where so much is needed."""
    unit = 1 if size_bytes < _LARGE_SCRATCH else _HUGE_PAGE
    return -(-size_bytes // unit) * unit
