"""The feed-forward layers. Called by the decoder layers of the models."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from pagemill.layers.base import Build
from pagemill.layers.linear import GatedLinear, Linear
from pagemill.ops import reference as ops


@dataclass(frozen=True, slots=True)
class MLPOptions:
    """Sizes and kind of a feed-forward layer."""

    hidden_size: int
    intermediate_size: int
    activation: str  # key of ops.reference.ACTIVATIONS
    bias: bool = False


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up in one multiplication. Shazeer 2020."""

    def __init__(self, options: MLPOptions, build: Build) -> None:
        super().__init__()
        size = options.intermediate_size
        ops.activation(options.activation)  # an unknown one is refused here
        self.gate_up = GatedLinear(
            options.hidden_size, size, options.activation, build, bias=options.bias
        )
        self.down = Linear(size, options.hidden_size, build, bias=options.bias)

    def peak_bytes_per_token(self) -> int:
        """Return the most temporary memory, output included."""
        inner = self.down.shape.in_features * self.down.itemsize
        return max(self.gate_up.peak_bytes_per_token(), inner + self.down.peak_bytes_per_token())

    def forward(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Return [num_tokens, hidden] of x [num_tokens, hidden], added to a residual in place."""
        return self.down.forward(self.gate_up.forward(x), residual=residual)


class MLP(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, options: MLPOptions, build: Build) -> None:
        super().__init__()
        self.up = Linear(options.hidden_size, options.intermediate_size, build, bias=options.bias)
        self.down = Linear(options.intermediate_size, options.hidden_size, build, bias=options.bias)
        ops.activation(options.activation)  # an unknown one is refused here
        self.activation = options.activation
        self.ops = build.ops

    def peak_bytes_per_token(self) -> int:
        """Return the most temporary memory, output included."""
        inner = self.down.shape.in_features * self.down.itemsize
        activated = inner * (1 + self.ops.activation_outputs(self.activation))
        return max(activated, inner + self.down.peak_bytes_per_token())

    def forward(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Return [num_tokens, hidden] of x [num_tokens, hidden], added to a residual in place."""
        inner = self.ops.activate(self.up.forward(x), self.activation)
        return self.down.forward(inner, residual=residual)
