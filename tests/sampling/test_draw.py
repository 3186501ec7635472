"""What min_p, top_k and top_p keep, and that draws follow the weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.sampling import draw
from tests.sampling.rows import one, row, spec


def kept(logits: np.ndarray, **fields: float) -> list[int]:
    a_spec = spec(**{"temperature": 1.0, **fields})
    weights = draw.make_weights(logits[None], logits.max()[None], [a_spec.temperature])
    total = float(np.cumsum(weights.sums[0])[-1])
    ids = draw.kept_tokens(weights.rows[0], weights.maxima[0], total, a_spec)
    return list(range(len(logits))) if ids is None else ids.tolist()


def kept_by_sorting(logits: np.ndarray, **fields: float) -> list[int]:
    """Do the same the slow way: sort the whole row."""
    a_spec = spec(**{"temperature": 1.0, **fields})
    weights = draw.make_weights(logits[None], logits.max()[None], [a_spec.temperature]).rows[0]
    ids = np.argsort(-weights, kind="stable")
    ids = ids[weights[ids] >= np.float32(a_spec.min_p)]
    if a_spec.top_k > 0:
        ids = ids[: a_spec.top_k]
    if a_spec.top_p < 1.0:
        sums = np.cumsum(weights[ids].astype(np.float64))
        ids = ids[: int(np.searchsorted(sums, a_spec.top_p * sums[-1])) + 1]
    return sorted(ids.tolist())


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**32),
    st.sampled_from([3, 200, 256, 700, 5000]),
    st.sampled_from([0.0, 0.01, 1.0, 6.0]),
    st.sampled_from([0, 1, 2, 50, 1500]),
    st.sampled_from([1.0, 0.999, 0.9, 0.3, 1e-6]),
    st.sampled_from([0.0, 0.001, 0.2, 1.0]),
    st.booleans(),
)
def test_kept_tokens_are_those_of_a_full_sort(
    seed: int, size: int, scale: float, top_k: int, top_p: float, min_p: float, ties: bool
) -> None:
    logits = np.random.default_rng(seed).standard_normal(size).astype(np.float32) * np.float32(
        scale
    )
    if ties:
        logits = np.round(logits)
    fields = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    assert kept(logits, **fields) == kept_by_sorting(logits, **fields)


def test_top_p_is_taken_of_what_top_k_kept() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    # 0.4 / 0.7 = 0.57 of the two kept ones: p = 0.5 is reached by the first alone
    assert kept(logits, top_k=2, top_p=0.5) == [0]
    assert kept(logits, top_k=2, top_p=0.6) == [0, 1]
    assert kept(logits, top_p=0.5) == [0, 1]


def test_min_p_comes_after_temperature() -> None:
    logits = np.log(np.array([0.6, 0.3, 0.1], np.float32))
    assert kept(logits, min_p=0.4) == [0, 1]
    assert kept(logits, min_p=0.4, temperature=0.5) == [0]
    assert kept(logits, min_p=0.4, temperature=2.0) == [0, 1, 2]


def test_one_token_is_always_kept() -> None:
    logits = np.zeros(600, np.float32)
    assert kept(logits, top_p=1e-9) == [0]
    assert kept(logits, top_k=1) == [0]
    assert len(kept(logits, min_p=1.0)) == 600  # all equal the highest


def test_top_k_over_the_vocabulary_keeps_all() -> None:
    assert kept(np.arange(5, dtype=np.float32), top_k=99) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"temperature": 3.0}],
)
def test_draws_follow_the_weights(fields: dict[str, float]) -> None:
    logits = np.array([0.3, 1.7, -0.5, 1.1, 0.9], np.float32)
    n = 16_000
    fields = {"temperature": 1.0, **fields}
    tokens = one(logits, row(samples=n, seed=11, **fields)).tokens
    ids = kept_by_sorting(logits, **fields)
    weights = np.exp(logits[ids] / fields["temperature"])
    expected = n * weights / weights.sum()
    counts = np.bincount(tokens, minlength=5)
    assert counts.sum() == counts[ids].sum() == n
    freedom = max(1, len(ids) - 1)
    chi_square = float(((counts[ids] - expected) ** 2 / expected).sum())
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_draws_over_many_blocks_follow_the_weights() -> None:
    logits = np.where(np.arange(1000) % 250 == 249, 6.0, 0.0).astype(np.float32)
    n = 16_000
    tokens = np.array(one(logits, row(samples=n, temperature=1.0, seed=5)).tokens)
    share = 4 * np.exp(6.0) / (4 * np.exp(6.0) + 996)
    hot = int((tokens % 250 == 249).sum())
    assert abs(hot - n * share) < 5 * (n * share * (1 - share)) ** 0.5


@pytest.mark.parametrize("number", [0.0, 0.5, 1.0 - 2.0**-53])
def test_no_number_draws_a_token_without_weight(number: float) -> None:
    logits = np.full(700, -np.inf, np.float32)
    logits[[300, 301, 600]] = 0.0
    weights = draw.make_weights(logits[None], np.zeros(1, np.float32), [1.0])
    numbers = np.array([number])
    for ids in (None, np.array([299, 300, 301, 600, 601])):
        token = draw.draw(weights.rows[0], weights.sums[0], ids, numbers)[0]
        assert token == {0.0: 300, 0.5: 301}.get(number, 600)


def test_extreme_temperatures_are_their_limits() -> None:
    logits = np.array([1.0, 2.0, 3.0, -np.inf], np.float32)
    cold = one(logits, row(samples=50, temperature=2e-5))
    assert set(cold.tokens) == {2}
    hot = one(logits, row(samples=300, temperature=1e300))
    assert set(hot.tokens) == {0, 1, 2}
