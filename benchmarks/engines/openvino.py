"""OpenVINO GenAI, through its continuous batching pipeline."""

from __future__ import annotations

import time

from benchmarks import work
from benchmarks.engines.base import EngineOptions


class OpenVino:
    """`ContinuousBatchingPipeline` with the whole list of jobs queued at once."""

    def __init__(self, options: EngineOptions) -> None:
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = -(-options.kv_bytes // 2**30)  # whole GiB
        scheduler.max_num_batched_tokens = 2304
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        properties = {
            "INFERENCE_NUM_THREADS": options.threads,
            "INFERENCE_PRECISION_HINT": "bf16",
        }
        self._pipeline = genai.ContinuousBatchingPipeline(
            options.path, scheduler, "CPU", properties
        )
        self.version = str(genai.__version__)
        self._num_added = 0

    def run(self, jobs: list[work.Job]) -> work.Outcome:
        """Add the jobs, then step until none is left."""
        import numpy as np
        import openvino_genai as genai
        from openvino import Tensor

        start = time.perf_counter()
        handles = []
        for job in jobs:
            config = genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = job.num_output
            config.ignore_eos, config.do_sample = True, False
            prompt = Tensor(np.array([job.prompt], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._num_added, prompt, config))
            self._num_added += 1
        ttft_s = None
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            if ttft_s is None and handles[0].can_read():
                ttft_s = time.perf_counter() - start
        wall_s = time.perf_counter() - start
        num_output = sum(len(handle.read_all()[0].generated_ids) for handle in handles)
        return work.Outcome(wall_s, num_output, ttft_s)


def load(options: EngineOptions) -> OpenVino:
    """Load OpenVINO GenAI."""
    return OpenVino(options)
