"""A smaller model with the same vocabulary says what may come next.

It has a pool of its own with the target's block numbers: one block table serves both, and prefix hits, forks
and copies hold for the draft's keys and values as they do for the target's. What the draft model has not
computed of a block is told by a number a block, of its leading slots that are in order:

    filled[b]   0 .. block_size

Whatever the target computes anew makes it fall to the first slot written, and a block that comes back from
the host tier to 0; a copy copies it; what the draft model computes makes it rise. So the draft model runs for the sequences that are to have drafts and for no
others: before it drafts, it first computes what it is behind, from the first gap on, a long text over
several steps.

It draws with the sampling parameters, the seed and the positions of the target: where two models agree on
the probabilities, they draw the same token (`docs/decisions/008`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from pagemill.attention.base import AttentionBatch, StepAttention
from pagemill.batch.kv_store import KVStore
from pagemill.batch.request_table import RequestTable
from pagemill.checkpoint import open_checkpoint
from pagemill.config import EngineConfig
from pagemill.messages import SamplingSpec, ScheduledSequence, SchedulerOutput
from pagemill.models.blocks import DecoderLM
from pagemill.models.loader import load_model
from pagemill.sampling.row_math import SampleRow
from pagemill.speculation.base import Draft, Forward, Option, Proposer, RankParts

Ints = NDArray[np.int64]


class DraftModelProposer:
    """A `Proposer` that runs a model, one token of all its sequences at a time."""

    options: ClassVar[Mapping[str, Option]] = {}
    default_length: ClassVar[int] = 4
    needs_model: ClassVar[bool] = True

    def __init__(
        self,
        model: DecoderLM,
        kv: KVStore,
        rank: RankParts,
        *,
        max_model_len: int,
        max_num_tokens: int,
    ) -> None:
        """`max_num_tokens` bounds what is computed at once of texts that the draft model is behind."""
        self._model = model
        self._forward: Forward = rank.replay(model) or model.forward
        self._kv = kv
        self._rank = rank
        self._max_model_len = max_model_len
        self._max_num_tokens = max_num_tokens
        self._size = kv.block_size
        self.filled: Ints = np.zeros(kv.num_blocks, np.int64)

    @classmethod
    def check(cls, options: Mapping[str, int | float]) -> None:
        """Do nothing: there are no options."""

    @classmethod
    def make(cls, config: EngineConfig, rank: RankParts) -> Proposer:
        """Load the draft model and make its pool."""
        assert config.speculative is not None and config.speculative.draft_model is not None
        draft = config.speculative.draft_model
        is_dummy = draft.load_format == "dummy"
        model = load_model(
            draft,
            device=rank.device,
            checkpoint=None if is_dummy else open_checkpoint(draft.path),
            dense=rank.dense_weights,
        )
        kv = KVStore(
            rank.backend,
            model.attention_specs,
            num_blocks=rank.num_blocks,
            block_size=config.cache.block_size,
            dtype=getattr(torch, config.cache.dtype),
            device=rank.device,
        )
        return cls(
            model,
            kv,
            rank,
            max_model_len=draft.max_model_len,
            max_num_tokens=config.scheduler.max_num_batched_tokens,
        )

    def end_rows(self, table: RequestTable, seq_ids: Sequence[int]) -> None:
        """Do nothing: what a block holds does not depend on who holds it."""

    def begin_step(self, table: RequestTable, step: SchedulerOutput) -> None:
        """Follow the blocks, and compute what is missing of the sequences that are to have drafts."""
        for move in step.block_moves.swap_in:  # the host tier keeps the target's alone
            self.filled[move.block] = 0
        copies = step.block_moves.copies
        self._kv.copy_blocks(copies)
        for source, target in copies:
            self.filled[target] = self.filled[source]
        rows = table.rows(step.scheduled)
        for row, part in zip(rows.tolist(), step.scheduled, strict=True):
            self._note_written(table.block_tables[row], part)
        self._catch_up(table, [part for part in step.scheduled if part.num_drafts])

    def propose(self, table: RequestTable, parts: Sequence[ScheduledSequence]) -> list[Draft]:
        """Draft token by token, for all sequences whose text is computed up to the last tokens."""
        rows = table.rows(parts)
        known = table.num_tokens[rows]
        room = self._max_model_len - known  # the last draft token is never computed
        counts = np.minimum([part.num_drafts for part in parts], np.maximum(room, 0))
        starts = self._starts(table, rows)
        counts[starts < known - 2] = 0  # behind by more than the last step's last draft
        drafts: list[list[int]] = [[] for _ in parts]
        live = np.flatnonzero(counts)
        first = starts
        specs = [_without_logprobs(table.spec(row)) for row in rows.tolist()]
        for place in range(int(counts.max(initial=0))):
            live = live[counts[live] > place]
            if not len(live):
                break
            ends = known[live] + place
            wanted = [specs[i] for i in live.tolist()]
            tokens = self._next_tokens(table, rows[live], first[live], ends, wanted)
            first = first.copy()
            first[live] = ends
            for i, token in zip(live.tolist(), tokens, strict=True):
                if token is None:
                    counts[i] = 0
                    continue
                drafts[i].append(token)
                table.put_drafts(int(rows[i]), drafts[i])
        return [np.array(draft, np.int32) for draft in drafts]

    # ------------------------------------------------------------ which slots hold what

    def _note_written(self, blocks: Ints, part: ScheduledSequence) -> None:
        """Forget what the draft model has of positions that the target computes in this step."""
        end = part.num_computed + part.num_tokens + part.num_drafts
        first, stop = part.num_computed // self._size, -(-end // self._size)
        written = int(blocks[first])
        self.filled[written] = min(self.filled[written], part.num_computed % self._size)
        self.filled[blocks[first + 1 : stop]] = 0

    def _note_filled(self, blocks: Ints, start: int, end: int) -> None:
        """Note that the draft model has computed positions [start, end)."""
        first, stop = start // self._size, -(-end // self._size)
        ends = end - np.arange(first, stop) * self._size
        self.filled[blocks[first:stop]] = np.minimum(ends, self._size)

    def _starts(self, table: RequestTable, rows: Ints) -> Ints:
        """Return the first position of each row to compute: the last known one, or a gap before it."""
        starts = np.empty(len(rows), np.int64)
        for i, row in enumerate(rows.tolist()):
            last = int(table.num_tokens[row]) - 1
            filled = self.filled[table.block_tables[row, : last // self._size + 1]]
            gap = int(np.argmin(filled == self._size))  # 0 when all are full, too
            if filled[gap] == self._size:
                starts[i] = last
            else:
                starts[i] = min(last, gap * self._size + int(filled[gap]))
        return starts

    # ------------------------------------------------------------ computing

    def _catch_up(self, table: RequestTable, parts: Sequence[ScheduledSequence]) -> None:
        """Compute what is missing before the last known tokens, as much as a step may compute."""
        if not parts:
            return
        rows = table.rows(parts)
        starts = self._starts(table, rows)
        lasts = np.minimum(table.num_tokens[rows] - 1, self._max_model_len)
        missing = np.maximum(lasts - starts, 0)
        missing[missing <= 1] = 0  # the last step's last draft: that goes with the next token
        before = np.cumsum(missing) - missing
        lengths = np.clip(self._max_num_tokens - before, 0, missing)
        behind = np.flatnonzero(lengths)
        if len(behind):
            ends = starts[behind] + lengths[behind]
            self._hidden(table, rows[behind], starts[behind], ends, np.empty(0, np.int64))

    def _next_tokens(
        self,
        table: RequestTable,
        rows: Ints,
        starts: Ints,
        ends: Ints,
        specs: Sequence[SamplingSpec],
    ) -> list[int | None]:
        """Compute positions [start, end) of rows; return the tokens drawn there, None for an error."""
        lasts = np.cumsum(ends - starts) - 1
        logits = self._model.logits(self._hidden(table, rows, starts, ends, lasts))
        sampled = self._rank.sampler.sample(
            logits,
            [
                SampleRow(
                    spec,
                    table.token_ids[row, :end],
                    table.num_prompt_tokens(row),
                    table.sample_index(row),
                    1,
                )
                for row, end, spec in zip(rows.tolist(), ends.tolist(), specs, strict=True)
            ],
        )
        return [None if row.error is not None else row.tokens[0] for row in sampled]

    def _hidden(
        self, table: RequestTable, rows: Ints, starts: Ints, ends: Ints, wanted: Ints
    ) -> torch.Tensor:
        """Run the model over positions [start, end) of rows; return [len(wanted), hidden].

        `wanted` are tokens of the flat batch.
        """
        device = self._rank.device
        lengths = ends - starts
        bounds = np.append(0, np.cumsum(lengths))
        owner = np.repeat(np.arange(len(rows)), lengths)
        positions = np.arange(bounds[-1]) - bounds[owner] + starts[owner]
        of_token = rows[owner]
        token_ids = table.token_ids[of_token, positions].astype(np.int64)
        slots = table.block_tables[of_token, positions // self._size] * self._size
        slots += positions % self._size
        num_blocks = -(-ends // self._size)
        width = int(num_blocks.max())
        blocks = table.block_tables[rows, :width]
        blocks[np.arange(width) >= num_blocks[:, None]] = 0
        batch = AttentionBatch(
            query_starts=tuple(bounds.tolist()),
            num_computed=tuple(starts.tolist()),
            block_tables=torch.from_numpy(blocks).to(device),
            slot_mapping=torch.from_numpy(slots).to(device),
            block_size=self._size,
        )
        attend = StepAttention(
            self._rank.backend, self._model.attention_specs, self._kv.layers, batch
        )
        hidden = self._forward(
            torch.from_numpy(token_ids).to(device),
            torch.from_numpy(positions).to(device),
            attend,
            torch.from_numpy(wanted).to(device),
        )
        for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
            self._note_filled(table.block_tables[row], start, end)
        return hidden


def _without_logprobs(spec: SamplingSpec) -> SamplingSpec:
    return spec if spec.logprobs is None else dataclasses.replace(spec, logprobs=None)
