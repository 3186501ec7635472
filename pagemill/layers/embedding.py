"""Tokens and positions to vectors, and vectors back to logits. Called by the models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagemill.layers.base import Build
from pagemill.quant.base import RandomWeights, Target


class TokenEmbedding(nn.Module):
    """One row a token, times `scale` where the family has one (Gemma: sqrt(hidden))."""

    def __init__(self, vocab_size: int, size: int, build: Build, *, scale: float | None = None):
        super().__init__()
        self.weight = build.parameter(vocab_size, size)
        # Rounded to the model's dtype first, as the published code does.
        self.scale = None if scale is None else float(torch.tensor(scale, dtype=build.dtype))

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return [num_tokens, size] of token_ids [num_tokens] int64: a fresh tensor."""
        rows = F.embedding(token_ids, self.weight)
        return rows if self.scale is None else rows.mul_(self.scale)

    def targets(self, part: str) -> dict[str, Target]:
        """Return the matrix."""
        return {"weight": Target.of(self.weight)}

    def randomize(self, weights: RandomWeights) -> None:
        """Fill with small numbers."""
        weights.fill(self.weight, 1.0 if self.scale is None else 1.0 / self.scale)


class LearnedPositions(nn.Module):
    """One learned row a position; row position + offset (OPT's offset is 2)."""

    def __init__(self, num_rows: int, size: int, build: Build, *, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset
        self.weight = build.parameter(num_rows, size)

    def forward(self, positions: Tensor) -> Tensor:
        """Return [num_tokens, size] of positions [num_tokens] int64."""
        rows = positions + self.offset if self.offset else positions
        return F.embedding(rows, self.weight)

    def targets(self, part: str) -> dict[str, Target]:
        """Return the matrix."""
        return {"weight": Target.of(self.weight)}

    def randomize(self, weights: RandomWeights) -> None:
        """Fill with small numbers."""
        weights.fill(self.weight, 0.1)


class Head(nn.Module):
    """Hidden rows to float32 logits. A tied head has no parameter and uses the embedding's."""

    def __init__(
        self, embedding: TokenEmbedding, build: Build, *, tied: bool, softcap: float | None = None
    ) -> None:
        super().__init__()
        self.softcap = softcap
        self._embedding = (embedding,)  # in a tuple: a module here would be counted twice
        self.weight = None if tied else build.parameter(*embedding.weight.shape)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [rows, vocab] of hidden [rows, size]."""
        weight = self._embedding[0].weight if self.weight is None else self.weight
        logits = F.linear(hidden, weight).float()
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def tie(self) -> None:
        """Drop the head's own matrix and use the embedding's."""
        self.weight = None

    def targets(self, part: str) -> dict[str, Target]:
        """Return the matrix; nothing when tied."""
        return {} if self.weight is None else {"weight": Target.of(self.weight)}

    def randomize(self, weights: RandomWeights) -> None:
        """Fill so that logits have about the size of hidden states."""
        if self.weight is not None:
            weights.fill(self.weight, (3.0 / self.weight.shape[1]) ** 0.5)
