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
from pagemill.layers.rope import Rotation


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
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.qkv = QKVLinear(options.hidden_size, heads, build, bias=options.qkv_bias)
        self.out = Linear(
            spec.num_heads * spec.head_dim, options.hidden_size, build, bias=options.out_bias
        )
        self.qk_norm: QKNorm | None = None
        if options.qk_norm_eps is not None:
            self.qk_norm = QKNorm(heads, options.qk_norm_eps, build, offset=options.qk_norm_offset)

    def peak_bytes_per_token(self, rotary_dim: int) -> int:
        """Return the most temporary memory, output included and the attention itself excluded."""
        spec, itemsize = self.spec, self.qkv.itemsize
        q = spec.num_heads * spec.head_dim * itemsize
        qk = q + spec.num_kv_heads * spec.head_dim * itemsize
        normed = 0 if self.qk_norm is None else qk
        turned = qk if rotary_dim else normed
        phases = [
            0 if self.qk_norm is None else self.qk_norm.peak_bytes_per_token(),
            # The copy that is turned in place, and the product of one half and the sines.
            normed + qk + qk * rotary_dim // (2 * spec.head_dim) if rotary_dim else 0,
            turned + q + self.out.peak_bytes_per_token(),
        ]
        return self.qkv.peak_bytes_per_token() + max(phases)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        attend: StepAttention,
        *,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return [num_tokens, hidden] of x [num_tokens, hidden], added to a residual in place."""
        spec = self.spec
        heads = self.qkv.forward(x).view(x.shape[0], -1, spec.head_dim)
        num_qk = spec.num_heads + spec.num_kv_heads
        # q and k lie side by side: norm and rotation take both at once.
        qk, v = heads[:, :num_qk], heads[:, num_qk:]
        if self.qk_norm is not None:
            qk = self.qk_norm.forward(qk)
        if rotation is not None:
            qk = rotation.apply_one(qk)
        q, k = qk[:, : spec.num_heads], qk[:, spec.num_heads :]
        attended = attend(self.layer_index, q, k, v).flatten(1)
        return self.out.forward(attended, residual=residual)
