"""What is true of the plain-torch backend alone."""

from __future__ import annotations

import torch

from pagemill.attention.base import AttentionSpec
from pagemill.attention.torch_ref import TorchAttention
from tests.attention.runner import Cache, run_to_end


def test_pool_holds_k_and_v_by_block() -> None:
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.6)
    cache = Cache(TorchAttention(), spec, num_blocks=64, block_size=4)
    seq = cache.add(7)
    run_to_end(cache, [seq], 2)
    for pool, source in zip(cache.kv, (seq.k, seq.v), strict=True):
        for position in range(7):
            held = pool[seq.blocks[position // 4], :, position % 4]
            assert torch.equal(held, source[position])
