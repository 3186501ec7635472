"""The native backend's own promise: a row's bits hang on its query, its keys and their positions alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagemill import native
from pagemill.attention.base import AttentionSpec
from tests.attention.kernels import NATIVE, make_backend
from tests.attention.oracle import attend_whole
from tests.attention.runner import Cache, Whole

pytestmark = pytest.mark.parametrize("kernels", NATIVE)
SHAPES: list[dict[str, Any]] = [
    {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    {"num_heads": 4, "num_kv_heads": 4, "head_dim": 80, "sliding_window": 75},
    {"num_heads": 14, "num_kv_heads": 2, "head_dim": 37, "logit_softcap": 2.0},
    {"num_heads": 8, "num_kv_heads": 1, "head_dim": 128, "sliding_window": 300},
]
PAIRS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.int8),
    (torch.float32, torch.int8),
]


def _spec(shape: dict[str, Any]) -> AttentionSpec:
    return AttentionSpec(scale=shape["head_dim"] ** -0.5, **shape)


def _sequence(spec: AttentionSpec, length: int, dtype: torch.dtype, seed: int) -> Whole:
    """Return a sequence without blocks."""
    rng = torch.Generator().manual_seed(seed)
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    q, k, v = (torch.randn(length, n, spec.head_dim, generator=rng).to(dtype) for n in heads)
    return Whole(q, k, v, [])


def _placed(cache: Cache, seq: Whole) -> Whole:
    """Return the same tokens from the start, with blocks of this cache."""
    count = -(-len(seq.q) // cache.block_size)
    blocks, cache.free = cache.free[:count], cache.free[count:]
    assert len(blocks) == count
    return Whole(seq.q, seq.k, seq.v, blocks)


def _cache(
    kernels: str, spec: AttentionSpec, dtypes: tuple[torch.dtype, torch.dtype], size: int, seed: int
) -> Cache:
    cache = Cache(
        make_backend(kernels),
        spec,
        num_blocks=2400 // size + 8,
        block_size=size,
        dtype=dtypes[1],
        seed=seed,
    )
    cache.dtype = dtypes[0]
    return cache


def _bits(rows: Tensor) -> Tensor:
    """Return what tells -0 from 0 and one NaN from another."""
    return rows.view(torch.int32 if rows.dtype == torch.float32 else torch.int16)


def _sinks(spec: AttentionSpec, wanted: bool) -> Tensor | None:
    return torch.linspace(-2, 2, spec.num_heads) if wanted else None


@given(
    dtypes=st.sampled_from(PAIRS),
    shape=st.sampled_from(SHAPES),
    lengths=st.lists(st.integers(1, 620), min_size=1, max_size=3),
    size=st.sampled_from([1, 3, 7, 16, 32, 48, 128, 256]),
    use_sinks=st.booleans(),
    seed=st.integers(0, 999),
)
@settings(deadline=None, max_examples=30)
def test_rows_are_equal_bit_for_bit_in_any_chunks_batch_threads_and_blocks(
    kernels: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    shape: dict[str, Any],
    lengths: list[int],
    size: int,
    use_sinks: bool,
    seed: int,
) -> None:
    spec = _spec(shape)
    sinks = _sinks(spec, use_sinks)
    seqs = [_sequence(spec, length, dtypes[0], seed + i) for i, length in enumerate(lengths)]
    whole = []
    for seq in seqs:
        cache = _cache(kernels, spec, dtypes, 16, 1)
        whole += cache.step([_placed(cache, seq)], [len(seq.q)], sinks)

    rng = random.Random(seed)
    cache = _cache(kernels, spec, dtypes, size, 2)
    placed = [_placed(cache, seq) for seq in seqs]
    while any(seq.done < len(seq.q) for seq in placed):
        wanted = [rng.choice([0, 1, 1, 2, 17, 100, 256, 400]) for _ in placed]
        counts = [
            min(len(seq.q) - seq.done, count) for seq, count in zip(placed, wanted, strict=True)
        ]
        native.required().set_num_threads(rng.randint(1, 2))
        before = [seq.done for seq in placed]
        for i, rows in enumerate(cache.step(placed, counts, sinks)):
            want = whole[i][before[i] : before[i] + len(rows)]
            assert torch.equal(_bits(rows), _bits(want))


@pytest.mark.parametrize("dtypes", [*PAIRS[:2], PAIRS[3]], ids=str)
def test_last_rows_are_equal_among_1_to_300_rows(
    kernels: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    spec = _spec(SHAPES[0])
    seq = _sequence(spec, 300, dtypes[0], 0)
    cache = _cache(kernels, spec, dtypes, 16, 0)
    whole = cache.step([_placed(cache, seq)], [300])[0]
    for count in (1, 2, 3, 4, 5, 6, 7, 15, 16, 17, 31, 32, 33, 64, 100, 255, 256, 257, 299):
        for threads in (1, 2):
            native.required().set_num_threads(threads)
            cache.free = list(range(cache.kv[0].shape[0]))
            again = _placed(cache, seq)
            if count < 300:
                cache.step([again], [300 - count])
            assert torch.equal(_bits(cache.step([again], [count])[0]), _bits(whole[-count:]))


@pytest.mark.parametrize("dtypes", [*PAIRS[:2], PAIRS[4]], ids=str)
@pytest.mark.parametrize("window", [None, 1000])
def test_long_decode_is_the_same_whole_and_cut_among_threads(
    kernels: str, dtypes: tuple[torch.dtype, torch.dtype], window: int | None
) -> None:
    spec = AttentionSpec(
        num_heads=3, num_kv_heads=1, head_dim=64, scale=0.125, sliding_window=window
    )
    seq = _sequence(spec, 2300, dtypes[0], 0)
    results = []
    for threads in (1, 2, 7):
        native.required().set_num_threads(threads)
        cache = _cache(kernels, spec, dtypes, 16, 0)
        placed = _placed(cache, seq)
        for count in (2298, 1, 1):
            rows = cache.step([placed], [count], _sinks(spec, True))[0]
        results.append(rows)
    want = attend_whole(spec, seq.q[-1:], seq.k, seq.v, _sinks(spec, True))
    bound = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.int8: 5e-3}[dtypes[1]]
    assert (results[0].double() - want).abs().max() < bound
    for rows in results[1:]:
        assert torch.equal(_bits(rows), _bits(results[0]))


def test_values_that_a_row_does_not_see_never_touch_it(kernels: str) -> None:
    for dtypes in PAIRS:
        spec = _spec({**SHAPES[0], "sliding_window": 33})
        seq = _sequence(spec, 200, dtypes[0], 0)
        cache = _cache(kernels, spec, dtypes, 16, 0)
        clean = cache.step([_placed(cache, seq)], [200])[0]
        broken = Whole(seq.q, seq.k.clone(), seq.v.clone(), [])
        broken.v[101] = float("nan")
        broken.k[101] = float("inf")
        cache = _cache(kernels, spec, dtypes, 16, 0)
        rows = cache.step([_placed(cache, broken)], [200])[0]
        assert torch.equal(_bits(rows[:101]), _bits(clean[:101]))
        assert rows[101 : 101 + 33].isnan().all()
        assert torch.equal(_bits(rows[101 + 33 :]), _bits(clean[101 + 33 :]))


def test_scores_may_be_far_apart_and_large(kernels: str) -> None:
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=16, scale=1.0)
    seq = _sequence(spec, 600, torch.float32, 0)
    seq.q *= 40
    seq.q[500:] *= -1e3
    cache = _cache(kernels, spec, PAIRS[0], 16, 0)
    rows = cache.step([_placed(cache, seq)], [600])[0]
    scores = torch.einsum("qhd,kd->hqk", seq.q.double(), seq.k[:, 0].double())
    scores.masked_fill_(torch.ones(600, 600).triu(1).bool(), -torch.inf)
    want = torch.einsum("hqk,kd->qhd", scores.softmax(-1), seq.v[:, 0].double())
    assert rows.isfinite().all()
    # Scores of a thousand have float32 errors of a ten-thousandth.
    assert (rows[:500].double() - want[:500]).abs().max() < 1e-3


def test_soft_cap_is_right_from_tiny_to_huge_scores(kernels: str) -> None:
    spec = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=1, scale=1.0, logit_softcap=50.0)
    seq = _sequence(spec, 256, torch.float32, 0)
    seq.q.fill_(1.0)
    seq.k.copy_(torch.cat((-torch.logspace(-6, 4, 128), torch.logspace(-6, 4, 128))).view(-1, 1, 1))
    cache = _cache(kernels, spec, PAIRS[0], 16, 0)
    rows = cache.step([_placed(cache, seq)], [256])[0]
    assert (rows.double() - attend_whole(spec, seq.q, seq.k, seq.v)).abs().max() < 1e-5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtypes", [PAIRS[1], PAIRS[3]], ids=str)
def test_sequences_that_share_blocks_have_the_rows_they_have_alone(
    kernels: str, dtypes: tuple[torch.dtype, torch.dtype], shape: dict[str, Any]
) -> None:
    spec, common = _spec(shape), 288
    first = _sequence(spec, 400, dtypes[0], 0)
    seqs = [first]
    for seed in (1, 2, 3):
        seq = _sequence(spec, 320 + 20 * seed, dtypes[0], seed)
        for name in ("q", "k", "v"):
            getattr(seq, name)[:common] = getattr(first, name)[:common]
        seqs.append(seq)
    seqs.append(_sequence(spec, 330, dtypes[0], 9))  # a stranger among them
    native.required().set_num_threads(2)
    whole = []
    for seq in seqs:
        cache = _cache(kernels, spec, dtypes, 16, 1)
        whole += cache.step([_placed(cache, seq)], [len(seq.q)])

    cache = _cache(kernels, spec, dtypes, 16, 2)
    placed = [_placed(cache, seq) for seq in seqs]
    counts = [common, 0, 0, 0, 317]
    cache.step(placed, counts)
    for sharer in placed[1:4]:
        sharer.blocks[: common // 16] = placed[0].blocks[: common // 16]
        sharer.done = common
    order = [2, 4, 0, 3, 1]  # strangers between sharers
    for wanted in ([1] * 5, [1, 7, 1, 30, 1], [1] * 5):
        before = [placed[i].done for i in order]
        rows = cache.step([placed[i] for i in order], wanted)
        for i, start, got in zip(order, before, rows, strict=True):
            assert torch.equal(_bits(got), _bits(whole[i][start : start + len(got)]))
