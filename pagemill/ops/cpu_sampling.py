"""Choosing tokens on the native kernels: csrc/sampling, whose header says how.

Arrays are numpy's, as everywhere in `pagemill.sampling`, which calls this through `native_rows`.
"""

from __future__ import annotations

import numpy as np
import torch  # noqa: F401  its OpenMP library must be in the process before the extension
from numpy.typing import NDArray

from pagemill import native

_C = native.required()

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]


def best_rows(logits: Floats) -> tuple[Ids, Floats]:
    """Return the first largest entry of each row [rows, vocab] and its value, NaN if there is one."""
    rows, vocab = _shape(logits)
    best, highest = np.empty(rows, np.int64), np.empty(rows, np.float32)
    _C.best_rows(_address(logits), _stride(logits), rows, vocab, _address(best), _address(highest))
    return best, highest


def draw_rows(logits: Floats, highest: Floats, numbers: Doubles, wholes: Ids) -> Ids:
    """Return the drawn tokens of some rows of logits [rows, vocab], one row's after another's.

    highest [count]; numbers [count, 3]: temperature, top_p, min_p; wholes [count, 6]: row, top_k, seed,
    sample index, position, draws.
    """
    rows, vocab = _shape(logits)
    count = len(highest)
    assert numbers.shape == (count, 3) and wholes.shape == (count, 6)
    assert numbers.dtype == np.float64 and wholes.dtype == np.int64 and highest.dtype == np.float32
    assert not count or 0 <= wholes[:, 0].min() <= wholes[:, 0].max() < rows
    tokens = np.empty(int(wholes[:, 5].sum()), np.int64)
    _C.draw_rows(
        _address(logits), _stride(logits), vocab, count, _address(highest), _address(numbers),
        _address(wholes), _address(tokens),
    )  # fmt: skip
    return tokens


def score_rows(logits: Floats, chosen: Ids, starts: Ids, counts: Ids) -> tuple[Doubles, Ids, Ids]:
    """Return normalizers [rows], ranks [chosen] and the ids of the largest entries [sum of counts].

    Row i has the tokens chosen[starts[i]:starts[i + 1]] and wants counts[i] alternatives.
    """
    rows, vocab = _shape(logits)
    assert len(starts) == rows + 1 and len(counts) == rows and starts[-1] == len(chosen)
    assert chosen.dtype == starts.dtype == counts.dtype == np.int64
    normalizers, ranks = np.empty(rows, np.float64), np.empty(len(chosen), np.int64)
    top_ids = np.empty(int(counts.sum()), np.int64)
    _C.score_rows(
        _address(logits), _stride(logits), rows, vocab, _address(chosen), _address(starts),
        _address(counts), _address(normalizers), _address(ranks), _address(top_ids),
    )  # fmt: skip
    return normalizers, ranks, top_ids


def penalize_row(
    logits: Floats,
    tokens: NDArray[np.int32],
    num_prompt_tokens: int,
    *,
    repetition: float,
    frequency: float,
    presence: float,
) -> None:
    """Penalize one row [vocab] in place; `tokens` are the prompt, then the output."""
    assert logits.dtype == np.float32 and logits.strides == (4,) and tokens.dtype == np.int32
    tokens = np.ascontiguousarray(tokens)
    _C.penalize_row(
        _address(logits), len(logits), _address(tokens), len(tokens), num_prompt_tokens, repetition,
        frequency, presence,
    )  # fmt: skip


def _shape(logits: Floats) -> tuple[int, int]:
    assert logits.dtype == np.float32 and logits.ndim == 2
    assert logits.strides[1] == 4 or logits.shape[1] == 1
    return logits.shape[0], logits.shape[1]


def _stride(logits: Floats) -> int:
    return logits.strides[0] // 4


def _address(array: NDArray[np.generic]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
