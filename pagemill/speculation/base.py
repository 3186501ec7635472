"""What the runner needs of a proposer. Implementations: one file each, registered in `__init__`.

A proposer sees the rows of the rank's `RequestTable`. It is asked at the beginning of a step, when the
scheduler has set slots of the cache aside for drafts, so that nothing that it proposed can be out of date.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill.attention.base import AttentionBackend, StepAttention
from pagemill.batch.request_table import RequestTable
from pagemill.config import EngineConfig
from pagemill.messages import ScheduledSequence, SchedulerOutput
from pagemill.models.blocks import DecoderLM
from pagemill.sampling.sampler import Sampler

# A model's pass to hidden states, of the rows named last alone; see `models.base.CausalLM.forward`.
Forward = Callable[[Tensor, Tensor, StepAttention, Tensor], Tensor]
Draft = NDArray[np.int32]  # tokens that may come next, in order; empty where there is no guess


@dataclass(frozen=True, slots=True)
class Option:
    """A setting of one method: its default, and the range of what it may be.

    `follows` names another setting: where that is given and this is not, both have its value.
    """

    default: int | float
    low: int | float
    high: int | float
    follows: str | None = None


@dataclass(frozen=True, slots=True)
class RankParts:
    """What a rank has to offer to a proposer that computes."""

    backend: AttentionBackend
    sampler: Sampler
    device: torch.device
    dense_weights: str  # of the device: the format of weights that are not quantized
    num_blocks: int  # of the target's KV pool
    # A forward pass that replays recorded steps of a model, where there is one.
    replay: Callable[[DecoderLM], Forward | None]


class Proposer(Protocol):
    """Guesses tokens. A wrong guess costs time and nothing else."""

    options: ClassVar[Mapping[str, Option]]  # its own keys of `speculative_config`
    default_length: ClassVar[int]  # num_speculative_tokens where nobody says
    needs_model: ClassVar[bool]  # whether `speculative_config` names a model

    @classmethod
    def check(cls, options: Mapping[str, int | float]) -> None:
        """Raise ConfigError for options that are in range but do not go together."""
        ...

    @classmethod
    def make(cls, config: EngineConfig, rank: RankParts) -> Proposer:
        """Return a proposer for one rank; `config.speculative` is set."""
        ...

    def end_rows(self, table: RequestTable, seq_ids: Sequence[int]) -> None:
        """See rows that are about to be dropped; ids without a row may be among them."""
        ...

    def begin_step(self, table: RequestTable, step: SchedulerOutput) -> None:
        """See a step before it is computed. The table has its rows and blocks."""
        ...

    def propose(self, table: RequestTable, parts: Sequence[ScheduledSequence]) -> list[Draft]:
        """Return at most `num_drafts` tokens for each part, all of which have `num_drafts` > 0."""
        ...
