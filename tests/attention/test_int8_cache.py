"""int8 caches: the oracle over rounded keys and values, what rounding costs, and strange numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagemill.attention.base import AttentionSpec
from pagemill.batch.kv_store import KVStore
from pagemill.config import int8_token_bytes
from pagemill.ops.reference import int8_codes
from tests.attention.kernels import NATIVE, make_backend
from tests.attention.oracle import attend_whole
from tests.attention.runner import Cache, Whole, run_to_end

pytestmark = pytest.mark.parametrize("kernels", NATIVE)


def _spec(**changes: Any) -> AttentionSpec:
    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "scale": 0.6}
    return AttentionSpec(**{**sizes, **changes})


def _cache(kernels: str, spec: AttentionSpec, **changes: Any) -> Cache:
    """Return an int8 cache whose queries are float32."""
    sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "dtype": torch.int8}
    cache = Cache(make_backend(kernels), spec, **{**sizes, **changes})
    cache.dtype = torch.float32
    return cache


def _rounded(x: Tensor) -> Tensor:
    """Return what the codes of a token and head stand for; x [tokens, heads, head_dim]."""
    codes, scales, _ = int8_codes(x.reshape(-1, x.shape[-1]))
    return (codes.double() * scales.double()).view(x.shape)


def _check(
    cache: Cache, seqs: list[Whole], rows: list[Tensor], sinks: Tensor | None = None
) -> None:
    for seq, got in zip(seqs, rows, strict=True):
        want = attend_whole(cache.spec, seq.q, _rounded(seq.k), _rounded(seq.v), sinks)
        assert (got.double() - want).abs().max() < 1e-5


@st.composite
def _cases(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads = draw(st.integers(1, 3))
    return {
        "spec": AttentionSpec(
            num_heads=kv_heads * draw(st.integers(1, 3)),
            num_kv_heads=kv_heads,
            head_dim=draw(st.sampled_from([1, 2, 3, 4, 6, 16, 37, 64])),
            scale=draw(st.sampled_from([0.1, 0.5])),
            sliding_window=draw(st.none() | st.integers(1, 20)),
            logit_softcap=draw(st.none() | st.sampled_from([0.5, 3.0])),
        ),
        "block_size": draw(st.sampled_from([1, 2, 3, 4, 16, 32])),
        "lengths": draw(st.lists(st.integers(1, 60), min_size=1, max_size=4)),
        "use_sinks": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


@given(case=_cases(), data=st.data())
@settings(deadline=None, max_examples=40)
def test_any_ragged_schedule_equals_the_oracle_over_rounded_keys_and_values(
    kernels: str, case: dict[str, Any], data: st.DataObject
) -> None:
    spec: AttentionSpec = case["spec"]
    cache = _cache(kernels, spec, num_blocks=250, block_size=case["block_size"], seed=case["seed"])
    sinks = torch.linspace(-2, 2, spec.num_heads) if case["use_sinks"] else None
    seqs = [cache.add(length) for length in case["lengths"]]
    rows: list[list[Tensor]] = [[] for _ in seqs]
    while any(seq.done < len(seq.q) for seq in seqs):
        counts = [data.draw(st.integers(0, len(seq.q) - seq.done)) for seq in seqs]
        if not any(counts):
            counts = [min(1, len(seq.q) - seq.done) for seq in seqs]
        for seq_rows, new in zip(rows, cache.step(seqs, counts, sinks), strict=True):
            seq_rows.append(new)
    _check(cache, seqs, [torch.cat(seq_rows) for seq_rows in rows], sinks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_costs_less_than_a_hundredth_of_the_result(
    kernels: str, dtype: torch.dtype
) -> None:
    spec = AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)
    cache = _cache(kernels, spec, num_blocks=64, block_size=16)
    cache.dtype = dtype
    seq = cache.add(300)
    rows = run_to_end(cache, [seq], 100)[0]
    want = attend_whole(spec, seq.q, seq.k, seq.v)
    error = (rows.double() - want).square().mean().sqrt() / want.square().mean().sqrt()
    assert 1e-3 < float(error) < 1e-2


def test_a_token_and_head_has_a_scale_of_its_own(kernels: str) -> None:
    spec = _spec(num_heads=2, num_kv_heads=2, head_dim=16, scale=0.01)
    cache = _cache(kernels, spec, block_size=16)
    seq = cache.add(40)
    seq.k[::3] *= 1e-3
    seq.v[5] *= 1e6
    seq.v[:, 1] *= 1e-6
    rows = run_to_end(cache, [seq], 7)[0]
    want = attend_whole(spec, seq.q, _rounded(seq.k), _rounded(seq.v))
    for head in (0, 1):  # each against its own size
        error = (rows[:, head].double() - want[:, head]).abs().amax(-1)
        assert bool((error < 1e-5 * want[:, head].abs().amax(-1)).all())
    alone = attend_whole(spec, seq.q, seq.k, seq.v)[:, 1]
    assert float((rows[:, 1] - alone).norm() / alone.norm()) < 1e-2


@pytest.mark.parametrize("size", [4, 16])
def test_numbers_that_are_not_finite_spoil_only_rows_that_see_them(kernels: str, size: int) -> None:
    spec = _spec(sliding_window=9)
    cache = _cache(kernels, spec, block_size=size)
    clean, broken = cache.add(40), cache.add(40)
    for name in ("q", "k", "v"):
        setattr(broken, name, getattr(clean, name).clone())
    broken.k[7, 0, 3] = float("inf")
    broken.v[20] = float("nan")
    want, got = run_to_end(cache, [clean, broken], 6)
    for position in range(40):
        bad = 7 <= position < 16, 20 <= position < 29
        for head in range(4):  # two query heads a key head
            if bad[1] or (bad[0] and head < 2):
                assert got[position, head].isnan().all()
            else:
                assert torch.equal(got[position, head], want[position, head])


def test_blocks_that_held_another_request_are_clean_for_the_next(kernels: str) -> None:
    for size in (4, 16):
        cache = _cache(kernels, _spec(), num_blocks=3, block_size=size)
        seq = cache.add(3 * size)
        seq.v.fill_(float("nan"))
        seq.k.fill_(float("inf"))
        run_to_end(cache, [seq], 12)
        for length, chunk in ((10, 3), (5, 1), (9, 9)):
            cache.free = list(seq.blocks)
            after = cache.add(length)
            _check(cache, [after], run_to_end(cache, [after], chunk))


def test_zeros_and_the_smallest_and_largest_numbers_are_kept(kernels: str) -> None:
    spec = _spec(num_heads=1, num_kv_heads=1, head_dim=5, scale=1e-3)
    cache = _cache(kernels, spec, block_size=16)
    seq = cache.add(20)
    seq.k[:, :, 1:] *= 1e-3
    seq.v[3] = 0.0
    seq.k[4] = 0.0
    seq.v[6] = 1e-42
    rows = run_to_end(cache, [seq], 20)[0]
    _check(cache, [seq], [rows])
    seq.done, seq.v[9] = 0, 1e38
    rows = run_to_end(cache, [seq], 20)[0]
    assert bool(rows.isfinite().all())
    assert float(rows[9:].min()) > 1e36


def test_a_block_moves_with_its_scales(kernels: str) -> None:
    spec = _spec()
    store = KVStore(
        make_backend(kernels), [spec], num_blocks=6, block_size=16, dtype=torch.int8,
        device=torch.device("cpu"),
    )  # fmt: skip
    assert store.size_bytes == 2 * 6 * 16 * 2 * int8_token_bytes(8)
    cache = _cache(kernels, spec, num_blocks=6, block_size=16)
    cache.kv = store.layers[0]
    seq = cache.add(16)
    seq.blocks = [2]
    before = cache.step([seq], [16])[0]
    store.copy_blocks([(2, 5)])
    cache.kv[0][2], cache.kv[1][2] = -1, -1
    seq.blocks, seq.done = [5], 15
    assert torch.equal(cache.step([seq], [1])[0], before[15:])


def test_a_dtype_that_no_cache_has_is_refused(kernels: str) -> None:
    cache = _cache(kernels, _spec(), dtype=torch.float32)
    seq = cache.add(1)
    plan = cache.backend.prepare(cache.batch([seq], [1]))
    with pytest.raises(ValueError, match="attention: the cache must be 0"):
        cache.backend._attention(
            plan.native, 4, 2, 8, 1.0, 0.0, 0, 0, 3, *[64] * 9, *[64] * 2, 64, 0, 64, 64, 64
        )
