"""Attention over the paged cache in plain torch: the oracle of native kernels, and the path without them.

Called through `base.AttentionBackend` by the worker and by every attention layer. A pool is laid out
[num_blocks, num_kv_heads, block_size, head_dim], so that a head's keys in a block are one run of memory
and gathering blocks by (block, head) gives [sequences, heads, keys, head_dim] with no transposition.

One call serves prefill, decode and mixed steps: `torch_layout` cuts the step into tiles, and each tile
takes the same way: gather keys, scores, cap, mask, softmax, gather values, sum. Scores and softmax are
float32 for every dtype. The query heads that share a key head are rows of one matrix product.

Tiles over more than SEGMENT_KEYS keys merge their parts with a running maximum and sum (Milakov &
Gimelshein 2018), which bounds temporary memory for any context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill.attention.base import AttentionBatch, AttentionSpec
from pagemill.attention.torch_layout import (
    GATHER_BYTES,
    MAX_ROWS,
    MIN_ROWS,
    PAD_KEYS,
    SCORE_BYTES,
    SEGMENT_KEYS,
    Gather,
    LayoutShape,
    Part,
    Tile,
    build_layout,
    padded_keys,
)
from pagemill.device.host_memory import lazy_zeros

WIDE_ROWS = 16  # rows of a product (queries times heads a key head) from which keys are widened
LOWEST = -1e30  # a running maximum before any key: finite, so that differences stay numbers


class TorchPlan:
    """What the layers of one step share. Tiles and indices are made when a layer first needs them."""

    def __init__(self, batch: AttentionBatch) -> None:
        self.batch = batch
        self._layouts: dict[LayoutShape, tuple[Tile, ...]] = {}
        self._cache_rows: dict[int, Tensor] = {}
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self.fresh_blocks = _fresh_blocks(batch)

    def layout(self, shape: LayoutShape) -> tuple[Tile, ...]:
        """Return the tiles for layers of this shape."""
        tiles = self._layouts.get(shape)
        if tiles is None:
            tiles = self._layouts[shape] = build_layout(self.batch, shape)
        return tiles

    def cache_rows(self, num_kv_heads: int) -> Tensor:
        """Return where a step's K and V go: [num_tokens * heads] rows of a pool seen as [.., head_dim]."""
        rows = self._cache_rows.get(num_kv_heads)
        if rows is None:
            size, slots = self.batch.block_size, self.batch.slot_mapping
            blocks = torch.div(slots, size, rounding_mode="floor")
            heads = torch.arange(num_kv_heads, device=slots.device)
            by_head = (blocks * num_kv_heads).unsqueeze(1) + heads
            rows = (by_head * size + (slots - blocks * size).unsqueeze(1)).flatten()
            self._cache_rows[num_kv_heads] = rows
        return rows

    def buffer(self, name: str, size: int, like: Tensor) -> Tensor:
        """Return `size` elements of scratch memory, the same memory for every call that fits."""
        key = (name, like.dtype)
        held = self._buffers.get(key)
        if held is None or held.numel() < size:
            held = self._buffers[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return held[:size]


class TorchAttention:
    """The plain-torch backend."""

    name = "torch"
    cache_dtypes = ("float32", "bfloat16")

    def allocate_kv(
        self,
        spec: AttentionSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """Return zeroed K and V pools, each [num_blocks, num_kv_heads, block_size, head_dim]."""
        shape = (num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        if device.type == "cpu":
            return lazy_zeros(shape, dtype), lazy_zeros(shape, dtype)
        k = torch.zeros(shape, dtype=dtype, device=device)
        v = torch.zeros(shape, dtype=dtype, device=device)
        return k, v

    def prepare(self, batch: AttentionBatch) -> TorchPlan:
        """Return the step's plan."""
        return TorchPlan(batch)

    def forward(
        self,
        spec: AttentionSpec,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: tuple[Tensor, Tensor],
        plan: TorchPlan,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write k and v to the cache, then attend; see `AttentionBackend.forward`."""
        _write(k, v, kv, plan)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        step = _Step(spec, kv, plan, sinks)
        heads, groups = spec.num_heads, spec.num_heads // spec.num_kv_heads
        for tile in plan.layout(step.shape):
            by_row = (tile.n, tile.m, spec.num_kv_heads, groups, spec.head_dim)
            picked = q[tile.rows] if isinstance(tile.rows, slice) else q.index_select(0, tile.rows)
            queries = picked.reshape(by_row).permute(0, 2, 3, 1, 4)
            queries = queries.reshape(tile.n * spec.num_kv_heads, groups * tile.m, spec.head_dim)
            attended = step.attend(tile, queries)
            attended = attended.view(tile.n, spec.num_kv_heads, groups, tile.m, spec.head_dim)
            rows = attended.permute(0, 3, 1, 2, 4).reshape(-1, heads, spec.head_dim)
            if isinstance(tile.rows, slice):
                out[tile.rows] = rows
            else:
                out.index_copy_(0, tile.rows, rows.to(out.dtype))
        return out

    def peak_bytes(
        self,
        spec: AttentionSpec,
        max_tokens: int,
        max_seqs: int,
        max_len: int,
        dtype: torch.dtype,
        block_size: int = 16,
    ) -> int:
        """Return an upper bound of what one `forward` holds beside its arguments, the plan included.

        The cache has the same `dtype`. A plan that serves layers of several windows holds a little more.
        """
        heads, kv_heads, dim, size = (
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            dtype.itemsize,
        )
        keys = min(padded_keys(max(1, max_len), block_size), max(SEGMENT_KEYS, block_size))
        # K and V side by side, of several short sequences or of one part of a long one; K widened.
        gathers = max(GATHER_BYTES, kv_heads * keys * dim * size) * (
            2 if size == 4 else 2 + 4 // size
        )
        # Raw scores, probabilities, and one more while a sink or a narrower dtype is worked in.
        rows = min(max_tokens, max(MAX_ROWS, SCORE_BYTES // (4 * heads * PAD_KEYS)))
        scores = 3 * (max(SCORE_BYTES, 4 * heads * MIN_ROWS * keys) + 4 * heads * rows)
        # A tile's queries and results: picked, permuted, and float32 sums of a merge.
        tile = rows * heads * dim * (2 * size + 4 * 4)
        flat = max_tokens * (heads + kv_heads) * dim * size  # the result; k or v made contiguous
        return (
            gathers
            + scores
            + tile
            + flat
            + _plan_bytes(spec, max_tokens, max_seqs, max_len, block_size)
        )


class _Step:
    """One layer's work in one step: the pools as rows, and the keys gathered last."""

    def __init__(
        self,
        spec: AttentionSpec,
        kv: tuple[Tensor, Tensor],
        plan: TorchPlan,
        sinks: Tensor | None,
    ) -> None:
        self._spec = spec
        self._plan = plan
        # [num_blocks * num_kv_heads, block_size * head_dim]: one row is one head's run of a block.
        self._k_rows, self._v_rows = (pool.flatten(2).flatten(0, 1) for pool in kv)
        self._loaded: Gather | None = None
        self._k = self._v = self._k_rows  # of the gather loaded last
        self._sinks: Tensor | None = None
        if sinks is not None:
            groups = spec.num_heads // spec.num_kv_heads
            self._sinks = sinks.to(torch.float32).view(1, spec.num_kv_heads, groups, 1, 1)
        key_bytes = spec.head_dim * kv[0].element_size()
        self.shape = LayoutShape(spec.num_heads, spec.num_kv_heads, key_bytes, spec.sliding_window)

    def attend(self, tile: Tile, queries: Tensor) -> Tensor:
        """Return the attention of one tile; queries and result [n * kv_heads, groups * m, head_dim]."""
        if len(tile.parts) == 1:
            return self._attend_at_once(tile, tile.parts[0], queries)
        return self._attend_by_parts(tile, queries)

    def _attend_at_once(self, tile: Tile, part: Part, queries: Tensor) -> Tensor:
        k, v = self._load(part, queries)
        scores = self._scores(tile, part, queries, k)
        if self._sinks is not None:
            sinks = self._sinks.expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        probabilities = scores.softmax(-1)
        del scores
        if self._sinks is not None:
            probabilities = probabilities[..., :-1]
        probabilities = probabilities.to(v.dtype).reshape(*queries.shape[:2], -1)
        return torch.bmm(probabilities, v)

    def _attend_by_parts(self, tile: Tile, queries: Tensor) -> Tensor:
        """Merge the parts: after each, `total` and `weighted` are relative to `highest`."""
        shape = (tile.n, self._spec.num_kv_heads, -1, tile.m, 1)
        weighted = torch.zeros(queries.shape, dtype=torch.float32, device=queries.device)
        if self._sinks is not None:
            highest = self._sinks.expand(tile.n, -1, -1, tile.m, 1)
            total = torch.ones_like(highest)
        else:
            total = weighted.new_zeros(*queries.shape[:2], 1).view(shape)
            highest = torch.full_like(total, LOWEST)
        for part in tile.parts:
            k, v = self._load(part, queries)
            scores = self._scores(tile, part, queries, k)
            new_highest = torch.maximum(highest, scores.amax(-1, keepdim=True))
            shrink = (highest - new_highest).exp_()
            weights = scores.sub_(new_highest).exp_()
            total = total * shrink + weights.sum(-1, keepdim=True)
            flat = weights.to(v.dtype).reshape(*queries.shape[:2], -1)
            weighted.mul_(shrink.reshape(*queries.shape[:2], 1)).add_(torch.bmm(flat, v))
            highest = new_highest
        return weighted.div_(total.reshape(*queries.shape[:2], 1))

    def _scores(self, tile: Tile, part: Part, queries: Tensor, k: Tensor) -> Tensor:
        """Return masked float32 scores [n, kv_heads, groups, m, keys]."""
        scores = _products(queries, k, self._spec.scale)
        scores = scores.view(tile.n, self._spec.num_kv_heads, -1, tile.m, k.shape[1])
        cap = self._spec.logit_softcap
        if cap is not None:
            scores.div_(cap).tanh_().mul_(cap)
        for low, high, hidden in part.masks:
            # Filled, not added: what stands in unused slots may be anything, NaN too.
            scores[..., low:high].masked_fill_(hidden, -torch.inf)
        return scores

    def _load(self, part: Part, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return a part's K, in the dtype of its product, and V, each [n * kv_heads, keys, head_dim]."""
        gather = part.gather
        if self._loaded is not gather:
            self._k, self._v = (
                self._gather(name, rows, gather)
                for name, rows in (("k", self._k_rows), ("v", self._v_rows))
            )
            self._k = self._k.to(_product_dtype(queries))
            self._v = self._v.to(queries.dtype)
            self._loaded = gather
        return self._k[:, part.begin : part.end], self._v[:, part.begin : part.end]

    def _gather(self, name: str, rows: Tensor, gather: Gather) -> Tensor:
        flat = self._plan.buffer(name, gather.index.numel() * rows.shape[1], rows)
        torch.index_select(rows, 0, gather.index, out=flat.view(-1, rows.shape[1]))
        return flat.view(-1, gather.num_keys, self._spec.head_dim)


def _product_dtype(queries: Tensor) -> torch.dtype:
    """Return the dtype in which queries [batch, rows, head_dim] meet their keys; see `_products`."""
    return torch.float32 if queries.shape[1] >= WIDE_ROWS else queries.dtype


def _products(queries: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return scale * queries @ k^T in float32, batched; k is of queries' dtype or float32.

    A product of bfloat16 matrices is rounded to bfloat16, which costs scores three digits. For many rows
    the keys are widened to float32 first. For few rows (decode) that costs more than the product itself:
    there a second product, which subtracts the first before its own rounding, gives what was lost. On a
    processor with bfloat16 products the two take about three quarters of the time of the wide one.
    """
    queries, k_t = queries.to(k.dtype), k.transpose(1, 2)
    unused = queries.new_empty(())  # beta = 0: its value is ignored
    near = torch.baddbmm(unused, queries, k_t, beta=0, alpha=scale)
    if near.dtype == torch.float32:
        return near
    rest = torch.baddbmm(near, queries, k_t, beta=-1, alpha=scale)
    return near.to(torch.float32).add_(rest)


def _write(k: Tensor, v: Tensor, kv: tuple[Tensor, Tensor], plan: TorchPlan) -> None:
    """Put the step's K and V into their slots."""
    k_pool, v_pool = kv
    if plan.fresh_blocks is not None:
        # Slots past a sequence's end get weight 0, and 0 times what an earlier owner left there is NaN
        # if that was not finite. So a block's V starts clean; nobody's trouble becomes another's.
        v_pool.index_fill_(0, plan.fresh_blocks, 0.0)
    rows = plan.cache_rows(k.shape[1])
    head_dim = k.shape[2]
    for new, pool in ((k, k_pool), (v, v_pool)):
        pool.view(-1, head_dim).index_copy_(0, rows, new.reshape(-1, head_dim).to(pool.dtype))


def _fresh_blocks(batch: AttentionBatch) -> Tensor | None:
    """Return the blocks that a sequence enters in this step and does not fill, or None."""
    size, starts = batch.block_size, batch.query_starts
    seqs, columns = [], []
    for seq, context in enumerate(batch.num_computed):
        end = context + starts[seq + 1] - starts[seq]
        column = end // size
        if end > context and end % size and column * size >= context:
            seqs.append(seq)
            columns.append(column)
    return batch.block_tables[seqs, columns] if seqs else None


def _plan_bytes(
    spec: AttentionSpec, max_tokens: int, max_seqs: int, max_len: int, block_size: int
) -> int:
    """Return an upper bound of a plan's indices and masks for one kind of layer."""
    keys, window = padded_keys(max(1, max_len), block_size), spec.sliding_window
    if window is not None:
        # A window's step sees its queries, the window before them and two cut blocks.
        keys = min(keys, padded_keys(window + max_tokens + 2 * block_size, block_size))
    indices = 8 * spec.num_kv_heads * (max_tokens + max_seqs * (keys // block_size + 1))
    # Masked columns of a query: its tile's other queries, padding (an eighth of the keys), a cut block;
    # with a window, at both ends.
    columns = MAX_ROWS + max(PAD_KEYS, SEGMENT_KEYS // 8) + 2 * block_size
    return indices + max_tokens * 2 * min(columns, keys)
