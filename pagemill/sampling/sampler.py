"""The sampler: one row of logits a sequence in, tokens and scores out.

Order: raw scores, the changes of `processors`, then argmax for greedy rows; temperature, min_p, top_k
with top_p and a draw for the others. Rows go through in tiles that fit the CPU's cache; a tile's size
bounds the temporary memory and changes no result, since no operation looks across rows. Owned by
`worker.model_runner`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pagemill.errors import words_of
from pagemill.log import get_logger
from pagemill.messages import TokenScores
from pagemill.sampling import processors
from pagemill.sampling.ranking import Floats
from pagemill.sampling.row_math import NumpyRows, RowMath, SampleRow
from pagemill.sampling_params import GREEDY_BELOW

logger = get_logger(__name__)

_TILE_BYTES = 4 << 20  # of float32 logits: a few such arrays live at once


@dataclass(frozen=True, slots=True)
class SampledRow:
    """What a row gave: one token a draw, its scores when asked for, or why there is none."""

    tokens: tuple[int, ...] = ()
    scores: tuple[TokenScores, ...] = ()
    error: str | None = None


def tile_rows(vocab_size: int) -> int:
    """Return how many rows the sampler works on at once."""
    return max(1, _TILE_BYTES // (4 * vocab_size))


def peak_bytes(vocab_size: int, math: RowMath, num_threads: int) -> int:
    """Return the most temporary memory `Sampler.sample` takes beyond the logits.

    A tile has a copy of the raw logits that will change, and one of those that are scored.
    """
    rows = tile_rows(vocab_size)
    return 2 * rows * vocab_size * 4 + math.peak_bytes(rows, vocab_size, num_threads)


class Sampler:
    """Chooses tokens. Has no state but its settings."""

    def __init__(
        self,
        *,
        dtype: str,
        logprobs_mode: str,
        logits_processors: Sequence[str] = (),
        math: RowMath | None = None,
    ) -> None:
        """`dtype` is the model's, for messages; `logits_processors` are "module:attribute" names.

        `math` None is numpy's.
        """
        self._dtype = dtype
        self._raw = logprobs_mode.startswith("raw_")
        self._normalize = logprobs_mode.endswith("_logprobs")
        self._engine_processors = processors.load_logits_processors(logits_processors)
        self._math: RowMath = math or NumpyRows()
        if not self._raw and not self._math.tells_kept:
            self._math = NumpyRows()  # processed scores show which tokens were dropped

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledRow]:
        """Return one result a row, in order. `logits` [rows, vocab] float32 is overwritten."""
        matrix: Floats = logits.contiguous().cpu().numpy()
        assert matrix.dtype == np.float32 and len(matrix) == len(rows)
        if all(self._is_plain(row) for row in rows):
            return self._take_best(matrix, rows)
        step = tile_rows(matrix.shape[1])
        results: list[SampledRow] = []
        for start in range(0, len(rows), step):
            tile = _Tile(matrix[start : start + step], rows[start : start + step], self._math)
            results += self._sample_tile(tile)
        return results

    def _is_plain(self, row: SampleRow) -> bool:
        """Return whether a row wants its largest logit and nothing else."""
        spec = row.spec
        return (
            spec.temperature < GREEDY_BELOW
            and spec.logprobs is None
            and not self._wants_processing(row)
        )

    def _take_best(self, matrix: Floats, rows: Sequence[SampleRow]) -> list[SampledRow]:
        """Return the largest entry of each row: what the tiles give, without what they may need."""
        best, highest = self._math.best(matrix)
        return [
            SampledRow((token,) * row.num_samples)
            if math.isfinite(value)
            else SampledRow(error=self._not_finite(value))
            for token, value, row in zip(best.tolist(), highest.tolist(), rows, strict=True)
        ]

    def score_prompt(
        self, logits: Tensor, targets: Sequence[int], counts: Sequence[int]
    ) -> list[TokenScores | str]:
        """Return the scores of known tokens under rows of logits [rows, vocab] float32.

        A row whose logits are not finite gives the error's text instead. Nothing is masked or penalized
        in a prompt, so the processed modes give what the raw ones do.
        """
        matrix: Floats = logits.contiguous().cpu().numpy()
        step = tile_rows(matrix.shape[1])
        results: list[TokenScores | str] = []
        for start in range(0, len(targets), step):
            tile = matrix[start : start + step]
            _, highest = self._math.best(tile)
            if not np.isfinite(highest).all():
                results += [
                    self._not_finite(float(h)) if not np.isfinite(h) else self._score_one(*row)
                    for h, row in zip(
                        highest,
                        zip(tile, targets[start:], counts[start:], strict=False),
                        strict=True,
                    )
                ]
                continue
            part = slice(start, start + step)
            scored = self._score(tile, [(t,) for t in targets[part]], counts[part])
            results += [row[0] for row in scored]
        return results

    def _score_one(self, row: Floats, target: int, count: int) -> TokenScores:
        return self._score(row[None], [(target,)], [count])[0][0]

    def _sample_tile(self, tile: _Tile) -> list[SampledRow]:
        for i in np.flatnonzero(~np.isfinite(tile.highest)):
            tile.errors[int(i)] = self._not_finite(float(tile.highest[i]))
        raw_rows = self._keep_raw(tile)
        self._process(tile)
        kept = self._choose(tile)
        scores: dict[int, tuple[TokenScores, ...]] = {}
        wanted = [
            i for i, r in enumerate(tile.rows) if r.spec.logprobs is not None and i in tile.tokens
        ]
        if wanted:
            if self._raw:
                source = np.stack([raw_rows[i] for i in wanted])
            else:
                source = np.stack([_processed(tile, i, kept.get(i)) for i in wanted])
            counts = [tile.rows[i].spec.logprobs or 0 for i in wanted]
            scored = self._score(source, [tile.tokens[i] for i in wanted], counts)
            scores = dict(zip(wanted, scored, strict=True))
        return [
            SampledRow(error=tile.errors[i])
            if i in tile.errors
            else SampledRow(tile.tokens[i], scores.get(i, ()))
            for i in range(len(tile.rows))
        ]

    def _keep_raw(self, tile: _Tile) -> dict[int, Floats]:
        """Return the raw logits of rows that want logprobs of them; copies where they will change."""
        if not self._raw:
            return {}
        kept = {}
        for i, row in enumerate(tile.rows):
            if row.spec.logprobs is not None and i not in tile.errors:
                changes = self._wants_processing(row)
                kept[i] = tile.logits[i].copy() if changes else tile.logits[i]
        return kept

    def _wants_processing(self, row: SampleRow) -> bool:
        num_output = len(row.token_ids) - row.num_prompt_tokens
        return bool(self._engine_processors) or processors.wants_processing(row.spec, num_output)

    def _process(self, tile: _Tile) -> None:
        """Run masks, biases, custom processors and penalties on the rows that want any."""
        for i, row in enumerate(tile.rows):
            if i in tile.errors or not self._wants_processing(row):
                continue
            logits = tile.logits[i]
            try:
                processors.process(
                    logits, row.spec, row.token_ids, row.num_prompt_tokens,
                    self._engine_processors, self._math.penalize,
                )  # fmt: skip
            except Exception as error:  # a custom processor may raise anything; the others go on
                logger.warning("a logits processor failed", exc_info=error)
                tile.errors[i] = f"a logits processor failed: {words_of(error)}"
                continue
            best, highest = self._math.best(logits[None])
            tile.best[i], tile.highest[i] = best[0], highest[0]
            if tile.highest[i] == -np.inf:
                tile.errors[i] = (
                    "every token is masked: allowed_token_ids, bad_words, min_tokens, logit_bias and "
                    "logits processors together leave none; loosen one of them"
                )
            elif not np.isfinite(tile.highest[i]):
                tile.errors[i] = (
                    f"the processed logits hold {tile.highest[i]}: a logits processor or a penalty "
                    "made them not finite"
                )

    def _choose(self, tile: _Tile) -> dict[int, NDArray[np.int64] | None]:
        """Fill `tile.tokens`; return the ids that each drawn row kept."""
        drawn = []
        for i, row in enumerate(tile.rows):
            if i in tile.errors:
                continue
            if row.spec.temperature < GREEDY_BELOW:
                tile.tokens[i] = (int(tile.best[i]),) * row.num_samples
            else:
                drawn.append(i)
        if not drawn:
            return {}
        result = self._math.draw(tile.logits, tile.highest, drawn, tile.rows)
        tile.tokens.update(zip(drawn, result.tokens, strict=True))
        return dict(zip(drawn, result.kept, strict=True))

    def _score(
        self, logits: Floats, chosen: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> list[tuple[TokenScores, ...]]:
        return self._math.score(logits, chosen, counts, normalize=self._normalize)

    def _not_finite(self, highest: float) -> str:
        return (
            f"the model's logits are not finite (highest: {highest}) in dtype {self._dtype}: an "
            "overflow, or damaged weights; use dtype float32 or bfloat16, or check the checkpoint"
        )


class _Tile:
    """Rows that are worked on together, and what is known of them so far."""

    def __init__(self, logits: Floats, rows: Sequence[SampleRow], math: RowMath) -> None:
        self.logits = logits  # [rows, vocab] float32, changed in place
        self.rows = rows
        self.best, self.highest = math.best(logits)
        self.errors: dict[int, str] = {}
        self.tokens: dict[int, tuple[int, ...]] = {}


def _processed(tile: _Tile, i: int, kept: NDArray[np.int64] | None) -> Floats:
    """Return the logits a row's token was chosen by: scaled, with -inf for dropped tokens."""
    row: Floats = tile.logits[i]
    temperature = tile.rows[i].spec.temperature
    if temperature < GREEDY_BELOW:
        return row
    with np.errstate(over="ignore"):
        scaled: Floats = row / np.float32(min(temperature, float(np.finfo(np.float32).max)))
    if kept is not None:
        dropped: Floats = np.full_like(scaled, -np.inf)
        dropped[kept] = scaled[kept]
        return dropped
    return scaled
