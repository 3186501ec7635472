"""The two passes of a model that a step may run: to hidden states, or through to logits.

`PlainForward` is the model's own Python. `replay.ReplayedForward` takes its place on the native kernels,
with the same bits. Called by `worker.model_runner`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pagemill.attention.base import StepAttention
from pagemill.models.base import CausalLM


class Forward(Protocol):
    """token_ids and positions are [num_tokens] int64. A result is valid until the next call."""

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: StepAttention,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states [num_tokens, hidden], or [num_rows, hidden] of `rows` [num_rows] int64."""
        ...

    def logits(self, token_ids: Tensor, positions: Tensor, attend: StepAttention) -> Tensor:
        """Return float32 logits [num_tokens, vocab] of every token."""
        ...


class PlainForward:
    """A `Forward` that runs the model's Python every time."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model

    @torch.inference_mode()
    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: StepAttention,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run the layers, the end of the last one for the rows alone."""
        return self._model.forward(token_ids, positions, attend, rows)

    @torch.inference_mode()
    def logits(self, token_ids: Tensor, positions: Tensor, attend: StepAttention) -> Tensor:
        """Run the layers and the head."""
        return self._model.logits(self._model.forward(token_ids, positions, attend))
