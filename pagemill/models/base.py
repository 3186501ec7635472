"""What the worker needs of a model. Architectures: one file each, registered in `__init__`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from pagemill.attention.base import AttentionSpec, StepAttention
from pagemill.config import ModelShape


class CausalLM(Protocol):
    """A decoder over a flat ragged batch. It is also a `torch.nn.Module`."""

    @classmethod
    def read_shape(cls, hf_config: Mapping[str, Any]) -> ModelShape:
        """Read and check the sizes; raises CheckpointError for what the code does not support."""
        ...

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """Return one spec a layer."""
        ...

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: StepAttention,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states [num_tokens, hidden]; both inputs are [num_tokens] int64.

        `rows` [num_rows] int64: of these tokens alone, [num_rows, hidden], with the same bits. Keys and
        values of all are written.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [rows, vocab] of hidden rows; only rows that need them are passed."""
        ...

    def peak_bytes(self, num_tokens: int, num_logit_rows: int) -> int:
        """Return the most temporary memory of forward and logits together, attention's excluded."""
        ...
