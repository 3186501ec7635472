"""Tokens, positions and logits."""

from __future__ import annotations

import torch

from pagemill.layers.base import Build
from pagemill.layers.embedding import Head, LearnedPositions, TokenEmbedding
from pagemill.quant.none import Unquantized

CPU = torch.device("cpu")


def build(dtype: torch.dtype = torch.float32) -> Build:
    return Build(dtype, CPU, Unquantized())


def embedding(dtype: torch.dtype = torch.float32, scale: float | None = None) -> TokenEmbedding:
    made = TokenEmbedding(10, 4, build(dtype), scale=scale)
    made.targets("")["weight"].fill(torch.randn(10, 4, generator=torch.Generator().manual_seed(0)))
    return made


def test_the_scale_is_rounded_to_the_models_dtype() -> None:
    """As published: sqrt(3072) is 55.5 in bfloat16."""
    assert embedding(torch.bfloat16, scale=3072**0.5).scale == 55.5


def test_embedding_rows_are_copies() -> None:
    made = embedding()
    before = made.weight.clone()
    made(torch.tensor([3, 3])).add_(1)
    assert torch.equal(made.weight, before)


def test_positions_start_at_the_offset() -> None:
    positions = LearnedPositions(6, 4, build(), offset=2)
    positions.targets("")["weight"].fill(torch.arange(24.0).view(6, 4))
    x = torch.ones(2, 4)
    assert positions(x, torch.tensor([0, 3])) is x
    assert x.tolist() == [[9, 10, 11, 12], [21, 22, 23, 24]]


def test_a_tied_head_has_no_parameter_and_follows_the_embedding() -> None:
    made = embedding()
    head = Head(made, build(), tied=True)
    assert list(head.parameters()) == [] and head.targets("") == {}
    assert torch.equal(head(torch.eye(4)), made.weight.t())


def test_logits_are_float32_in_every_dtype_and_capped() -> None:
    head = Head(embedding(torch.bfloat16), build(torch.bfloat16), tied=True, softcap=0.5)
    logits = head(torch.ones(2, 4, dtype=torch.bfloat16) * 8)
    assert logits.dtype == torch.float32
    assert float(logits.abs().max()) <= 0.5
