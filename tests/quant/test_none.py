"""The format that keeps weights in the model's dtype; the registry of formats."""

from __future__ import annotations

import pytest
import torch

from pagemill.errors import UnknownNameError
from pagemill.layers.base import Build
from pagemill.layers.linear import Linear
from pagemill.quant import QUANT_METHODS
from pagemill.quant.base import RandomWeights, Target

CPU = torch.device("cpu")


def test_an_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"'int3'; known: .*none"):
        QUANT_METHODS.load("int3")


def test_output_has_about_the_size_of_the_input_with_made_up_weights() -> None:
    layer = Linear(512, 256, Build(torch.float32, CPU, QUANT_METHODS.load("none")()), bias=True)
    layer.randomize(RandomWeights(0, torch.float32, CPU))
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    assert 0.8 < float(layer(x).std()) < 1.25


def test_a_target_casts_and_keeps_the_elements_order() -> None:
    parameter = torch.zeros(2, 3, dtype=torch.bfloat16)
    Target.of(parameter).fill(torch.arange(6.0).view(2, 3))
    assert parameter.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_transposed_target_has_the_files_shape() -> None:
    parameter = torch.zeros(2, 3)
    target = Target.of(parameter).transposed()
    assert target.shape == (3, 2)
    target.fill(torch.arange(6.0).view(3, 2))
    assert parameter.tolist() == [[0, 2, 4], [1, 3, 5]]


def test_random_weights_stay_in_their_bounds_and_fill_everything() -> None:
    weights = RandomWeights(1, torch.float32, CPU)
    big = torch.full((1500, 1500), float("nan"))  # longer than the buffer of numbers
    weights.fill(big, 0.25)
    assert bool(big.isfinite().all())
    assert float(big.abs().max()) <= 0.25 and float(big.abs().mean()) > 0.1
