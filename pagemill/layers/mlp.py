"""The feed-forward layers. Called by the decoder layers of the models."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from pagemill.layers.base import Build
from pagemill.layers.linear import Linear
from pagemill.ops import reference as ops

# Temporaries of the activations that need more than their output, in outputs.
_ACTIVATION_OUTPUTS = {"gelu_fast": 4, "gelu_new": 4, "quick_gelu": 2, "relu2": 2}


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
        self.gate_up = Linear(
            options.hidden_size, {"gate": size, "up": size}, build, bias=options.bias
        )
        self.down = Linear(size, options.hidden_size, build, bias=options.bias)
        self.act = ops.activation(options.activation)
        self.act_outputs = _ACTIVATION_OUTPUTS.get(options.activation, 1)

    def peak_bytes_per_token(self) -> int:
        """Return the most temporary memory, output included."""
        inner = self.down.shape.in_features * self.down.itemsize
        return max((2 + self.act_outputs) * inner, inner + self.down.peak_bytes_per_token())

    def forward(self, x: Tensor) -> Tensor:
        """Return [num_tokens, hidden] of x [num_tokens, hidden]."""
        return self.down.forward(ops.act_and_mul(self.gate_up.forward(x), self.act))


class MLP(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, options: MLPOptions, build: Build) -> None:
        super().__init__()
        self.up = Linear(options.hidden_size, options.intermediate_size, build, bias=options.bias)
        self.down = Linear(options.intermediate_size, options.hidden_size, build, bias=options.bias)
        self.act = ops.activation(options.activation)
        self.act_outputs = _ACTIVATION_OUTPUTS.get(options.activation, 1)

    def peak_bytes_per_token(self) -> int:
        """Return the most temporary memory, output included."""
        inner = self.down.shape.in_features * self.down.itemsize
        return max((1 + self.act_outputs) * inner, inner + self.down.peak_bytes_per_token())

    def forward(self, x: Tensor) -> Tensor:
        """Return [num_tokens, hidden] of x [num_tokens, hidden]."""
        return self.down.forward(self.act(self.up.forward(x)))
