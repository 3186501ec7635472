"""vLLM on CPU, through its steps, in one process."""

from __future__ import annotations

import os
import time

from benchmarks import work
from benchmarks.engines.base import EngineOptions


class Vllm:
    """vLLM's `LLMEngine` with the whole list of jobs queued at once."""

    def __init__(self, options: EngineOptions) -> None:
        cores = sorted(os.sched_getaffinity(0))[: options.threads]
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE=str(-(-options.kv_bytes // 2**30)),  # whole GiB
            VLLM_CPU_OMP_THREADS_BIND=",".join(str(core) for core in cores),
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_NO_USAGE_STATS="1",
        )
        import torch
        import vllm

        self._engine = vllm.LLM(
            model=options.path, dtype=options.weights, max_model_len=options.max_model_len,
            max_num_seqs=64, enable_prefix_caching=True, disable_log_stats=True, seed=0,
        ).llm_engine  # fmt: skip
        self.version = f"{vllm.__version__}, torch {torch.__version__}, {_kernels()}"
        self._num_added = 0

    def run(self, jobs: list[work.Job]) -> work.Outcome:
        """Add the jobs, then step until none is left."""
        from vllm import SamplingParams

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
                if ttft_s is None:
                    ttft_s = time.perf_counter() - start
                if output.finished:
                    num_output += len(output.outputs[0].token_ids)
        return work.Outcome(time.perf_counter() - start, num_output, ttft_s)


def _kernels() -> str:
    """Return whether vLLM found the extension that it uses on AMD processors."""
    from importlib.metadata import PackageNotFoundError, version

    from vllm.platforms import current_platform

    try:
        name = f"zentorch {version('zentorch')}"
    except PackageNotFoundError:
        name = "without zentorch"
    return f"{type(current_platform).__name__} {name}"


def load(options: EngineOptions) -> Vllm:
    """Load vLLM."""
    return Vllm(options)
