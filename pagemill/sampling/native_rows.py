"""The sampler's work on whole rows, on the native kernels. See `row_math` for how exact it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagemill.messages import SamplingSpec, TokenScores
from pagemill.ops import cpu_sampling as ops
from pagemill.sampling.penalties import repetition_factor
from pagemill.sampling.ranking import Floats, Ids
from pagemill.sampling.row_math import Drawn, SampleRow


class NativeRows:
    """A `RowMath`: one call for all rows of a tile, which go to the threads whole."""

    tells_kept = False

    def peak_bytes(self, num_rows: int, vocab_size: int, num_threads: int) -> int:
        """Count what a thread keeps of a row: weights, a copy, and keys to sort."""
        return 16 * min(num_rows, num_threads) * vocab_size

    def best(self, logits: Floats) -> tuple[Ids, Floats]:
        """Take the maximum of each block of 256 first."""
        return ops.best_rows(logits)

    def draw(
        self, logits: Floats, highest: Floats, indices: Sequence[int], rows: Sequence[SampleRow]
    ) -> Drawn:
        """Truncate and draw without saying what was kept."""
        numbers, wholes = [], []
        for i in indices:
            row, spec = rows[i], rows[i].spec
            numbers.append((spec.temperature, spec.top_p, spec.min_p))
            wholes.append(
                (i, spec.top_k, spec.seed, row.sample_index, len(row.token_ids), row.num_samples)
            )
        tokens = ops.draw_rows(
            logits,
            highest[list(indices)],
            np.array(numbers, np.float64),
            np.array(wholes, np.int64),
        ).tolist()
        if len(tokens) == len(indices):
            return Drawn([(token,) for token in tokens], [None] * len(indices))
        drawn, start = Drawn([], []), 0
        for whole in wholes:
            drawn.tokens.append(tuple(tokens[start : start + whole[-1]]))
            drawn.kept.append(None)
            start += whole[-1]
        return drawn

    def score(
        self,
        logits: Floats,
        chosen: Sequence[Sequence[int]],
        counts: Sequence[int],
        *,
        normalize: bool,
    ) -> list[tuple[TokenScores, ...]]:
        """Find normalizers, ranks and alternatives in one call."""
        vocab = logits.shape[1]
        starts = np.cumsum([0, *(len(tokens) for tokens in chosen)])
        flat = np.array([token for tokens in chosen for token in tokens], np.int64)
        wanted = np.array([vocab if n < 0 else min(n, vocab) for n in counts], np.int64)
        normalizers, ranks, top_ids = ops.score_rows(logits, flat, starts, wanted)
        ends = np.cumsum(wanted)
        scored = []
        for i, tokens in enumerate(chosen):
            row = logits[i]
            shift = float(normalizers[i]) if normalize else 0.0
            ids = top_ids[ends[i] - wanted[i] : ends[i]]
            tops = tuple(ids.tolist())
            top_scores = tuple((row[ids].astype(np.float64) - shift).tolist())
            of_tokens = ranks[starts[i] : starts[i + 1]].tolist()
            scored.append(
                tuple(
                    TokenScores(token, float(row[token]) - shift, rank, tops, top_scores)
                    for token, rank in zip(tokens, of_tokens, strict=True)
                )
            )
        return scored

    def penalize(
        self,
        logits: Floats,
        spec: SamplingSpec,
        token_ids: NDArray[np.int32],
        num_prompt_tokens: int,
    ) -> None:
        """Count in a table over the vocabulary."""
        ops.penalize_row(
            logits, token_ids, num_prompt_tokens,
            repetition=repetition_factor(spec.repetition_penalty),
            frequency=spec.frequency_penalty, presence=spec.presence_penalty,
        )  # fmt: skip
