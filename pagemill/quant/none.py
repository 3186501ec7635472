"""Weights kept in the model's dtype, as they come, multiplied by torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagemill.ops import reference as ops
from pagemill.quant.base import LayerPart, LinearShape, QuantMethod, RandomWeights, Target


class Unquantized:
    """One matrix [out_features, in_features], and a bias [out_features] where the layer has one."""

    def create_weights(
        self, layer: nn.Module, shape: LinearShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Register `weight` and `bias` on the layer."""
        weight = self.allocate((shape.out_features, shape.in_features), dtype, device)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        bias = None
        if shape.bias:
            empty = torch.empty(shape.out_features, dtype=dtype, device=device)
            bias = nn.Parameter(empty, requires_grad=False)
        layer.register_parameter("bias", bias)

    def allocate(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the unfilled matrix."""
        return torch.empty(shape, dtype=dtype, device=device)

    def for_layer(self, shape: LinearShape, parts: Sequence[LayerPart]) -> QuantMethod:
        """Return itself: plain weights are kept alike in all layers."""
        return self

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

    def finish(self, layer: nn.Module) -> None:
        """Do nothing: the weights are used as they are filled."""

    def finish_lookup(self, layer: nn.Module) -> None:
        """Do nothing: rows are looked up in the matrix as it is filled."""

    def apply(
        self,
        layer: nn.Module,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Multiply, and add the bias; the product is rounded to x's dtype before anything else."""
        weight, bias = _weights(layer)
        product = ops.linear(x, weight, bias)
        if residual is not None:
            return residual.add_(product)
        return product if out_dtype is None else product.to(out_dtype)

    def apply_gated(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Multiply once, then apply the activation and the second product."""
        gate = _shape(layer).gate
        assert gate is not None
        return ops.act_and_mul(self.apply(layer, x), ops.activation(gate))

    def gated_outputs(self, gate: str) -> int:
        """Count gate and up, and what the activation needs."""
        return 2 + ops.activation_outputs(gate)

    def extra_bytes_per_token(self, layer: nn.Module) -> int:
        """Return 0."""
        return 0

    def rows(self, layer: nn.Module, ids: Tensor) -> Tensor:
        """Look the rows up."""
        return F.embedding(ids, _weights(layer)[0])


def _shape(layer: nn.Module) -> LinearShape:
    return cast(LinearShape, layer.shape)


def _weights(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    return cast(Tensor, layer.weight), cast("Tensor | None", layer.bias)
