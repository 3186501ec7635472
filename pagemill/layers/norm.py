"""Normalization layers. Called by `layers.attention` (q and k) and the models."""

from __future__ import annotations

from torch import Tensor, nn

from pagemill.layers.base import Build
from pagemill.ops import reference
from pagemill.ops.base import HeadNorm
from pagemill.quant.base import RandomWeights, Target


class RMSNorm(nn.Module):
    """x / rms(x) * (offset + weight); offset 1 is Gemma's, whose files store weight - 1."""

    def __init__(self, size: int, eps: float, build: Build, *, offset: float = 0.0) -> None:
        super().__init__()
        self.ops = build.ops
        self.eps = eps
        self.offset = offset
        self.weight = build.parameter(size)

    def forward(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Return x [num_tokens, size] normalized, in x's dtype; added to a residual in place."""
        return self.ops.rms_norm(x, self.weight, self.eps, offset=self.offset, residual=residual)

    def peak_bytes_per_token(self) -> int:
        """Return the most temporary memory, output included."""
        weight = self.weight
        return self.ops.rms_norm_bytes(weight.numel(), weight.itemsize, self.offset)

    def targets(self, part: str) -> dict[str, Target]:
        """Return the weight."""
        return {"weight": Target.of(self.weight)}

    def randomize(self, weights: RandomWeights) -> None:
        """Make the factor 1."""
        self.weight.fill_(1.0 - self.offset)


class QKNorm(nn.Module):
    """RMSNorm of each query and key head, both in one pass; parts "q" and "k".

    The file's two weights [head_dim] are repeated over the heads, so that q and k that lie side by
    side need one operation.
    """

    def __init__(
        self, heads: tuple[int, int, int], eps: float, build: Build, *, offset: float = 0.0
    ) -> None:
        super().__init__()
        num_heads, num_kv_heads, head_dim = heads
        self.eps = eps
        self.offset = offset
        self.num_heads = num_heads
        self.weight = build.parameter(num_heads + num_kv_heads, head_dim)

    def forward(self, qk: Tensor) -> Tensor:
        """Return qk [num_tokens, num_heads + num_kv_heads, head_dim] normalized head by head."""
        return reference.rms_norm(qk, self.weight, self.eps, offset=self.offset)

    def of_heads(self) -> HeadNorm:
        """Return the norm as an operation takes it."""
        return HeadNorm(self.weight, self.eps, self.offset)

    def targets(self, part: str) -> dict[str, Target]:
        """Return the weight of the query or of the key heads."""
        rows = self.weight[: self.num_heads] if part == "q" else self.weight[self.num_heads :]
        return {"weight": Target(rows, (self.weight.shape[1],))}

    def randomize(self, weights: RandomWeights) -> None:
        """Make the factor 1."""
        self.weight.fill_(1.0 - self.offset)


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias; without both when `affine` is off."""

    def __init__(self, size: int, eps: float, build: Build, *, affine: bool = True) -> None:
        super().__init__()
        self.size = size
        self.itemsize = build.dtype.itemsize
        self.ops = build.ops
        self.eps = eps
        self.weight = build.parameter(size) if affine else None
        self.bias = build.parameter(size) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalized over its last dimension, in x's dtype."""
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def peak_bytes_per_token(self) -> int:
        """Return the bytes of the output."""
        return self.size * self.itemsize

    def targets(self, part: str) -> dict[str, Target]:
        """Return weight and bias."""
        if self.weight is None or self.bias is None:
            return {}
        return {"weight": Target.of(self.weight), "bias": Target.of(self.bias)}

    def randomize(self, weights: RandomWeights) -> None:
        """Make the factor 1 and the bias 0."""
        if self.weight is not None and self.bias is not None:
            self.weight.fill_(1.0)
            self.bias.zero_()


Norm = RMSNorm | LayerNorm
