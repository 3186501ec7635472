"""Temperature, min_p, top_k, top_p and the draw.

The kept tokens of a row are a set; the draw walks them by rising id. One uniform number u picks the
first token whose cumulative weight exceeds u times the total (inverse CDF, float64 sums). Called by the
sampler.

    weights   exp((logit - highest logit) / temperature), so the highest weight is 1
    min_p     keep weights >= min_p
    top_k     of those the k largest, ties to the lower id
    top_p     of those the shortest falling run whose share of their weight reaches p; at least one
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagemill.messages import SamplingSpec
from pagemill.sampling.ranking import (
    BLOCK,
    Floats,
    Ids,
    at_least,
    block_maxima,
    block_sums,
    kth_level,
    ranked,
)

_MOST_TEMPERATURE = float(np.finfo(np.float32).max)
_FIRST_LOOK = 1024  # at most so many tokens have a share of 1 / 1024 or more


@dataclass(frozen=True, slots=True)
class Weights:
    """Unnormalized probabilities of some rows, and sums over blocks of 256 tokens."""

    rows: Floats  # [rows, vocab] float32, 0..1, the largest 1
    maxima: Floats  # [rows, blocks] float32
    sums: NDArray[np.float64]  # [rows, blocks]


def make_weights(logits: Floats, highest: Floats, temperatures: list[float]) -> Weights:
    """Return the weights of rows [rows, vocab], whose largest entries are `highest` [rows]."""
    divisors = np.minimum(temperatures, _MOST_TEMPERATURE).astype(np.float32)
    # Very low temperatures overflow to -inf, whose weight is 0: that is the limit.
    with np.errstate(over="ignore", under="ignore"):
        weights = logits - highest[:, None]
        weights /= divisors[:, None]
        np.exp(weights, out=weights)
    return Weights(weights, block_maxima(weights), block_sums(weights))


def kept_tokens(weights: Floats, maxima: Floats, total: float, spec: SamplingSpec) -> Ids | None:
    """Return the ids that min_p, top_k and top_p keep, rising; None: all of them.

    `weights` [vocab] is one row, `total` its sum. The row is not sorted: a first look takes tokens with
    a share of 1/1024 or more, and a second one, when those do not decide, as many as needed.
    """
    top_k = spec.top_k if 0 < spec.top_k < len(weights) else 0
    if not top_k and spec.top_p >= 1.0:
        return at_least(weights, maxima, np.float32(spec.min_p)) if spec.min_p > 0.0 else None
    floor = float(np.float32(spec.min_p)) if spec.min_p > 0.0 else float(np.finfo(np.float32).tiny)
    if spec.min_p > 0.0 and not top_k:
        total = float(weights[at_least(weights, maxima, floor)].sum(dtype=np.float64))
    first = ranked(weights, at_least(weights, maxima, max(total / _FIRST_LOOK, floor)))
    if not top_k:
        kept = _head(weights, first, spec.top_p * total)
        return np.sort(kept) if kept is not None else _wide_head(weights, spec.top_p * total, floor)
    if len(first) < top_k:
        level = max(kth_level(weights, maxima, top_k), floor)
        first = ranked(weights, at_least(weights, maxima, level))
    first = first[:top_k]
    if spec.top_p < 1.0:
        mass = float(np.cumsum(weights[first], dtype=np.float64)[-1])
        kept = _head(weights, first, spec.top_p * mass)
        first = first if kept is None else kept
    return np.sort(first)


def _head(weights: Floats, ids: Ids, goal: float) -> Ids | None:
    """Return the shortest run of ranked ids whose weight reaches the goal; None: they do not."""
    sums = np.cumsum(weights[ids], dtype=np.float64)
    if not len(ids) or sums[-1] < goal:
        return None
    return ids[: int(np.searchsorted(sums, goal, side="left")) + 1]


def _wide_head(weights: Floats, goal: float, floor: float) -> Ids:
    """Do what `_head` does over the whole row, sorting only the tokens next to the border.

    The upper 16 bits of a positive float32 rise with it, so they bin the weights (128 bins an octave);
    whole bins are taken from the top until the goal lies in one, and that one is sorted.
    """
    bins = weights.view(np.int32) >> 16
    masses = np.bincount(bins, weights=np.where(weights >= floor, weights, 0.0))
    from_top = np.cumsum(masses[::-1])
    place = int(np.searchsorted(from_top, goal, side="left"))
    if place >= len(masses):  # top_p is so close to 1 that rounding keeps the sum below the goal
        return np.flatnonzero(weights >= floor)
    border = len(masses) - 1 - place
    before = float(from_top[place - 1]) if place else 0.0
    edge = ranked(weights, np.flatnonzero((bins == border) & (weights >= floor)))
    kept = _head(weights, edge, goal - before)
    chosen = bins > border
    chosen[edge if kept is None else kept] = True
    return np.flatnonzero(chosen)


def draw(
    weights: Floats,
    sums: NDArray[np.float64],
    kept: Ids | None,
    uniforms: NDArray[np.float64],
) -> list[int]:
    """Return one token a uniform number. `weights` [vocab], `sums` [blocks], `kept` rising or None."""
    if kept is not None:
        ends = np.cumsum(weights[kept], dtype=np.float64)
        return [int(i) for i in kept[_invert(ends, uniforms * ends[-1])]]
    ends = np.cumsum(sums)
    targets = uniforms * ends[-1]
    blocks = np.searchsorted(ends, targets, side="right")
    # u * total may round up to the total: then the last block with any weight is meant.
    blocks = np.minimum(blocks, int(np.flatnonzero(sums)[-1]))
    tokens = []
    for block, target in zip(blocks.tolist(), targets, strict=True):
        start = block * BLOCK
        before = float(ends[block - 1]) if block else 0.0
        inner = before + np.cumsum(weights[start : start + BLOCK], dtype=np.float64)
        tokens.append(start + int(_invert(inner, target[None])[0]))
    return tokens


def _invert(ends: NDArray[np.float64], targets: NDArray[np.float64]) -> Ids:
    """Return the first index whose cumulative weight exceeds each target.

    A target that rounding put at the end or past it means the last token of any weight, which is the
    first one to reach the final sum.
    """
    found = np.searchsorted(ends, targets, side="right")
    last = int(np.searchsorted(ends, ends[-1], side="left"))
    return np.minimum(found, last)
