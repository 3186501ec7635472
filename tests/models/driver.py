"""Drives a model without an engine: ragged batches, prompts in chunks, scattered blocks.

Every sequence takes part in every step, with a chunk of its prompt or its newest token; so steps mix
prefill and decode as soon as prompts differ in length.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagemill.attention import BACKENDS
from pagemill.attention.base import AttentionBatch, StepAttention
from pagemill.models.blocks import DecoderLM


@dataclass
class Run:
    """One sequence: its tokens, and the logprob of each token that was made."""

    token_ids: list[int]
    blocks: list[int]
    num_computed: int = 0
    new_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def generate(
    model: DecoderLM,
    prompts: list[list[int]],
    num_tokens: int,
    *,
    chunk: int | None = None,
    block_size: int = 4,
    attention: str = "torch",
) -> list[Run]:
    """Return each prompt's greedy continuation of `num_tokens` tokens; `chunk` None: prompts whole."""
    backend = BACKENDS.load(attention)()
    needed = [-(-(len(prompt) + num_tokens) // block_size) for prompt in prompts]
    ids = list(range(sum(needed)))
    random.Random(0).shuffle(ids)
    blocks = [[ids.pop() for _ in range(n)] for n in needed]
    runs = [Run(list(p), b) for p, b in zip(prompts, blocks, strict=True)]
    device = torch.device("cpu")
    kv = [
        backend.allocate_kv(spec, sum(needed), block_size, model.build.dtype, device)
        for spec in model.attention_specs
    ]
    while any(len(run.new_ids) < num_tokens for run in runs):
        _step(
            model, backend, kv, [r for r in runs if len(r.new_ids) < num_tokens], chunk, block_size
        )
    return runs


def _step(model, backend, kv, runs: list[Run], chunk: int | None, block_size: int) -> None:
    token_ids, positions, slots, starts, rows = [], [], [], [0], []
    for run in runs:
        left = len(run.token_ids) - run.num_computed
        count = left if chunk is None else min(left, chunk)
        span = range(run.num_computed, run.num_computed + count)
        token_ids += [run.token_ids[p] for p in span]
        positions += span
        slots += [run.blocks[p // block_size] * block_size + p % block_size for p in span]
        starts.append(starts[-1] + count)
        if span.stop == len(run.token_ids):
            rows.append(run)
    most = max(len(run.blocks) for run in runs)
    batch = AttentionBatch(
        query_starts=tuple(starts),
        num_computed=tuple(run.num_computed for run in runs),
        block_tables=torch.tensor([r.blocks + [0] * (most - len(r.blocks)) for r in runs]),
        slot_mapping=torch.tensor(slots),
        block_size=block_size,
    )
    attend = StepAttention(backend, model.attention_specs, kv, batch)
    with torch.inference_mode():
        lasts = [starts[i + 1] - 1 for i, run in enumerate(runs) if run in rows]
        ends = torch.tensor(lasts, dtype=torch.int64)
        hidden = model.forward(torch.tensor(token_ids), torch.tensor(positions), attend, ends)
        logprobs: Tensor | None = None
        if len(ends):
            logprobs = model.logits(hidden).log_softmax(-1)
    for i, run in enumerate(runs):
        run.num_computed += starts[i + 1] - starts[i]
    for i, run in enumerate(rows):
        assert logprobs is not None
        token = int(logprobs[i].argmax())
        run.token_ids.append(token)
        run.new_ids.append(token)
        run.logprobs.append(float(logprobs[i, token]))


def prompt_logits(model: DecoderLM, prompt: list[int]) -> Tensor:
    """Return the logits [tokens, vocab] at every place of a prompt, computed in one step."""
    backend = BACKENDS.load("torch")()
    block_size = 4
    blocks = list(range(-(-len(prompt) // block_size)))
    kv = [
        backend.allocate_kv(spec, len(blocks), block_size, model.build.dtype, torch.device("cpu"))
        for spec in model.attention_specs
    ]
    batch = AttentionBatch(
        query_starts=(0, len(prompt)),
        num_computed=(0,),
        block_tables=torch.tensor([blocks]),
        slot_mapping=torch.arange(len(prompt)),
        block_size=block_size,
    )
    attend = StepAttention(backend, model.attention_specs, kv, batch)
    with torch.inference_mode():
        hidden = model.forward(torch.tensor(prompt), torch.arange(len(prompt)), attend)
        return model.logits(hidden)
