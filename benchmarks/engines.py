"""One engine in a process of its own, driven line by line, so that engines can be interleaved.

    python -m benchmarks.engines NAME FOLDER DTYPE THREADS

reads "case round" lines and answers each with one JSON line {"wall_s", "num_output"}. An engine is one
class below and a line in ENGINES. Called by `benchmarks.offline`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Protocol

from benchmarks import work


class Engine(Protocol):
    """Anything that can do a list of jobs."""

    def run(self, jobs: list[work.Job]) -> int:
        """Do the jobs and return how many tokens were generated."""
        ...


class Pagemill:
    """pagemill through `LLM`."""

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        from pagemill import LLM

        self._llm = LLM(
            folder, dtype=dtype, num_threads=threads, max_model_len=4096, disable_log_stats=True
        )

    def run(self, jobs: list[work.Job]) -> int:
        from pagemill import SamplingParams

        params = [
            SamplingParams(
                temperature=0.0, max_tokens=job.num_output, ignore_eos=True, detokenize=False
            )
            for job in jobs
        ]
        outputs = self._llm.generate([job.prompt for job in jobs], params, use_tqdm=False)
        return sum(len(o.outputs[0].token_ids) for o in outputs)


class TransformersGenerate:
    """transformers' `generate`: static batches of 16, padded on the left."""

    batch_size = 16

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        self._model = _transformers_model(folder, dtype, threads, "sdpa")

    def run(self, jobs: list[work.Job]) -> int:
        import torch

        for start in range(0, len(jobs), self.batch_size):
            batch = jobs[start : start + self.batch_size]
            longest = max(len(job.prompt) for job in batch)
            num_output = max(job.num_output for job in batch)
            ids = torch.zeros(len(batch), longest, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, job in enumerate(batch):
                ids[row, longest - len(job.prompt) :] = torch.tensor(job.prompt)
                mask[row, longest - len(job.prompt) :] = 1
            self._model.generate(
                input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=num_output,
                min_new_tokens=num_output, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return sum(job.num_output for job in jobs)  # what was asked for; the padding is not counted


class TransformersContinuous:
    """transformers' own continuous batching."""

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        self._model = _transformers_model(folder, dtype, threads, "paged|sdpa")

    def run(self, jobs: list[work.Job]) -> int:
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        generation = GenerationConfig(
            do_sample=False, max_new_tokens=max(job.num_output for job in jobs), eos_token_id=-1,
            pad_token_id=0,
        )  # fmt: skip
        manager = self._model.init_continuous_batching(
            generation_config=generation,
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=2048, max_batch_tokens=2304
            ),
        )
        manager.start()
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
        manager.stop(block=True)
        return num_output


def _transformers_model(folder: str, dtype: str, threads: int, attention: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention
    ).eval()
    model.generation_config.eos_token_id = None
    return model


ENGINES: dict[str, type[Any]] = {
    "pagemill": Pagemill,
    "transformers-generate": TransformersGenerate,
    "transformers-continuous": TransformersContinuous,
}


def main() -> None:
    """Serve "case round" lines until the input ends."""
    name, folder, dtype, threads = sys.argv[1:5]
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries may print; answers stay clean
    engine: Engine = ENGINES[name](folder, dtype, int(threads))
    print(json.dumps({"ready": name}), file=answers, flush=True)
    for line in sys.stdin:
        case, round = line.split()
        jobs = work.make(case, int(round))
        start = time.perf_counter()
        num_output = engine.run(jobs)
        wall_s = time.perf_counter() - start
        print(json.dumps({"wall_s": wall_s, "num_output": num_output}), file=answers, flush=True)


if __name__ == "__main__":
    main()
