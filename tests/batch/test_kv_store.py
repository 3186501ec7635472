"""Pools and block copies."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.attention.base import AttentionSpec
from pagemill.attention.torch_ref import TorchAttention
from pagemill.batch.kv_store import KVStore
from pagemill.cache_layout import CacheKind, CacheLayout
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


# Two layers with a window and one without: six cells a block, of 2 tokens of a layer each.
KINDS = CacheLayout(
    (
        CacheKind(block_tokens=12, layers=(1,), places=1),
        CacheKind(block_tokens=4, window=8, layers=(0, 2), places=3),
    ),
    cells=6,
)


def shared_store(num_blocks: int) -> KVStore:
    return KVStore(
        TorchAttention(),
        [SPECS[1]] * 3,
        num_blocks=num_blocks,
        block_size=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
        layout=KINDS,
    )


def test_layers_of_several_kinds_share_the_bytes_of_a_block_and_not_their_places() -> None:
    store = shared_store(5)
    assert store.size_bytes == 2 * 5 * 12 * 2 * 8 * 4
    assert store.layer_kinds == (1, 0, 1)
    assert store.strides == (1, 3) and store.more_sizes == (4,)
    for block in range(5):
        for layer, stride in ((0, 3), (2, 3)):
            for pool in store.layers[layer]:
                assert pool.shape[1:] == (2, 4, 8)
                pool[block * stride] = 10 * block + layer
    for block in range(5):
        assert all((store.layers[0][part][3 * block] == 10 * block).all() for part in (0, 1))
        assert all((store.layers[2][part][3 * block] == 10 * block + 2).all() for part in (0, 1))
        for part in store.block_bytes(block):
            held = set(part.view("float32").tolist())
            assert held <= {10.0 * block, 10.0 * block + 2, 0.0}
    k, _ = store.layers[1]
    assert k.shape == (5, 2, 12, 8)
    k[3] = -1.0  # a block of the other kind is all of it
    assert (store.layers[0][0][9] == -1.0).all() and (store.layers[2][0][9] == -1.0).all()


def test_a_shared_block_is_copied_whole() -> None:
    store = shared_store(4)
    for layer, stride in ((0, 3), (2, 3)):
        for pool in store.layers[layer]:
            for block in range(4):
                pool[block * stride] = 10 * block + layer
    store.copy_blocks([(1, 3), (0, 1)])
    for layer in (0, 2):
        for pool in store.layers[layer]:
            values = [pool[3 * block].unique().item() for block in range(4)]
            assert values == [layer, layer, 20 + layer, 10 + layer]
