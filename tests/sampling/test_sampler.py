"""Rows never interact, draws are keyed, and broken logits are an error of their row alone."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagemill.sampling import sampler as sampler_module
from pagemill.sampling.row_math import SampleRow
from pagemill.sampling.sampler import SampledRow
from tests.sampling.rows import one, row, run

VOCAB = 777

KINDS: list[dict[str, Any]] = [
    {},
    {"logprobs": 5},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_p": 0.8, "logprobs": 2},
    {"temperature": 1.0, "top_p": 0.999},
    {"temperature": 1.0, "top_k": 10, "logprobs": -1},
    {"temperature": 1.0, "top_k": 600, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 0.01, "top_k": 30, "top_p": 0.5},
    {"temperature": 0.9, "repetition_penalty": 1.3, "logprobs": 1},
    {"frequency_penalty": 1.0, "presence_penalty": 0.5},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(50))},
    {"temperature": 1.0, "bad_words": ((3,), (1, 2))},
    {"min_tokens": 9, "stop_token_ids": (1, 2, 3)},
    {"logit_bias": ((7, 3.0), (700, -9.0)), "temperature": 1.0},
]


def make_row(i: int) -> SampleRow:
    prompt = [(5 * i + j) % VOCAB for j in range(6)]
    return row(prompt, [1, 1, 2], samples=1 + 2 * (i % 3), seed=i * 31 - 7, **KINDS[i % len(KINDS)])


LOGITS = np.random.default_rng(2).standard_normal((2 * len(KINDS), VOCAB)).astype(np.float32) * 3


@functools.cache
def alone(arithmetic: str) -> list[SampledRow]:
    return [one(LOGITS[i], make_row(i)) for i in range(len(LOGITS))]


@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.permutations(range(len(LOGITS))), st.integers(1, len(LOGITS)), st.integers(1, 9))
def test_a_row_does_not_notice_its_mates(
    arithmetic: str, order: list[int], count: int, tile: int
) -> None:
    chosen = order[:count]
    before = sampler_module._TILE_BYTES
    sampler_module._TILE_BYTES = 4 * VOCAB * tile
    try:
        results = run(LOGITS[chosen], *[make_row(i) for i in chosen])
    finally:
        sampler_module._TILE_BYTES = before
    assert results == [alone(arithmetic)[i] for i in chosen]


def test_big_vocabulary_rows_do_not_notice_their_mates() -> None:
    logits = np.random.default_rng(3).standard_normal((40, 20_001)).astype(np.float32)
    rows = [
        row((1,), samples=2, seed=i, logprobs=2, temperature=1.0, top_p=(1.0, 0.9)[i % 2])
        for i in range(40)
    ]
    together = run(logits, *rows)
    assert together == [one(logits[i], rows[i]) for i in range(40)]


def test_draw_depends_on_seed_index_and_position_alone() -> None:
    flat = np.zeros(50_000, np.float32)
    fields = {"temperature": 1.0, "seed": 4}
    base = one(flat, row((1, 2), (3,), **fields)).tokens
    assert one(flat, row((9, 8, 7), (), **fields)).tokens == base  # the same position
    assert one(flat, row((1, 2), (3, 4), **fields)).tokens != base
    assert one(flat, row((1, 2), (3,), **{**fields, "seed": 5})).tokens != base
    assert one(flat, row((1, 2), (3,), index=1, **fields)).tokens != base


def test_samples_of_one_row_are_those_of_their_sample_indices() -> None:
    flat = np.zeros(5_000, np.float32)
    together = one(flat, row((1,), samples=4, temperature=1.0, seed=4)).tokens
    apart = [one(flat, row((1,), index=i, temperature=1.0, seed=4)).tokens[0] for i in range(4)]
    assert list(together) == apart
    assert len(set(together)) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_logits_are_an_error_naming_the_dtype(value: float, temperature: float) -> None:
    logits = np.zeros((3, 600), np.float32)
    logits[1, 500] = value
    results = run(logits, *[row((1,), temperature=temperature, logprobs=1) for _ in range(3)])
    assert results[1].tokens == ()
    assert "float32" in (results[1].error or "") and "overflow" in (results[1].error or "")
    assert results[0].error is None and len(results[2].tokens) == 1


def test_row_of_minus_infinity_is_broken() -> None:
    assert "not finite" in (one(np.full(9, -np.inf), row()).error or "")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_everything_masked_is_an_error_never_token_0(temperature: float) -> None:
    clash = row(allowed_token_ids=(2,), bad_words=((2,),), temperature=temperature)
    results = run([[1.0, 2.0, 3.0]] * 2, clash, row(temperature=temperature))
    assert results[0].tokens == () and "masked" in (results[0].error or "")
    assert results[1].error is None


def test_single_impossible_logit_of_a_model_is_no_error() -> None:
    assert one([0.0, -np.inf, 1.0], row(logprobs=1)).tokens == (2,)
