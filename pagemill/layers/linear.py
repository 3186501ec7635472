"""Linear layers, alone or several projections fused into one multiplication.

A fused layer stacks the output rows of its projections; each is a named part that the loader fills on
its own. Called by `layers.attention`, `layers.mlp` and the models.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pagemill.layers.base import Build
from pagemill.quant.base import AnyTarget, LayerPart, LinearShape, ModuleName, RandomWeights


class Linear(nn.Module):
    """x @ weight.T + bias, in the weight format of the model.

    Parts: "" is the whole layer; "transposed" the whole layer stored [in, out] (GPT-2's Conv1D); any
    name of `rows` those output rows.
    """

    def __init__(
        self,
        in_features: int,
        rows: int | dict[str, int],
        build: Build,
        *,
        bias: bool = False,
        gate: str | None = None,
    ) -> None:
        super().__init__()
        sizes = {"": rows} if isinstance(rows, int) else rows
        self.shape = LinearShape(in_features, sum(sizes.values()), bias, gate)
        self.rows: dict[str, tuple[int, int]] = {}
        start = 0
        for name, size in sizes.items():
            self.rows[name] = (start, start + size)
            start += size
        self.itemsize = build.dtype.itemsize
        self.quant = build.quant
        self.quant.create_weights(self, self.shape, build.dtype, build.device)

    def adopt(self, names: Mapping[str, ModuleName], build: Build) -> None:
        """Take the weight format of this layer, now that its parts' names in checkpoints are known."""
        parts = [self._part(part, name) for part, name in names.items()]
        method = self.quant.for_layer(self.shape, sorted(parts, key=lambda part: part.start))
        if method is not self.quant:
            self.quant = method
            method.create_weights(self, self.shape, build.dtype, build.device)

    def forward(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Return [num_tokens, out_features] of x [num_tokens, in_features].

        With a residual [num_tokens, out_features] it is added to that in place.
        """
        return self.quant.apply(self, x, residual=residual)

    def finish(self) -> None:
        """Bring the filled weights into the form that they are used in."""
        self.quant.finish(self)

    def peak_bytes_per_token(self) -> int:
        """Return the most temporary memory, output included."""
        output = self.shape.out_features * self.itemsize
        return output + self.quant.extra_bytes_per_token(self)

    def targets(self, part: str) -> Mapping[str, AnyTarget]:
        """Return the targets of one projection, or of the whole layer."""
        start, stop = self.rows.get(part, (0, self.shape.out_features))
        found = self.quant.targets(self, start, stop)
        if part == "transposed":
            return {suffix: target.transposed() for suffix, target in found.items()}
        assert part in self.rows or part == "", f"the layer has no part {part!r}"
        return found

    def randomize(self, weights: RandomWeights) -> None:
        """Fill with made-up weights."""
        self.quant.randomize(self, weights)

    def _part(self, part: str, name: ModuleName) -> LayerPart:
        start, stop = self.rows.get(part, (0, self.shape.out_features))
        return LayerPart(name, start, stop, transposed=part == "transposed")


class GatedLinear(Linear):
    """act(x @ gate.T) * (x @ up.T), both in one multiplication. Shazeer 2020. Parts "gate" and "up"."""

    def __init__(
        self, in_features: int, size: int, activation: str, build: Build, *, bias: bool
    ) -> None:
        """`activation` is a key of ops.reference.ACTIVATIONS."""
        rows = {"gate": size, "up": size}
        super().__init__(in_features, rows, build, bias=bias, gate=activation)
        self.activation = activation

    def forward(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Return [num_tokens, size] of x [num_tokens, in_features]."""
        assert residual is None, "a gated layer has none"
        return self.quant.apply_gated(self, x)

    def peak_bytes_per_token(self) -> int:
        """Return the most temporary memory, output included."""
        results = self.quant.gated_outputs(self.activation)
        outputs = results * (self.shape.out_features // 2) * self.itemsize
        return outputs + self.quant.extra_bytes_per_token(self)


class QKVLinear(Linear):
    """The q, k and v projections in one.

    Further part: "by_head" is all three with the rows of one head's q, k and v next to each other
    (GPT-NeoX); it needs as many K/V heads as query heads.
    """

    def __init__(self, in_features: int, heads: tuple[int, int, int], build: Build, *, bias: bool):
        num_heads, num_kv_heads, head_dim = heads
        kv = num_kv_heads * head_dim
        rows = {"q": num_heads * head_dim, "k": kv, "v": kv}
        super().__init__(in_features, rows, build, bias=bias)
        self.num_heads = num_heads

    def targets(self, part: str) -> Mapping[str, AnyTarget]:
        """Return the targets of one projection, or of all three."""
        if part != "by_head":
            return super().targets(part)
        whole = super().targets("")
        return {suffix: target.by_head(3, self.num_heads) for suffix, target in whole.items()}

    def _part(self, part: str, name: ModuleName) -> LayerPart:
        if part != "by_head":
            return super()._part(part, name)
        rows = self.shape.out_features
        by_head = torch.arange(rows).view(self.num_heads, 3, -1)
        return LayerPart(name, 0, rows, row_order=by_head.transpose(0, 1).reshape(-1))
