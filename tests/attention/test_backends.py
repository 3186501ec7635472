"""Every backend against the float64 oracle: plain torch, and the native kernels of each path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagemill.attention import torch_layout
from pagemill.attention.base import AttentionSpec, StepAttention
from tests.attention.kernels import KERNELS, make_backend
from tests.attention.oracle import attend_whole
from tests.attention.runner import Cache, Whole, check_rows, run_to_end

pytestmark = pytest.mark.parametrize("kernels", KERNELS)


def _spec(**changes: Any) -> AttentionSpec:
    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "scale": 0.6}
    return AttentionSpec(**{**sizes, **changes})


def _cache(kernels: str, spec: AttentionSpec, **changes: Any) -> Cache:
    sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 4}
    return Cache(make_backend(kernels), spec, **{**sizes, **changes})


@st.composite
def _cases(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads = draw(st.integers(1, 3))
    return {
        "spec": AttentionSpec(
            num_heads=kv_heads * draw(st.integers(1, 3)),
            num_kv_heads=kv_heads,
            head_dim=draw(st.sampled_from([1, 4, 6, 16])),
            scale=draw(st.sampled_from([0.1, 0.5, 1.3])),
            sliding_window=draw(st.none() | st.integers(1, 20)),
            logit_softcap=draw(st.none() | st.sampled_from([0.5, 3.0])),
        ),
        "block_size": draw(st.sampled_from([1, 2, 3, 4, 16])),
        "lengths": draw(st.lists(st.integers(1, 40), min_size=1, max_size=5)),
        "use_sinks": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
        "segment": draw(st.sampled_from([4096, 16, 5])),
        "max_rows": draw(st.sampled_from([64, 4])),
        "gather_bytes": draw(st.sampled_from([2 << 20, 600])),
    }


@given(case=_cases(), data=st.data())
@settings(deadline=None, max_examples=120)
def test_any_ragged_schedule_equals_the_oracle(
    kernels: str, case: dict[str, Any], data: st.DataObject
) -> None:
    spec: AttentionSpec = case["spec"]
    with pytest.MonkeyPatch.context() as patch:
        # Small limits bring every way of cutting a step within reach of short sequences.
        patch.setattr(torch_layout, "SEGMENT_KEYS", case["segment"])
        patch.setattr(torch_layout, "MAX_ROWS", case["max_rows"])
        patch.setattr(torch_layout, "MIN_ROWS", min(case["max_rows"], 16))
        patch.setattr(torch_layout, "GATHER_BYTES", case["gather_bytes"])
        cache = _cache(
            kernels, spec, num_blocks=220, block_size=case["block_size"], seed=case["seed"]
        )
        sinks = torch.linspace(-2, 2, spec.num_heads) if case["use_sinks"] else None
        seqs = [cache.add(length) for length in case["lengths"]]
        rows: list[list[Tensor]] = [[] for _ in seqs]
        while any(seq.done < len(seq.q) for seq in seqs):
            counts = [data.draw(st.integers(0, len(seq.q) - seq.done)) for seq in seqs]
            if not any(counts):
                counts = [min(1, len(seq.q) - seq.done) for seq in seqs]
            for seq_rows, new in zip(rows, cache.step(seqs, counts, sinks), strict=True):
                seq_rows.append(new)
        check_rows(cache, seqs, [torch.cat(seq_rows) for seq_rows in rows], sinks)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
def test_chunked_equals_whole(kernels: str, chunk: int, window: int | None) -> None:
    cache = _cache(kernels, _spec(sliding_window=window), num_blocks=200)
    seqs = [cache.add(length) for length in (37, 1, 16, 130)]
    check_rows(cache, seqs, run_to_end(cache, seqs, chunk))


def test_window_of_eight_sees_eight_keys_itself_included(kernels: str) -> None:
    spec = _spec(num_heads=1, num_kv_heads=1, sliding_window=8)
    cache = _cache(kernels, spec)
    seq = cache.add(12)
    seq.k.zero_()  # equal scores: the output is the mean of the visible values
    rows = run_to_end(cache, [seq], 12)[0]
    for position in range(12):
        want = seq.v[max(0, position - 7) : position + 1].mean(0)
        assert torch.allclose(rows[position], want, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [{"sliding_window": 5}, {"logit_softcap": 0.5}, {"scale": 0.2}, {"num_kv_heads": 4}],
)
def test_each_feature_changes_the_result(kernels: str, change: dict[str, Any]) -> None:
    plain, changed = _cache(kernels, _spec()), _cache(kernels, _spec(**change))
    rows = [run_to_end(cache, [cache.add(20)], 20)[0] for cache in (plain, changed)]
    assert (rows[0] - rows[1]).abs().max() > 1e-2


def test_sink_takes_weight_and_gives_no_value(kernels: str) -> None:
    cache = _cache(kernels, _spec())
    seq = cache.add(9)
    rows = run_to_end(cache, [seq], 9, torch.full((4,), 50.0))[0]
    assert rows.abs().max() < 1e-6
    seq.done = 0
    assert torch.allclose(
        run_to_end(cache, [seq], 9, torch.full((4,), -50.0))[0], _again(cache, seq)
    )


def _again(cache: Cache, seq: Whole) -> Tensor:
    seq.done = 0
    return run_to_end(cache, [seq], 9)[0]


def test_prefill_decode_and_idle_sequences_share_a_step(kernels: str) -> None:
    cache = _cache(kernels, _spec(), num_blocks=400)
    seqs = [cache.add(length) for length in (300, 65, 66, 2, 40)]
    first = cache.step(seqs, [150, 64, 65, 1, 0])
    second = cache.step(seqs, [150, 1, 1, 1, 40])
    check_rows(cache, seqs, [torch.cat(pair) for pair in zip(first, second, strict=True)])


def test_long_sequence_is_merged_from_parts(kernels: str) -> None:
    spec = _spec(num_heads=2, num_kv_heads=1, head_dim=4)
    cache = _cache(kernels, spec, num_blocks=700, block_size=16)
    length = 2 * torch_layout.SEGMENT_KEYS + 100
    seq = cache.add(length)
    seq.k[5] = 9.0  # one strong key far back, so that the merge has something to lose
    cache.step([seq], [length - 3])  # through parts too
    got = torch.cat([cache.step([seq], [count])[0] for count in (2, 1)])
    want = attend_whole(spec, seq.q[-3:], seq.k, seq.v)
    assert (got.double() - want).abs().max() < 1e-5


def test_empty_step_returns_nothing_and_writes_nothing(kernels: str) -> None:
    cache = _cache(kernels, _spec())
    assert cache.step([], []) == []
    assert all(pool.isnan().all() for pool in cache.kv)


def test_only_the_mapped_slots_are_written_and_read(kernels: str) -> None:
    cache = _cache(kernels, _spec(), num_blocks=8)
    seq, other = cache.add(6), cache.add(4)
    cache.step([other], [4])
    before = [pool[other.blocks[0]].clone() for pool in cache.kv]
    for block in cache.free:
        cache.kv[0][block] = float("inf")
        cache.kv[1][block] = float("inf")
    rows = run_to_end(cache, [seq], 3)
    check_rows(cache, [seq], rows)
    for pool, kept in zip(cache.kv, before, strict=True):
        assert torch.equal(pool[other.blocks[0]], kept)
    assert all(cache.kv[1][block].isinf().all() for block in cache.free)


def test_values_that_are_not_finite_stay_in_their_sequence(kernels: str) -> None:
    cache = _cache(kernels, _spec())
    seqs = [cache.add(length) for length in (6, 9, 5)]
    seqs[1].v[2] = float("nan")
    rows = run_to_end(cache, seqs, 4)
    check_rows(cache, [seqs[0], seqs[2]], [rows[0], rows[2]])
    assert rows[1][2:].isnan().any()


def test_blocks_that_held_another_request_are_clean_for_the_next(kernels: str) -> None:
    cache = _cache(kernels, _spec(), num_blocks=3)
    seq = cache.add(12)
    seq.v.fill_(float("nan"))
    run_to_end(cache, [seq], 12)
    for length, chunk in ((10, 3), (5, 1), (9, 9)):
        cache.free = list(seq.blocks)
        after = cache.add(length)
        check_rows(cache, [after], run_to_end(cache, [after], chunk))


def test_decode_rows_do_not_depend_on_batch_mates(kernels: str) -> None:
    spec = AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)
    lengths = [61, 300, 17, 129, 300, 299, 5, 410]
    alone, together = [], []
    for group in (False, True):
        cache = _cache(kernels, spec, num_blocks=200, block_size=16)
        seqs = [cache.add(length) for length in lengths]
        for seq in seqs:
            cache.step([seq], [len(seq.q) - 1])
        if group:
            together = cache.step(seqs, [1] * len(seqs))
        else:
            alone = [cache.step([seq], [1])[0] for seq in seqs]
    for one, other in zip(alone, together, strict=True):
        assert (one - other).abs().max() < 1e-6


def test_slices_of_a_fused_projection_give_the_same_rows(kernels: str) -> None:
    spec = _spec()
    cache = _cache(kernels, spec)
    seq = cache.add(9)
    batch = cache.batch([seq], [9])
    fused = torch.cat((seq.q, seq.k, seq.v), 1)
    q, k, v = fused.split([4, 2, 2], 1)
    assert not q.is_contiguous()
    backend = cache.backend
    out = backend.forward(spec, q, k, v, cache.kv, backend.prepare(batch))
    check_rows(cache, [seq], [out])


def test_layers_of_one_step_may_have_different_windows_and_heads(kernels: str) -> None:
    specs = [_spec(), _spec(sliding_window=3), _spec(num_heads=2, num_kv_heads=1)]
    caches = [_cache(kernels, spec, seed=i) for i, spec in enumerate(specs)]
    seqs = [cache.add(11) for cache in caches]
    for seq in seqs:
        seq.blocks = seqs[0].blocks
    attend = StepAttention(
        make_backend(kernels), specs, [c.kv for c in caches], caches[0].batch([seqs[0]], [11])
    )
    for layer, (cache, seq) in enumerate(zip(caches, seqs, strict=True)):
        check_rows(cache, [seq], [attend(layer, seq.q, seq.k, seq.v)])


@pytest.mark.parametrize("strength", [1.0, 4.0])
def test_bfloat16_loses_no_more_than_its_inputs_and_outputs(kernels: str, strength: float) -> None:
    spec = AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)
    cache = _cache(kernels, spec, num_blocks=64, block_size=16, dtype=torch.bfloat16)
    seq = cache.add(200)
    seq.q *= strength
    first = cache.step([seq], [190])[0]
    rows = torch.cat([first] + [cache.step([seq], [1])[0] for _ in range(10)])
    want = attend_whole(spec, seq.q, seq.k, seq.v)
    error = (rows.double() - want).square().mean().sqrt() / want.square().mean().sqrt()
    # Rounding the result alone costs about 0.0017; scores rounded to bfloat16 would cost 0.009.
    assert error < 0.003


def test_cache_may_be_narrower_than_the_model(kernels: str) -> None:
    spec = _spec()
    cache = _cache(kernels, spec, dtype=torch.bfloat16)
    seq = cache.add(9)
    for name in ("q", "k", "v"):
        setattr(seq, name, getattr(seq, name).float())
    cache.dtype = torch.float32
    check_rows(cache, [seq], run_to_end(cache, [seq], 4))
