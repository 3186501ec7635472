"""Logprobs of chosen tokens and of the alternatives beside them.

Sums of exponentials are float64 and run along one row in a fixed order. Ranks are unique: 1 plus the
tokens that are more likely, plus the equally likely ones with a lower id. Called by the sampler.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagemill.messages import TokenScores
from pagemill.sampling.ranking import Floats, block_maxima, block_sums, largest


def log_normalizers(logits: Floats) -> NDArray[np.float64]:
    """Return log(sum(exp(row))) of rows [rows, vocab]; each row has a finite maximum."""
    highest = logits.max(axis=1)
    with np.errstate(under="ignore"):
        shifted = logits - highest[:, None]
        np.exp(shifted, out=shifted)
    sums = np.cumsum(block_sums(shifted), axis=1)[:, -1]
    normalizers: NDArray[np.float64] = highest.astype(np.float64) + np.log(sums)
    return normalizers


def score_rows(
    logits: Floats,
    chosen: Sequence[Sequence[int]],
    counts: Sequence[int],
    *,
    normalizers: NDArray[np.float64] | None,
) -> list[tuple[TokenScores, ...]]:
    """Return the scores of each row's chosen tokens.

    logits [rows, vocab]; `counts` says how many alternatives a row wants (-1: the whole vocabulary).
    A score is the logit less the row's normalizer; without normalizers it is the logit.
    """
    maxima = block_maxima(logits)
    scored = []
    for i, (tokens, count) in enumerate(zip(chosen, counts, strict=True)):
        row = logits[i]
        shift = 0.0 if normalizers is None else float(normalizers[i])
        top_ids: tuple[int, ...] = ()
        top_scores: tuple[float, ...] = ()
        if count:
            ids = largest(row, maxima[i], len(row) if count < 0 else count)
            top_ids = tuple(ids.tolist())
            top_scores = tuple((row[ids].astype(np.float64) - shift).tolist())
        scored.append(
            tuple(
                TokenScores(token, float(row[token]) - shift, rank(row, token), top_ids, top_scores)
                for token in tokens
            )
        )
    return scored


def rank(row: Floats, token: int) -> int:
    """Return the token's place among falling entries, ties to the lower id; 1 is the highest."""
    value = row[token]
    return 1 + int(np.count_nonzero(row > value)) + int(np.count_nonzero(row[:token] == value))
