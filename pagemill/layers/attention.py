"""The attention layer: projections, q/k norm and rotation around the step's `attend`.

It holds what is fixed about one layer (`AttentionSpec`) and knows nothing of blocks. Called by the
decoder layers of the models.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from pagemill.attention.base import AttentionSpec, StepAttention
from pagemill.layers.base import Build
from pagemill.layers.linear import Linear, QKVLinear
from pagemill.layers.norm import QKNorm
from pagemill.ops.base import HeadNorm, HeadShape, Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """What differs between families, beside the spec."""

    hidden_size: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm_eps: float | None = None  # None: no norm of q and k
    qk_norm_offset: float = 0.0


class Attention(nn.Module):
    """One layer's attention."""

    def __init__(
        self, layer_index: int, spec: AttentionSpec, options: AttentionOptions, build: Build
    ) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.spec = spec
        self.ops = build.ops
        self.shape = HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.qkv = QKVLinear(options.hidden_size, heads, build, bias=options.qkv_bias)
        self.out = Linear(
            spec.num_heads * spec.head_dim, options.hidden_size, build, bias=options.out_bias
        )
        self.qk_norm: QKNorm | None = None
        if options.qk_norm_eps is not None:
            self.qk_norm = QKNorm(heads, options.qk_norm_eps, build, offset=options.qk_norm_offset)

    def peak_bytes_per_token(self, rotary_dim: int) -> int:
        """Return the most temporary memory, `out` included and the attention itself excluded."""
        itemsize = self.qkv.itemsize
        q = self.spec.num_heads * self.spec.head_dim * itemsize
        peak, kept = self.ops.split_heads_bytes(self.shape, itemsize, self._norm(), rotary_dim)
        attending = self.qkv.peak_bytes_per_token() + max(peak, kept + q)
        return max(attending, q + self.out.peak_bytes_per_token())

    def forward(self, x: Tensor, rotation: Rotation | None, attend: StepAttention) -> Tensor:
        """Return what the heads saw, [num_tokens, num_heads * head_dim], of x [num_tokens, hidden].

        `out` is left to the caller: it is the first operation that needs only the rows it is asked for.
        """
        qkv = self.qkv.forward(x)
        q, k, v = self.ops.split_heads(qkv, self.shape, self._norm(), rotation)
        return attend(self.layer_index, q, k, v).flatten(1)

    def _norm(self) -> HeadNorm | None:
        return None if self.qk_norm is None else self.qk_norm.of_heads()
