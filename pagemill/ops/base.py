"""What layers compute with between the matrix products: the seam to the kernels of a device.

`plain.PlainOps` is torch and the reference; `cpu_layers.NativeOps` the native kernels. A model is built
with one of them and hands it to its layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pagemill.ops.reference import rotary_embed, rotate


@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles of one step's tokens."""

    cos: Tensor  # [num_tokens, rotary_dim / 2], the model's dtype
    sin: Tensor  # the same
    style: str  # pairing, see ops.reference.rotate

    def apply(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k, each [num_tokens, heads, head_dim], turned."""
        return rotary_embed(q, k, self.cos, self.sin, style=self.style)

    def apply_one(self, x: Tensor) -> Tensor:
        """Return x [num_tokens, heads, head_dim] turned: q and k side by side, in one call."""
        return rotate(x, self.cos, self.sin, style=self.style)


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorm:
    """RMSNorm of every query and key head."""

    weight: Tensor  # [num_heads + num_kv_heads, head_dim], the model's dtype
    eps: float
    offset: float  # added to the weight


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How the heads of one token lie: queries, keys, values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class LayerOps(Protocol):
    """The small operations of a layer. Names and meanings are those of `ops.reference`."""

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        offset: float = 0.0,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return the norm of x [tokens, size]; added to `residual` [tokens, size] in place if given."""
        ...

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """Return the norm of x [tokens, size]."""
        ...

    def split_heads(
        self, qkv: Tensor, shape: HeadShape, norm: HeadNorm | None, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v [tokens, heads, head_dim] of qkv [tokens, all heads * head_dim].

        q and k are normed and turned first. The memory of `qkv` may be used for the results.
        """
        ...

    def angles(
        self, positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return scaling * cos and sin, each [num_tokens, rotary_dim / 2] of `dtype`.

        positions [num_tokens] int64; inv_freq [rotary_dim / 2] float32, radians a position.
        """
        ...

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """Multiply contiguous x in place, and return it."""
        ...

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """Cap float32 x, contiguous, in place, and return it."""
        ...

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """Return the activation, a key of `reference.ACTIVATIONS`, of contiguous x.

        The memory of x may be used for the result.
        """
        ...

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Add y to x in place, both contiguous and of one shape, and return x."""
        ...

    def add_rows(self, x: Tensor, ids: Tensor, offset: int, table: Tensor) -> Tensor:
        """Add row ids[i] + offset of table [rows, size] to row i of x [tokens, size]; return x."""
        ...

    def rms_norm_bytes(self, size: int, itemsize: int, offset: float) -> int:
        """Return the most temporary memory of `rms_norm` for one token, its result included."""
        ...

    def split_heads_bytes(
        self, shape: HeadShape, itemsize: int, norm: HeadNorm | None, rotary_dim: int
    ) -> tuple[int, int]:
        """Return the most temporary memory of `split_heads` for one token, and what its results keep.

        Both beside `qkv` itself.
        """
        ...

    def activation_outputs(self, activation: str) -> int:
        """Return the most temporary memory of `activate` beside x, in multiples of x's."""
        ...
