"""Weights kept in the model's dtype. Chosen when no quantization is asked for."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from pagemill.ops import reference as ops
from pagemill.quant.base import LinearShape, RandomWeights, Target


class Unquantized:
    """One matrix [out_features, in_features], and a bias [out_features] where the layer has one."""

    def create_weights(
        self, layer: nn.Module, shape: LinearShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Register `weight` and `bias` on the layer."""
        weight = torch.empty(shape.out_features, shape.in_features, dtype=dtype, device=device)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        bias = None
        if shape.bias:
            empty = torch.empty(shape.out_features, dtype=dtype, device=device)
            bias = nn.Parameter(empty, requires_grad=False)
        layer.register_parameter("bias", bias)

    def targets(self, layer: nn.Module, start: int, stop: int) -> dict[str, Target]:
        """Return the rows of the matrix and of the bias."""
        weight, bias = _weights(layer)
        found = {"weight": Target.of(weight[start:stop])}
        if bias is not None:
            found["bias"] = Target.of(bias[start:stop])
        return found

    def randomize(self, layer: nn.Module, weights: RandomWeights) -> None:
        """Draw the matrix so that outputs have about the size of inputs; the bias becomes zero."""
        weight, bias = _weights(layer)
        weights.fill(weight, (3.0 / weight.shape[1]) ** 0.5)
        if bias is not None:
            bias.zero_()

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Multiply, and add the bias."""
        weight, bias = _weights(layer)
        return ops.linear(x, weight, bias)


def _weights(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    return cast(Tensor, layer.weight), cast("Tensor | None", layer.bias)
