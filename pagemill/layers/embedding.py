"""Tokens and positions to vectors, and vectors back to logits. Called by the models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from pagemill.layers.base import Build
from pagemill.quant.base import AnyTarget, LayerPart, LinearShape, ModuleName, RandomWeights, Target


class TokenEmbedding(nn.Module):
    """One row a token, times `scale` where the family has one (Gemma: sqrt(hidden))."""

    def __init__(self, vocab_size: int, size: int, build: Build, *, scale: float | None = None):
        super().__init__()
        self.shape = LinearShape(size, vocab_size, bias=False)
        self.quant = build.quant
        self.ops = build.ops
        self.quant.create_weights(self, self.shape, build.dtype, build.device)
        # Rounded to the model's dtype first, as the published code does.
        self.scale = None if scale is None else float(torch.tensor(scale, dtype=build.dtype))

    def adopt(self, names: Mapping[str, ModuleName], build: Build) -> None:
        """Take the weight format of this layer, now that its name in checkpoints is known."""
        _adopt(self, names, build)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return [num_tokens, size] of token_ids [num_tokens] int64: a fresh tensor."""
        rows = self.quant.rows(self, token_ids)
        return rows if self.scale is None else self.ops.scale(rows, self.scale)

    def targets(self, part: str) -> Mapping[str, AnyTarget]:
        """Return the matrix."""
        return self.quant.targets(self, 0, self.shape.out_features)

    def randomize(self, weights: RandomWeights) -> None:
        """Fill with small numbers."""
        plain = cast("Tensor | None", self.weight)
        if plain is None:
            self.quant.randomize(self, weights)
        else:
            weights.fill(plain, 1.0 if self.scale is None else 1.0 / self.scale)


class LearnedPositions(nn.Module):
    """One learned row a position; row position + offset (OPT's offset is 2)."""

    def __init__(self, num_rows: int, size: int, build: Build, *, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset
        self.ops = build.ops
        self.weight = build.parameter(num_rows, size)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add the rows of positions [num_tokens] int64 to x [num_tokens, size] in place; return x."""
        return self.ops.add_rows(x, positions, self.offset, self.weight)

    def targets(self, part: str) -> Mapping[str, AnyTarget]:
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
        self.shape = embedding.shape
        self.quant = build.quant
        self.ops = build.ops
        self.tied = tied
        self.register_parameter("weight", None)
        if not tied:
            self.quant.create_weights(self, self.shape, build.dtype, build.device)

    def adopt(self, names: Mapping[str, ModuleName], build: Build) -> None:
        """Take the weight format of this layer; a tied one has the embedding's."""
        if not self.tied:
            _adopt(self, names, build)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [rows, vocab] of hidden [rows, size]."""
        owner = self._owner()
        logits = owner.quant.apply(owner, hidden, out_dtype=torch.float32)
        return logits if self.softcap is None else self.ops.soft_cap(logits, self.softcap)

    def tie(self) -> None:
        """Drop the head's own matrix and use the embedding's."""
        self.weight = None
        self.tied = True

    def finish(self) -> None:
        """Bring the matrix, and the embedding's, into the form that they are used in."""
        owner = self._owner()
        owner.quant.finish(owner)
        embedding = self._embedding[0]
        if owner is not embedding:
            embedding.quant.finish_lookup(embedding)

    def targets(self, part: str) -> Mapping[str, AnyTarget]:
        """Return the matrix; nothing when tied."""
        if self.tied:
            return {}
        return self.quant.targets(self, 0, self.shape.out_features)

    def randomize(self, weights: RandomWeights) -> None:
        """Fill so that logits have about the size of hidden states."""
        if not self.tied:
            self.quant.randomize(self, weights)

    def _owner(self) -> TokenEmbedding | Head:
        return self._embedding[0] if self.tied else self


def _adopt(layer: TokenEmbedding | Head, names: Mapping[str, ModuleName], build: Build) -> None:
    lookup = isinstance(layer, TokenEmbedding)
    rows = layer.shape.out_features
    parts = [LayerPart(name, 0, rows, lookup=lookup) for name in names.values()]
    method = layer.quant.for_layer(layer.shape, parts)
    if method is not layer.quant:
        layer.quant = method
        method.create_weights(layer, layer.shape, build.dtype, build.device)
