"""Finding the largest entries of a row without sorting the row.

A row of logits is cut into blocks of 256. The k-th largest of the blocks' maxima is not above the k-th
largest entry, so only blocks whose maximum reaches it can hold one of the k largest. Ties always go to
the lower index. Called by `draw` and `logprobs`.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

BLOCK = 256


def split_blocks(matrix: Floats) -> tuple[Floats, Floats]:
    """Return views of `matrix` [rows, n]: whole blocks [rows, n // 256, 256] and the rest [rows, r]."""
    rows, columns = matrix.shape
    count = columns // BLOCK
    row_stride, stride = matrix.strides
    whole = as_strided(
        matrix, (rows, count, BLOCK), (row_stride, BLOCK * stride, stride), writeable=False
    )
    return whole, matrix[:, count * BLOCK :]


def block_maxima(matrix: Floats) -> Floats:
    """Return the maximum of each block [rows, ceil(n / 256)]."""
    whole, rest = split_blocks(matrix)
    maxima: Floats = whole.max(axis=-1)
    if rest.shape[1]:
        maxima = np.concatenate([maxima, rest.max(axis=-1, keepdims=True)], axis=1)
    return maxima


def block_sums(matrix: Floats) -> NDArray[np.float64]:
    """Return the float64 sum of each block [rows, ceil(n / 256)]."""
    whole, rest = split_blocks(matrix)
    sums: NDArray[np.float64] = whole.sum(axis=-1, dtype=np.float64)
    if rest.shape[1]:
        tail = rest.sum(axis=-1, dtype=np.float64, keepdims=True)
        sums = np.concatenate([sums, tail], axis=1)
    return sums


def at_least(row: Floats, maxima: Floats, level: float) -> Ids:
    """Return the indices, rising, of entries >= level; `maxima` are the row's block maxima."""
    hot = np.flatnonzero(maxima >= level)
    if 4 * len(hot) >= len(maxima):
        return np.flatnonzero(row >= level)
    columns = (hot[:, None] * BLOCK + np.arange(BLOCK)).ravel()
    if len(columns) and columns[-1] >= len(row):
        columns = columns[columns < len(row)]
    return columns[row[columns] >= level]


def kth_level(row: Floats, maxima: Floats, k: int) -> float:
    """Return a level that at least k entries reach, and hardly more where that comes cheap."""
    if k <= len(maxima):
        return float(np.partition(maxima, len(maxima) - k)[len(maxima) - k])
    return float(np.partition(row, len(row) - k)[len(row) - k])


def ranked(row: Floats, ids: Ids) -> Ids:
    """Return `ids` (rising) by falling entry, ties to the lower id."""
    return ids[np.argsort(-row[ids], kind="stable")]


def largest(row: Floats, maxima: Floats, k: int) -> Ids:
    """Return the k largest by falling entry, ties to the lower id; all of them when k >= n."""
    if k >= len(row):
        return ranked(row, np.arange(len(row)))
    return ranked(row, at_least(row, maxima, kth_level(row, maxima, k)))[:k]
