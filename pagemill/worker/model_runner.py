"""One step on one rank: rows and blocks up to date, forward, sample, append.

Owned by `worker.worker`. It is the only caller of the model's forward: warm-up and measurements go
through `execute` with a made-up `SchedulerOutput` as well.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from pagemill.attention.base import AttentionBackend, StepAttention
from pagemill.batch.block_mover import BlockMover, HostStore
from pagemill.batch.input_builder import InputBuilder
from pagemill.batch.kv_store import KVStore
from pagemill.batch.model_input import ModelInput
from pagemill.batch.request_table import RequestTable
from pagemill.device.base import Device
from pagemill.messages import (
    ScheduledSequence,
    SchedulerOutput,
    SequenceOutput,
    StepOutput,
    TokenScores,
)
from pagemill.models.base import CausalLM
from pagemill.sampling.row_math import SampleRow
from pagemill.sampling.sampler import SampledRow, Sampler
from pagemill.speculation.base import Proposer
from pagemill.speculation.drafter import NO_DRAFTS_MADE, Drafter, Drafts
from pagemill.speculation.rejection import accept
from pagemill.speculation.scorer import scored_rows
from pagemill.worker.forward import Forward, PlainForward


class ModelRunner:
    """Holds what a step needs; `execute` runs one."""

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        kv: KVStore,
        sampler: Sampler,
        device: Device,
        *,
        max_logit_rows: int,
        forward: Forward | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        """`max_logit_rows` bounds how many rows of logits exist at once; prompts are scored in parts.

        `forward` None is the model's own; one that takes its place gives the same bits. `proposer` None:
        no step has drafts.
        """
        self._model = model
        self._attention_specs = model.attention_specs
        self._forward: Forward = forward or PlainForward(model)
        self._backend = backend
        self._kv = kv
        self._mover = BlockMover(kv)
        self._sampler = sampler
        self._device = device
        self._max_logit_rows = max_logit_rows
        self._table = RequestTable(kv.strides)
        self._drafter = None if proposer is None else Drafter(proposer, self._table)
        self._inputs = InputBuilder(self._table, kv.block_size, device.torch_device, kv.more_sizes)

    def swap_to(self, host: HostStore) -> None:
        """Move blocks out to a host tier from now on."""
        self._mover = BlockMover(self._kv, host)

    def execute(self, step: SchedulerOutput) -> StepOutput:
        """Run one step and return what it made for each scheduled sequence, in order."""
        start = time.perf_counter()
        if self._drafter is not None:
            self._drafter.end_rows(step.removed_seq_ids)
        self._table.remove(step.removed_seq_ids)
        self._table.add(step.new_sequences)
        self._table.set_blocks(step.scheduled)
        lost = self._mover.move(step.block_moves)
        rows_ready = time.perf_counter()
        begun, drafts = rows_ready, NO_DRAFTS_MADE
        if self._drafter is not None:
            with torch.inference_mode():
                self._drafter.begin(step)
                begun = time.perf_counter()
                drafts = self._drafter.draft(step)
        if step.is_empty:
            return StepOutput(step.step_id, (), {"prepare": time.perf_counter() - start}, lost)
        drafted = time.perf_counter()
        batch = self._inputs.build(step.scheduled, drafts.counts)
        attend = StepAttention(
            self._backend,
            self._attention_specs,
            self._kv.layers,
            batch.attention,
            batch.more_attention,
            self._kv.layer_kinds,
        )
        prepared = time.perf_counter()
        hidden, logits = self._compute(batch, attend)
        self._device.synchronize()
        computed = time.perf_counter()
        sampled = self._sample(step.scheduled, batch, logits, drafts)
        del logits
        prompt_scores, prompt_errors = self._score_prompts(batch, hidden)
        outputs = tuple(
            self._finish(
                part,
                sampled.get(i),
                prompt_scores.get(i, ()),
                prompt_errors.get(i),
                len(drafts.tokens.get(i, ())),
            )
            for i, part in enumerate(step.scheduled)
        )
        timings = {
            "prepare": prepared - drafted + rows_ready - start,
            "model": computed - prepared,
            "sample": time.perf_counter() - computed,
        }
        if self._drafter is not None:
            timings |= {"draft_preparation": begun - rows_ready, "draft": drafted - begun}
        return StepOutput(step.step_id, outputs, timings, lost)

    def close(self) -> None:
        """Let go of the host tier."""
        self._mover.close()

    def _compute(
        self, batch: ModelInput, attend: StepAttention
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return hidden states of every token for prompt scores, and the logits of those that sample.

        What nobody needs is None; then the end of the last layer runs for the rows that sample alone.
        """
        if batch.samples_every_token and batch.prompt is None:
            return None, self._forward.logits(batch.token_ids, batch.positions, attend)
        rows = batch.sample_rows if batch.prompt is None else None
        hidden = self._forward.hidden(batch.token_ids, batch.positions, attend, rows)
        if not len(batch.sampled):
            return hidden, None
        with torch.inference_mode():
            if rows is not None:
                return None, self._model.logits(hidden)
            return hidden, self._model.logits(hidden[batch.sample_rows])

    def _sample(
        self,
        scheduled: Sequence[ScheduledSequence],
        batch: ModelInput,
        logits: Tensor | None,
        drafts: Drafts,
    ) -> dict[int, SampledRow]:
        """Return what each sampling sequence got, by its index in `scheduled`.

        With a draft the tokens are a run; without one they are those of the sequence's samples.
        """
        if logits is None:
            return {}
        indices = batch.sampled.tolist()
        rows = [self._sample_row(scheduled[i], int(batch.rows[i])) for i in indices]
        if drafts.counts is None:
            return dict(zip(indices, self._sampler.sample(logits, rows), strict=True))
        counts = drafts.counts[batch.sampled].tolist()
        scored: list[SampleRow] = []
        for i, row, count in zip(indices, rows, counts, strict=True):
            scored += scored_rows(self._table, int(batch.rows[i]), row, count)
        results = iter(self._sampler.sample(logits, scored))
        sampled = {}
        for i, count in zip(indices, counts, strict=True):
            first = next(results)
            rest = list(itertools.islice(results, count))
            sampled[i] = accept(drafts.tokens[i], [first, *rest]) if count else first
        return sampled

    def _sample_row(self, part: ScheduledSequence, row: int) -> SampleRow:
        known = self._table.known_tokens(row)
        assert part.num_computed + part.num_tokens == len(known), (
            f"sequence {part.seq_id} samples before its known tokens are computed"
        )
        return SampleRow(
            self._table.spec(row),
            known,
            self._table.num_prompt_tokens(row),
            self._table.sample_index(row),
            part.num_samples,
        )

    def _score_prompts(
        self, batch: ModelInput, hidden: Tensor | None
    ) -> tuple[dict[int, tuple[TokenScores, ...]], dict[int, str]]:
        """Return owed prompt scores, and what is wrong with them, by index in `scheduled`."""
        prompt = batch.prompt
        if prompt is None or hidden is None:
            return {}, {}
        scores: dict[int, list[TokenScores]] = {}
        errors: dict[int, str] = {}
        for start in range(0, len(prompt.owner), self._max_logit_rows):
            part = slice(start, start + self._max_logit_rows)
            with torch.inference_mode():
                logits = self._model.logits(hidden[prompt.token_rows[part]])
            owners = prompt.owner[part].tolist()
            counts = [self._table.spec(int(batch.rows[i])).prompt_logprobs or 0 for i in owners]
            results = self._sampler.score_prompt(logits, prompt.target_ids[part].tolist(), counts)
            for owner, result in zip(owners, results, strict=True):
                if isinstance(result, str):
                    errors[owner] = result
                else:
                    scores.setdefault(owner, []).append(result)
        return {i: tuple(s) for i, s in scores.items() if i not in errors}, errors

    def _finish(
        self,
        part: ScheduledSequence,
        sampled: SampledRow | None,
        prompt_scores: tuple[TokenScores, ...],
        prompt_error: str | None,
        num_drafted: int,
    ) -> SequenceOutput:
        """Append the sampled tokens to the row and make the sequence's output.

        With several samples the row stays sample 0's; the others come back as new sequences.
        """
        error = prompt_error or (sampled.error if sampled is not None else None)
        if error is not None:
            if (
                part.num_samples
            ):  # the row may be in the next step already, whose result is nobody's
                self._table.append(part.seq_id, (0,))
            return SequenceOutput(part.seq_id, (), error=error)
        if sampled is None:
            return SequenceOutput(part.seq_id, (), prompt_scores=prompt_scores)
        if num_drafted:
            self._table.append(part.seq_id, sampled.tokens)
            scores = (sampled.scores,) if sampled.scores else ()
            return SequenceOutput(
                part.seq_id, (sampled.tokens,), scores, prompt_scores, num_drafted=num_drafted
            )
        self._table.append(part.seq_id, sampled.tokens[:1])
        return SequenceOutput(
            part.seq_id,
            tuple((token,) for token in sampled.tokens),
            tuple((scores,) for scores in sampled.scores),
            prompt_scores,
        )
