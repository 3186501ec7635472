"""What every layer is built with: dtype, device and weight format, handed down by the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from pagemill.quant.base import QuantMethod


@dataclass(frozen=True, slots=True)
class Build:
    """Where parameters are made and how linear layers keep theirs."""

    dtype: torch.dtype
    device: torch.device  # "meta" while sizes are all that is wanted
    quant: QuantMethod

    def parameter(self, *shape: int) -> nn.Parameter:
        """Return an unfilled parameter."""
        empty = torch.empty(*shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(empty, requires_grad=False)
