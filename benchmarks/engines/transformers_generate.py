"""transformers' `generate`: static batches of 16, padded on the left."""

from __future__ import annotations

import time
from typing import Any

from benchmarks import work
from benchmarks.engines.base import EngineOptions

_BATCH_SIZE = 16


class _TokenTimes:
    """A streamer that notes when tokens come; the first call brings the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Any) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing more."""


class TransformersGenerate:
    """`generate`, one static batch after the other."""

    def __init__(self, options: EngineOptions) -> None:
        import transformers

        self._model = load_model(options, "sdpa")
        self.version = transformers.__version__

    def run(self, jobs: list[work.Job]) -> work.Outcome:
        """Do the jobs in batches; what the padding computes is not counted."""
        import torch

        start = time.perf_counter()
        ttft_s = None
        for first in range(0, len(jobs), _BATCH_SIZE):
            batch = jobs[first : first + _BATCH_SIZE]
            longest = max(len(job.prompt) for job in batch)
            num_output = max(job.num_output for job in batch)
            ids = torch.zeros(len(batch), longest, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, job in enumerate(batch):
                ids[row, longest - len(job.prompt) :] = torch.tensor(job.prompt)
                mask[row, longest - len(job.prompt) :] = 1
            streamer = _TokenTimes() if len(jobs) == 1 else None
            self._model.generate(
                input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=num_output,
                min_new_tokens=num_output, eos_token_id=None, pad_token_id=0, streamer=streamer,
            )  # fmt: skip
            if streamer is not None:
                ttft_s = streamer.times[1] - start
        num_output = sum(job.num_output for job in jobs)
        return work.Outcome(time.perf_counter() - start, num_output, ttft_s)


def load_model(options: EngineOptions, attention: str) -> Any:
    """Return transformers' model with an attention implementation."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(
        options.path, dtype=getattr(torch, options.weights), attn_implementation=attention
    ).eval()
    model.generation_config.eos_token_id = None
    return model


def load(options: EngineOptions) -> TransformersGenerate:
    """Load transformers."""
    return TransformersGenerate(options)
