"""What every layer is built with: dtype, device, weight format and operations, from the model."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from pagemill.ops.base import LayerOps
from pagemill.ops.plain import PlainOps
from pagemill.quant.base import QuantMethod


@dataclass(frozen=True, slots=True)
class Build:
    """Where parameters are made, how linear layers keep theirs, and what the others compute with."""

    dtype: torch.dtype
    device: torch.device  # "meta" while sizes are all that is wanted
    quant: QuantMethod
    ops: LayerOps = field(default_factory=PlainOps)

    def parameter(self, *shape: int) -> nn.Parameter:
        """Return an unfilled parameter."""
        empty = torch.empty(*shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(empty, requires_grad=False)
