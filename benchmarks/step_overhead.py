"""Where a step's time goes: 64 sequences of SmolLM2-135M decoding, by part.

    python -m benchmarks.step_overhead

"execute" holds "prepare", "model" (the forward pass and the logits) and "sample". Everything but the model is
overhead, printed as its share of the whole step; the total is taken from outside, statistics included.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from benchmarks import models
from pagemill import EngineArgs, LLMEngine, SamplingParams
from pagemill.messages import StepStats

NUM_SEQS = 64
NUM_WARM_UP, NUM_STEPS = 20, 100


class StepRecorder:
    """A stat logger that keeps the last step's statistics."""

    last: StepStats | None = None

    def record(self, stats: StepStats) -> None:
        """Keep them."""
        self.last = stats


def measure(dtype: str, temperature: float, top_p: float) -> None:
    """Run the steps and print the median milliseconds of each part."""
    recorder = StepRecorder()
    engine = LLMEngine.from_engine_args(
        EngineArgs(model=str(models.smollm2_folder()), dtype=dtype, max_model_len=2048),
        stat_loggers=[recorder],
    )
    rng = random.Random(0)
    for i in range(NUM_SEQS):
        params = SamplingParams(
            temperature=temperature, top_p=top_p, seed=i, ignore_eos=True,
            max_tokens=NUM_WARM_UP + NUM_STEPS + 50,
        )  # fmt: skip
        prompt = {"prompt_token_ids": [rng.randrange(300, 30_000) for _ in range(128)]}
        engine.add_request(str(i), prompt, params)
    while recorder.last is None or recorder.last.iteration_tokens != NUM_SEQS:
        engine.step()
    for _ in range(NUM_WARM_UP):
        engine.step()
    samples: dict[str, list[float]] = {"total": []}
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        engine.step()
        samples["total"].append(time.perf_counter() - start)
        assert recorder.last is not None and recorder.last.iteration_tokens == NUM_SEQS
        for part, seconds in recorder.last.timings_s.items():
            samples.setdefault(part, []).append(seconds)
    engine.shutdown()
    medians = {part: statistics.median(times) * 1e3 for part, times in samples.items()}
    total, model = medians.pop("total"), medians["model"]
    print(f"{dtype}, temperature {temperature}, top_p {top_p}: step {total:.2f} ms")
    for part, ms in medians.items():
        print(f"  {part:12s} {ms:8.3f} ms  {100 * ms / total:5.1f} %")
    print(f"  outside the model: {total - model:.3f} ms, {100 * (total - model) / total:.1f} %")


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    measure(args.dtype, 0.0, 1.0)
    measure(args.dtype, 0.8, 0.95)


if __name__ == "__main__":
    main()
