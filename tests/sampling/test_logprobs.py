"""Logprobs, ranks and alternatives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagemill.messages import TokenScores
from tests.sampling.rows import one, row, run, sampler

TIED = [1.0, 3.0, 3.0, 0.0, 3.0]


def scores(logits: object, mode: str = "raw_logprobs", **fields: object) -> TokenScores:
    result = one(logits, row(**fields), mode=mode)  # type: ignore[arg-type]
    assert result.error is None
    return result.scores[0]


def test_logprobs_equal_log_softmax() -> None:
    logits = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * 4
    wanted = torch.log_softmax(torch.from_numpy(logits).double(), 0)
    got = scores(logits, logprobs=-1)
    assert len(got.top_ids) == 1000
    assert np.allclose(got.top_logprobs, wanted[list(got.top_ids)], atol=1e-6, rtol=0)
    assert abs(got.logprob - float(wanted.max())) < 1e-6


def test_alternatives_fall_and_ties_go_to_the_lower_id() -> None:
    got = scores(TIED, logprobs=3)
    assert got.top_ids == (1, 2, 4)
    assert scores(TIED, logprobs=2).top_ids == (1, 2)
    assert scores(TIED, logprobs=-1).top_ids == (1, 2, 4, 0, 3)


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert one(TIED, row()).tokens == (1,)


@pytest.mark.parametrize(("token", "rank"), [(1, 1), (2, 2), (4, 3), (0, 4), (3, 5)])
def test_ranks_are_unique(token: int, rank: int) -> None:
    assert scores(TIED, logprobs=0, allowed_token_ids=(token,)).rank == rank


def test_no_alternatives_still_gives_the_chosen_one() -> None:
    got = scores(TIED, logprobs=0)
    assert (got.token_id, got.rank, got.top_ids) == (1, 1, ())


def test_nobody_asked_means_no_scores() -> None:
    assert one(TIED, row()).scores == ()


def test_raw_modes_see_no_change_processed_ones_see_all() -> None:
    logits = [0.0, 2.0, 1.0]
    fields = {"logprobs": 3, "logit_bias": ((0, 4.0),)}
    assert scores(logits, "raw_logits", **fields).top_logprobs == (2.0, 1.0, 0.0)
    assert scores(logits, "processed_logits", **fields).top_logprobs == (4.0, 2.0, 1.0)
    raw = scores(logits, "raw_logprobs", **fields)
    assert (raw.token_id, raw.rank) == (0, 3)
    processed = scores(logits, "processed_logprobs", **fields)
    assert processed.rank == 1
    assert abs(sum(np.exp(processed.top_logprobs)) - 1) < 1e-6


def test_processed_logprobs_are_those_of_the_draw() -> None:
    logits = np.log([0.5, 0.25, 0.15, 0.1])
    fields = {"logprobs": -1, "temperature": 1.0, "top_k": 2}
    got = scores(logits, "processed_logprobs", **fields)
    assert np.exp(got.top_logprobs) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    got = scores(logits, "processed_logits", **{**fields, "temperature": 0.5, "top_k": 0})
    assert got.top_logprobs == pytest.approx(np.log([0.5, 0.25, 0.15, 0.1]) * 2)


def test_prompt_scores_are_raw() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])
    first, second = sampler("raw_logits").score_prompt(logits, [0, 0], [2, 0])
    assert first == TokenScores(0, 0.0, 3, (2, 1), (2.0, 1.0))
    assert second == TokenScores(0, 2.0, 1)


def test_prompt_row_that_is_not_finite_names_the_dtype_and_spares_the_others() -> None:
    logits = torch.tensor([[0.0, 1.0], [float("nan"), 0.0], [1.0, 0.0]])
    good, bad, also_good = sampler().score_prompt(logits, [0, 0, 0], [0, 0, 0])
    assert isinstance(bad, str) and "float32" in bad
    assert isinstance(good, TokenScores) and isinstance(also_good, TokenScores)


def test_each_sample_has_its_own_scores() -> None:
    result = one([0.0, 0.1, 0.2], row(samples=20, temperature=1.0, logprobs=1))
    assert [s.token_id for s in result.scores] == list(result.tokens)
    assert {s.rank for s in result.scores} == {1, 2, 3}


def test_wide_rows_find_the_same_alternatives_as_a_sort() -> None:
    rng = np.random.default_rng(1)
    logits = np.round(rng.standard_normal((4, 3001)) * 8).astype(np.float32)
    results = run(logits, *[row(logprobs=k) for k in (1, 5, 20, 300)])
    for values, result in zip(logits, results, strict=True):
        order = np.argsort(-values, kind="stable")
        top = result.scores[0].top_ids
        assert list(top) == order[: len(top)].tolist()
