"""What one step needs: the flat ragged batch, built without a Python loop over tokens.

Tokens of all scheduled sequences stand one after another, unpadded:

    sequence      0 0 0 0 1 2 2 2        query_starts = (0, 4, 5, 8)
    positions     0 1 2 3 9 4 5 6        num_computed = (0, 9, 4)

`build_model_input` reads the table and changes nothing. Called by `batch.input_builder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill.attention.base import AttentionBatch
from pagemill.batch.request_table import RequestTable
from pagemill.messages import ScheduledSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRows:
    """Rows whose logits score prompt tokens. Row i scores the token right after it."""

    token_rows: Tensor  # [num_scored] int64, indices into the flat batch
    target_ids: NDArray[np.int64]  # [num_scored], the prompt tokens that stand there
    owner: NDArray[np.int64]  # [num_scored], index into `scheduled`; rising


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """One step as tensors. Set by `build_model_input`; never leaves the rank."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    attention: AttentionBatch
    rows: NDArray[np.int64]  # [num_seqs], row in the request table of each scheduled sequence
    sampled: NDArray[np.int64]  # [num_sampled], indices into `scheduled` of those that sample
    # Their last tokens in the flat batch; of one with drafts its last known token and the drafts.
    sample_rows: Tensor  # [num_sampled + all drafts] int64
    prompt: PromptRows | None  # None: nobody is owed prompt logprobs
    more_attention: tuple[AttentionBatch, ...] = ()  # of further kinds of layers

    @property
    def samples_every_token(self) -> bool:
        """Return whether every token of the batch has a row of logits: a step of decodes."""
        return len(self.sample_rows) == len(self.token_ids)


def build_model_input(
    table: RequestTable,
    scheduled: Sequence[ScheduledSequence],
    block_size: int,
    device: torch.device,
    num_drafted: NDArray[np.int64] | None = None,
    more_sizes: Sequence[int] = (),
) -> ModelInput:
    """Return the flat batch of one step; the table must know all its tokens and blocks.

    `num_drafted` [num_seqs] says how many drafts the table has behind each sequence's known tokens;
    `more_sizes` are the tokens a block of further kinds of layers.
    """
    rows = table.rows(scheduled)
    count = len(scheduled)
    lengths = np.fromiter((s.num_tokens for s in scheduled), np.int64, count)
    known = table.num_tokens[rows]
    if num_drafted is not None:
        lengths += num_drafted
        known += num_drafted
    computed = np.fromiter((s.num_computed for s in scheduled), np.int64, count)
    ends = computed + lengths
    assert (ends <= known).all(), "a step computes tokens that nobody knows"
    starts = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])

    owner = np.repeat(np.arange(count), lengths)
    positions = np.arange(starts[-1]) - starts[owner] + computed[owner]
    token_rows = rows[owner]
    token_ids = table.token_ids[token_rows, positions].astype(np.int64)

    def attention(tables: NDArray[np.int64], block_size: int, kind: int) -> AttentionBatch:
        """Return what the layers of one kind need."""
        slots = tables[token_rows, positions // block_size] * block_size
        slots += positions % block_size
        num_blocks = -(-ends // block_size)
        width = int(num_blocks.max(initial=0))
        blocks = tables[rows, :width]
        blocks[np.arange(width) >= num_blocks[:, None]] = 0  # what a longer owner left there
        return AttentionBatch(
            query_starts=tuple(starts.tolist()),
            num_computed=tuple(computed.tolist()),
            block_tables=torch.from_numpy(blocks).to(device),
            slot_mapping=torch.from_numpy(slots).to(device),
            block_size=block_size,
            kind=kind,
        )

    samples = np.fromiter((s.num_samples for s in scheduled), np.int64, count)
    sampled = np.flatnonzero(samples)
    return ModelInput(
        token_ids=torch.from_numpy(token_ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        attention=attention(table.block_tables, block_size, 0),
        rows=rows,
        sampled=sampled,
        sample_rows=torch.from_numpy(_sample_rows(starts[1:][sampled], num_drafted, sampled)).to(
            device
        ),
        prompt=_prompt_rows(table, scheduled, rows, starts, device),
        more_attention=tuple(
            attention(tables, size, kind + 1)
            for kind, (tables, size) in enumerate(zip(table.more_tables, more_sizes, strict=True))
        ),
    )


def _sample_rows(
    ends: NDArray[np.int64], num_drafted: NDArray[np.int64] | None, sampled: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the last row of each part that ends at `ends`, and those before it that end at drafts."""
    if num_drafted is None:
        return ends - 1
    counts = num_drafted[sampled] + 1
    behind = np.repeat(np.cumsum(counts), counts) - np.arange(counts.sum())
    return np.repeat(ends, counts) - behind


def _prompt_rows(
    table: RequestTable,
    scheduled: Sequence[ScheduledSequence],
    rows: NDArray[np.int64],
    starts: NDArray[np.int64],
    device: torch.device,
) -> PromptRows | None:
    """Return the rows owed for prompt logprobs.

    A step that computes [a, b) can score positions a + 1 .. min(b, num_prompt_tokens - 1); of these
    `prompt_logprobs_from` and on are owed.
    """
    owners, first, counts = [], [], []
    for index, part in enumerate(scheduled):
        if part.prompt_logprobs_from is None:
            continue
        last = min(
            part.num_computed + part.num_tokens, table.num_prompt_tokens(int(rows[index])) - 1
        )
        begin = max(part.prompt_logprobs_from, part.num_computed + 1)
        if last >= begin:
            owners.append(index)
            first.append(begin)
            counts.append(last - begin + 1)
    if not owners:
        return None
    repeated = np.repeat(np.arange(len(owners)), counts)
    offsets = np.arange(len(repeated)) - (np.cumsum(counts) - counts)[repeated]
    owner = np.asarray(owners)[repeated]
    targets = np.asarray(first)[repeated] + offsets
    computed = np.fromiter((s.num_computed for s in scheduled), np.int64, len(scheduled))
    token_rows = targets - 1 - computed[owner] + starts[owner]
    return PromptRows(
        token_rows=torch.from_numpy(token_rows).to(device),
        target_ids=table.token_ids[rows[owner], targets].astype(np.int64),
        owner=owner,
    )
