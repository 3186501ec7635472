"""The layers' small operations in plain torch: `ops.reference`, and what it takes of memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pagemill.ops import reference
from pagemill.ops.base import HeadNorm, HeadShape, Rotation


class PlainOps:
    """A `LayerOps` for any device that torch knows."""

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        offset: float = 0.0,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Norm, round, then add."""
        normed = reference.rms_norm(x, weight, eps, offset=offset)
        return normed if residual is None else residual.add_(normed)

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """Norm."""
        return reference.layer_norm(x, weight, bias, eps)

    def split_heads(
        self, qkv: Tensor, shape: HeadShape, norm: HeadNorm | None, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take q and k, which lie side by side, through norm and rotation at once."""
        heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
        num_qk = shape.num_heads + shape.num_kv_heads
        qk, v = heads[:, :num_qk], heads[:, num_qk:]
        if norm is not None:
            qk = reference.rms_norm(qk, norm.weight, norm.eps, offset=norm.offset)
        if rotation is not None:
            qk = rotation.apply_one(qk)
        return qk[:, : shape.num_heads], qk[:, shape.num_heads :], v

    def angles(
        self, positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Compute in float32, then round."""
        cos, sin = reference.angles(positions, inv_freq, scaling)
        return cos.to(dtype), sin.to(dtype)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """Multiply."""
        return x.mul_(factor)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """Divide, take the tangent, multiply."""
        return x.div_(cap).tanh_().mul_(cap)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """Apply the reference."""
        return reference.activation(activation)(x)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Add."""
        return x.add_(y)

    def add_rows(self, x: Tensor, ids: Tensor, offset: int, table: Tensor) -> Tensor:
        """Look the rows up, then add."""
        return x.add_(F.embedding(ids + offset if offset else ids, table))

    def rms_norm_bytes(self, size: int, itemsize: int, offset: float) -> int:
        """Return the peak of reference.rms_norm, as its order of operations makes it."""
        if itemsize == 4:
            # The quotient; without an offset the product beside it.
            per_element = 8 if offset == 0.0 else 4
        else:
            # x and the quotient in float32, the output, without an offset also the rounded quotient.
            per_element = 8 + itemsize * (2 if offset == 0.0 else 1)
        return size * per_element

    def split_heads_bytes(
        self, shape: HeadShape, itemsize: int, norm: HeadNorm | None, rotary_dim: int
    ) -> tuple[int, int]:
        """Count the normed heads, the copy that is turned, and the product of one half and the sines."""
        size = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
        qk = size * itemsize
        normed = 0 if norm is None else qk
        peak = 0 if norm is None else self.rms_norm_bytes(size, itemsize, norm.offset)
        if rotary_dim:
            peak = max(peak, normed + qk + qk * rotary_dim // (2 * shape.head_dim))
        return peak, qk if rotary_dim else normed

    def activation_outputs(self, activation: str) -> int:
        """Count the result, and the temporaries of those that are made of several operations."""
        return reference.activation_outputs(activation)
