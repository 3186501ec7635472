"""transformers' own continuous batching; it does not tell the time of the first token."""

from __future__ import annotations

import time

from benchmarks import work
from benchmarks.engines.base import EngineOptions
from benchmarks.engines.transformers_generate import load_model


class TransformersContinuous:
    """A manager started and stopped for each list of jobs; the start is not timed."""

    def __init__(self, options: EngineOptions) -> None:
        import transformers

        self._model = load_model(options, "paged|sdpa")
        self._num_blocks = max(2048, options.kv_tokens // 16)
        self.version = transformers.__version__

    def run(self, jobs: list[work.Job]) -> work.Outcome:
        """Add the jobs and collect the results."""
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        generation = GenerationConfig(
            do_sample=False, max_new_tokens=max(job.num_output for job in jobs), eos_token_id=-1,
            pad_token_id=0,
        )  # fmt: skip
        manager = self._model.init_continuous_batching(
            generation_config=generation,
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=self._num_blocks, max_batch_tokens=2304
            ),
        )
        manager.start()
        start = time.perf_counter()
        waiting = {
            manager.add_request(job.prompt, request_id=f"r{i}", max_new_tokens=job.num_output)
            for i, job in enumerate(jobs)
        }
        num_output = 0
        while waiting:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("transformers' manager stopped")
                continue
            if result.is_finished():
                waiting.discard(result.request_id)
                num_output += len(result.generated_tokens)
        wall_s = time.perf_counter() - start
        manager.stop(block=True)
        return work.Outcome(wall_s, num_output)


def load(options: EngineOptions) -> TransformersContinuous:
    """Load transformers."""
    return TransformersContinuous(options)
