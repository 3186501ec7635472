"""Pools and block copies."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.attention.base import AttentionSpec
from pagemill.batch.kv_store import KVStore
from tests.fakes.fake_model import NaiveAttention

SPECS = [
    AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=4, scale=1.0),
    AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=8, scale=1.0),
]


def make_store(num_blocks: int) -> KVStore:
    return KVStore(
        NaiveAttention(),
        SPECS,
        num_blocks=num_blocks,
        block_size=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_size_is_that_of_all_pools() -> None:
    assert make_store(5).size_bytes == 5 * 2 * 2 * (1 * 4 + 2 * 8) * 4


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8))
def test_copies_happen_in_their_order(copies: list[tuple[int, int]]) -> None:
    store = make_store(6)
    for pair in store.layers:
        for pool in pair:
            pool[:] = torch.arange(6.0)[:, None, None, None]
    wanted = list(range(6))
    for source, target in copies:
        wanted[target] = wanted[source]
    store.copy_blocks(copies)
    for pair in store.layers:
        for pool in pair:
            assert pool[:, 1, 0, 3].tolist() == wanted
