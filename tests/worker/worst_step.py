"""Run the worst-case step in a process of its own and print what it took and what was planned.

A program, not a test: `python worst_step.py float32`. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import dataclasses

import torch

from pagemill import native
from pagemill.config import EngineConfig
from pagemill.messages import NewSequence, SamplingSpec, ScheduledSequence, SchedulerOutput
from pagemill.worker.worker import Worker
from tests.worker.test_memory import MIB, make_config


def peak_bytes() -> int:
    """Return the most memory this process was resident with."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM in /proc/self/status")


def worst_step(config: EngineConfig, num_blocks: int) -> SchedulerOutput:
    """Return a step of max_num_seqs sequences: a budget's worth of tokens at the longest contexts.

    All but one sequence decode at the end of the context; the last computes the end of its own. Their
    tables share blocks: what is read does not matter here.
    """
    length, budget = config.model.max_model_len, config.scheduler.max_num_batched_tokens
    seqs, size = config.scheduler.max_num_seqs, config.cache.block_size
    per_seq = -(-length // size)
    chunk = min(budget - (seqs - 1), length)
    spec = SamplingSpec(temperature=1.0, top_p=0.9, logprobs=20, seed=1)
    new, parts = [], []
    for i in range(seqs):
        count = chunk if i == seqs - 1 else 1
        tokens = tuple((7 * i + j) % config.model.shape.vocab_size for j in range(length))
        blocks = tuple((i * per_seq + j) % num_blocks for j in range(per_seq))
        new.append(NewSequence(i, f"r{i}", tokens, length, 0, spec))
        parts.append(ScheduledSequence(i, length - count, count, 0, blocks, 1))
    return SchedulerOutput(step_id=0, scheduled=tuple(parts), new_sequences=tuple(new))


def main(dtype: str) -> None:
    """Load, fill the pool, run the step twice, print the figures."""
    config = make_config(dtype, kv_cache_memory_bytes=64 * MIB)
    tiny = dataclasses.replace(
        config,
        scheduler=dataclasses.replace(config.scheduler, max_num_batched_tokens=16, max_num_seqs=2),
        cache=dataclasses.replace(config.cache, num_blocks=64, kv_cache_memory_bytes=None),
    )
    _warm(tiny)
    before = peak_bytes()
    worker = Worker(config)
    plan = worker.memory_plan
    weight = torch.ones(1024, 512, dtype=getattr(torch, dtype))
    for pair in worker.kv.layers:
        for pool in pair:
            pool.fill_(1.0)  # the pool counts in full, as it will when it is in use
    # Likewise what kernels come to keep: scratch memory, or compiled products.
    if native.extension() is None:
        for rows in range(1, 160):
            torch.nn.functional.linear(weight.new_ones(rows, weight.shape[1]), weight)
    else:
        _fill_scratch(config, worker, weight.dtype)
    worker.execute(worst_step(config, plan.num_blocks))
    planned = plan.weight_bytes + plan.peak_activation_bytes + plan.kv_cache_bytes
    print(
        json.dumps(
            {
                "resident_bytes": peak_bytes() - before,
                "planned_bytes": planned,
                "weights": plan.weight_bytes,
                "activations": plan.peak_activation_bytes,
                "kv_cache": plan.kv_cache_bytes,
            }
        )
    )


def _fill_scratch(config: EngineConfig, worker: Worker, dtype: torch.dtype) -> None:
    """Write the most scratch memory that attention and linear layers may come to have."""
    from pagemill.ops import cpu as ops

    backend, model = worker._runner._backend, worker._runner._model
    tokens, longest = config.scheduler.max_num_batched_tokens, config.model.max_model_len
    spec = model.attention_specs[0]
    peak = backend.peak_bytes(
        spec, tokens, config.scheduler.max_num_seqs, longest, dtype, config.cache.block_size
    )
    result = tokens * spec.num_heads * spec.head_dim * dtype.itemsize
    backend.grow_scratch(peak - result)
    backend.scratch.fill_(1)
    k = (8 << 20) // (768 * dtype.itemsize) - 64
    packed = torch.zeros(ops.packed_shape(16, k, dtype), dtype=dtype)
    ops.linear(torch.ones(768, k, dtype=dtype), packed, 16)


def _warm(config: EngineConfig) -> None:
    """Run a small model once, so that libraries and their thread pools are loaded."""
    small = {**config.model.hf_config, "hidden_size": 64, "intermediate_size": 64}
    small |= {"num_hidden_layers": 1, "vocab_size": 256}
    from pagemill.models import MODELS

    model = dataclasses.replace(
        config.model,
        hf_config=small,
        shape=MODELS.load("llama").read_shape(small),
        max_model_len=64,
    )
    config = dataclasses.replace(config, model=model)
    Worker(config).execute(worst_step(config, 64))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
