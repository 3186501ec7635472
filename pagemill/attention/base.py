"""The seam between models and attention kernels. Backends: one file each, registered in `__init__`.

A model calls `attend(layer, q, k, v)`; it knows nothing of blocks. The runner builds one `AttentionBatch`
a step, the backend prepares it once, and every layer uses what was prepared:

    batch  = AttentionBatch(...)                    per step, by batch.model_input
    plan   = backend.prepare(batch)                 per step, shared by all layers
    out    = backend.forward(spec, q, k, v, kv, plan, sinks)    per layer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What is fixed about one layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # multiplies q·k
    sliding_window: int | None = None  # keys a query sees, itself included; None: all
    logit_softcap: float | None = None  # c: scores become c * tanh(scores / c)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """One ragged step. Sequence i owns rows query_starts[i]:query_starts[i + 1] of q, k and v.

    Its tokens stand at positions [num_computed[i], num_computed[i] + query length); keys at positions
    0 .. that position are visible, less what the window hides. Set by `batch.build_model_input`.
    """

    query_starts: tuple[int, ...]  # num_seqs + 1, first 0
    num_computed: tuple[int, ...]  # num_seqs: tokens whose K and V are in the cache already
    block_tables: Tensor  # [num_seqs, most blocks] int64, padded with 0
    slot_mapping: (
        Tensor  # [num_tokens] int64: block * block_size + offset, where K and V are written
    )
    block_size: int
    kind: int = 0  # of layers, where several have block tables of their own

    @property
    def num_seqs(self) -> int:
        """Return the number of sequences in the step."""
        return len(self.num_computed)


class AttentionBackend(Protocol):
    """Attention over a paged cache: prefill, decode and mixed steps in one call."""

    name: str
    cache_dtypes: tuple[str, ...]  # that `allocate_kv` knows

    def allocate_kv(
        self,
        spec: AttentionSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """Return the K and V pools of one layer, each [num_blocks, num_kv_heads, block_size, width].

        Contiguous, with nothing outside the blocks. `width` is what a head's token takes; what stands where
        inside a block and head is the backend's own affair.
        """
        ...  # fmt: skip

    def prepare(self, batch: AttentionBatch) -> Any:
        """Return whatever all layers of this step share."""
        ...

    def forward(
        self,
        spec: AttentionSpec,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: tuple[Tensor, Tensor],
        plan: Any,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write k and v to the cache, then attend.

        q [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim]; sinks [num_heads]:
        one learned logit a head that joins the softmax and adds no value. Returns q's shape and dtype.
        """
        ...  # fmt: skip

    def peak_bytes(
        self,
        spec: AttentionSpec,
        max_tokens: int,
        max_seqs: int,
        max_len: int,
        dtype: torch.dtype,
        block_size: int = 16,
    ) -> int:
        """Return the most temporary memory that a step's plan and one `forward` take.

        Arguments of `forward` are not in it; its result is.
        """
        ...  # fmt: skip


class StepAttention:
    """What a model's forward gets: attention over this step's batch, layer by layer."""

    def __init__(
        self,
        backend: AttentionBackend,
        specs: Sequence[AttentionSpec],
        kv: Sequence[tuple[Tensor, Tensor]],
        batch: AttentionBatch,
        more: Sequence[AttentionBatch] = (),
        kinds: Sequence[int] | None = None,
    ) -> None:
        """`more` are the batches of further kinds of layers, `kinds` [num_layers] says which has which."""
        self._backend = backend
        self._specs = specs
        self._kv = kv
        self._kinds = kinds
        self.plan: Any = backend.prepare(batch)
        self.plans: list[Any] = [self.plan, *[backend.prepare(other) for other in more]]

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend in one layer; shapes as `AttentionBackend.forward`."""
        plan = self.plan if self._kinds is None else self.plans[self._kinds[layer]]
        return self._backend.forward(self._specs[layer], q, k, v, self._kv[layer], plan, sinks)
