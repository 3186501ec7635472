"""Linear layers and their parts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pagemill.layers.base import Build
from pagemill.layers.linear import Linear, QKVLinear
from pagemill.quant.none import Unquantized

BUILD = Build(torch.float32, torch.device("cpu"), Unquantized())


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def fill(layer: Linear, part: str, **tensors: torch.Tensor) -> None:
    targets = layer.targets(part)
    assert set(targets) == set(tensors)
    for suffix, tensor in tensors.items():
        assert targets[suffix].shape == tuple(tensor.shape)
        targets[suffix].fill(tensor)


def test_fused_parts_compute_what_they_compute_apart() -> None:
    layer = Linear(6, {"gate": 4, "up": 3}, BUILD, bias=True)
    gate, up, x = draw(4, 6), draw(3, 6), draw(5, 6)
    fill(layer, "gate", weight=gate, bias=draw(4))
    fill(layer, "up", weight=up, bias=draw(3))
    expected = torch.cat([F.linear(x, gate, draw(4)), F.linear(x, up, draw(3))], -1)
    torch.testing.assert_close(layer(x), expected)


def test_a_layer_without_bias_has_no_target_for_one() -> None:
    assert set(Linear(6, 4, BUILD).targets("")) == {"weight"}


def test_a_transposed_file_matrix_lands_the_right_way_round() -> None:
    layer = Linear(6, 4, BUILD, bias=True)
    stored, bias, x = draw(6, 4), draw(4), draw(2, 6)
    fill(layer, "transposed", weight=stored, bias=bias)
    torch.testing.assert_close(layer(x), x @ stored + bias)


def test_qkv_by_head_is_reordered_to_q_k_v() -> None:
    layer = QKVLinear(6, (2, 2, 3), BUILD, bias=True)
    stored, bias, x = draw(18, 6), draw(18), draw(2, 6)
    fill(layer, "by_head", weight=stored, bias=bias)
    mixed = F.linear(x, stored, bias).view(2, 2, 3, 3)  # token, head, q/k/v, head_dim
    torch.testing.assert_close(layer(x), mixed.transpose(1, 2).reshape(2, 18))


def test_qkv_parts_have_the_sizes_of_their_heads() -> None:
    layer = QKVLinear(6, (4, 2, 3), BUILD, bias=False)
    shapes = {part: layer.targets(part)["weight"].shape for part in ("q", "k", "v")}
    assert shapes == {"q": (12, 6), "k": (6, 6), "v": (6, 6)}


def test_an_unknown_part_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="'gate'"):
        QKVLinear(6, (2, 2, 3), BUILD, bias=False).targets("gate")
