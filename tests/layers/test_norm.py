"""Normalization layers."""

from __future__ import annotations

import pytest
import torch

from pagemill.layers.base import Build
from pagemill.layers.norm import LayerNorm, QKNorm, RMSNorm
from pagemill.quant.none import Unquantized

CPU = torch.device("cpu")
BUILD = Build(torch.float32, CPU, Unquantized())


def test_offset_is_added_to_the_weight() -> None:
    plain, gemma = RMSNorm(8, 1e-6, BUILD), RMSNorm(8, 1e-6, BUILD, offset=1.0)
    weight, x = torch.randn(8), torch.randn(3, 8)
    plain.targets("")["weight"].fill(weight)
    gemma.targets("")["weight"].fill(weight - 1)
    torch.testing.assert_close(plain(x), gemma(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_qk_norm_equals_one_norm_for_queries_and_one_for_keys(offset, dtype) -> None:
    build = Build(dtype, CPU, Unquantized())
    both = QKNorm((4, 2, 6), 1e-6, build, offset=offset)
    norms = [RMSNorm(6, 1e-6, build, offset=offset) for _ in range(2)]
    for part, norm in zip("qk", norms, strict=True):
        weight = torch.randn(6)
        both.targets(part)["weight"].fill(weight)
        norm.targets("")["weight"].fill(weight)
    qk = torch.randn(5, 6, 6).to(dtype)
    apart = torch.cat([norms[0](qk[:, :4]), norms[1](qk[:, 4:])], dim=1)
    assert torch.equal(both(qk), apart)


def test_qk_norm_wants_one_weight_of_a_head_from_the_file() -> None:
    both = QKNorm((4, 2, 6), 1e-6, BUILD)
    assert both.targets("q")["weight"].shape == both.targets("k")["weight"].shape == (6,)


def test_a_layer_norm_without_affine_has_nothing_to_fill() -> None:
    norm = LayerNorm(8, 1e-5, BUILD, affine=False)
    assert norm.targets("") == {} and list(norm.parameters()) == []
    out = norm(torch.randn(3, 8) * 5 + 2)
    torch.testing.assert_close(out.mean(-1), torch.zeros(3), atol=1e-5, rtol=0)
