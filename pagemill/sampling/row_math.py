"""The work on whole rows of logits that a sampler needs, and how numpy does it.

`NumpyRows` is the reference; `native_rows.NativeRows` does the same on the native kernels, row by row in
parallel. The two agree to rounding: exponentials and the order of float64 sums differ by an ulp or so,
and so may a logprob's last bits and, where a random number falls within 1e-7 of a border between two
tokens, the token. Within one of them a row's results are the same bits in any company. Penalties, random
numbers, the greedy choice, ranks and ties are exactly equal. Called by the sampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagemill.messages import SamplingSpec, TokenScores
from pagemill.sampling import draw, logprobs, penalties
from pagemill.sampling.random import uniforms
from pagemill.sampling.ranking import Floats, Ids


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One sequence that is to get tokens."""

    spec: SamplingSpec
    token_ids: NDArray[np.int32]  # prompt, then output so far
    num_prompt_tokens: int
    sample_index: int
    num_samples: int  # draws from this row, with sample indices sample_index, sample_index + 1, ...


@dataclass(frozen=True, slots=True)
class Drawn:
    """What some rows drew."""

    tokens: list[tuple[int, ...]]
    kept: list[Ids | None]  # the ids that each row kept, rising; None: all, or not known


class RowMath(Protocol):
    """Whole-row operations. `logits` [rows, vocab] float32 is left as it is, but by `penalize`."""

    tells_kept: bool  # whether `draw` says which ids it kept

    def peak_bytes(self, num_rows: int, vocab_size: int, num_threads: int) -> int:
        """Return the most temporary memory of one call over so many rows."""
        ...

    def best(self, logits: Floats) -> tuple[Ids, Floats]:
        """Return the first largest entry of each row and its value, NaN where the row has one."""
        ...

    def draw(
        self, logits: Floats, highest: Floats, indices: Sequence[int], rows: Sequence[SampleRow]
    ) -> Drawn:
        """Draw tokens of the rows `indices`; `rows` and `highest` belong to all of `logits`."""
        ...

    def score(
        self,
        logits: Floats,
        chosen: Sequence[Sequence[int]],
        counts: Sequence[int],
        *,
        normalize: bool,
    ) -> list[tuple[TokenScores, ...]]:
        """Return the scores of each row's tokens, with counts[i] alternatives (-1: all)."""
        ...

    def penalize(
        self,
        logits: Floats,
        spec: SamplingSpec,
        token_ids: NDArray[np.int32],
        num_prompt_tokens: int,
    ) -> None:
        """Penalize one row [vocab] in place; see `penalties.apply_penalties`."""
        ...


class NumpyRows:
    """A `RowMath` of numpy operations, on a tile of rows at once."""

    tells_kept = True

    def peak_bytes(self, num_rows: int, vocab_size: int, num_threads: int) -> int:
        """Count a tile's weights, and for one row a sort of the whole vocabulary.

        That takes float32 keys, int64 order and ids, and float64 sums.
        """
        return (4 * num_rows + 32) * vocab_size

    def best(self, logits: Floats) -> tuple[Ids, Floats]:
        """Use argmax, which takes the first of equal entries, and a NaN before anything else."""
        best = logits.argmax(axis=1)
        return best, logits[np.arange(len(logits)), best]

    def draw(
        self, logits: Floats, highest: Floats, indices: Sequence[int], rows: Sequence[SampleRow]
    ) -> Drawn:
        """Weigh all rows, then keep and draw one by one."""
        drawn = [rows[i] for i in indices]
        whole = len(drawn) == len(rows)
        weights = draw.make_weights(
            logits if whole else logits[list(indices)],
            highest[list(indices)],
            [row.spec.temperature for row in drawn],
        )
        result = Drawn([], [])
        for j, (row, numbers) in enumerate(zip(drawn, _uniforms(drawn), strict=True)):
            total = float(np.cumsum(weights.sums[j])[-1])
            kept = draw.kept_tokens(weights.rows[j], weights.maxima[j], total, row.spec)
            tokens = draw.draw(weights.rows[j], weights.sums[j], kept, numbers)
            result.kept.append(kept)
            result.tokens.append(tuple(tokens))
        return result

    def score(
        self,
        logits: Floats,
        chosen: Sequence[Sequence[int]],
        counts: Sequence[int],
        *,
        normalize: bool,
    ) -> list[tuple[TokenScores, ...]]:
        """Score with the functions of `logprobs`."""
        normalizers = logprobs.log_normalizers(logits) if normalize else None
        return logprobs.score_rows(logits, chosen, counts, normalizers=normalizers)

    def penalize(
        self,
        logits: Floats,
        spec: SamplingSpec,
        token_ids: NDArray[np.int32],
        num_prompt_tokens: int,
    ) -> None:
        """Penalize by fancy indexing."""
        penalties.apply_penalties(logits, spec, token_ids, num_prompt_tokens)


def _uniforms(rows: Sequence[SampleRow]) -> list[NDArray[np.float64]]:
    """Return the random numbers of each row's draws."""
    seeds: list[int] = []
    indices: list[int] = []
    positions: list[int] = []
    for row in rows:
        seeds += [row.spec.seed] * row.num_samples
        indices += range(row.sample_index, row.sample_index + row.num_samples)
        positions += [len(row.token_ids)] * row.num_samples
    numbers = uniforms(seeds, indices, positions)
    return np.split(numbers, np.cumsum([row.num_samples for row in rows])[:-1])
