"""pagemill, through its steps."""

from __future__ import annotations

import time

from benchmarks import work
from benchmarks.engines.base import EngineOptions


class Pagemill:
    """`LLMEngine` with the whole list of jobs queued at once."""

    def __init__(self, options: EngineOptions) -> None:
        from pagemill import EngineArgs, LLMEngine, __version__, native

        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=options.path, dtype="bfloat16",
                quantization=None if options.weights == "bfloat16" else options.weights,
                num_threads=options.threads, max_model_len=options.max_model_len,
                kv_cache_memory_bytes=options.kv_bytes, disable_log_stats=True,
            )
        )  # fmt: skip
        self.version = f"{__version__}, kernels: {native.describe()}"
        self._num_added = 0

    def run(self, jobs: list[work.Job]) -> work.Outcome:
        """Add the jobs, then step until none is left."""
        from pagemill import SamplingParams

        start = time.perf_counter()
        for job in jobs:
            self._num_added += 1
            self._engine.add_request(
                str(self._num_added),
                {"prompt_token_ids": job.prompt},
                SamplingParams(
                    temperature=0.0, max_tokens=job.num_output, ignore_eos=True, detokenize=False
                ),
            )
        ttft_s, num_output = None, 0
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if ttft_s is None and output.outputs[0].token_ids:
                    ttft_s = time.perf_counter() - start
                if output.finished:
                    num_output += len(output.outputs[0].token_ids)
        return work.Outcome(time.perf_counter() - start, num_output, ttft_s)


def load(options: EngineOptions) -> Pagemill:
    """Load pagemill."""
    return Pagemill(options)
