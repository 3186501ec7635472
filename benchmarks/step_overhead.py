"""Where a step's time goes: 64 sequences of SmolLM2-135M decoding, by part.

    python -m benchmarks.step_overhead

"model" is the forward pass; everything else (schedule, prepare, sample, update, process, stats) is
overhead, printed as its share of the whole step.
"""

from __future__ import annotations

import argparse
import random
import statistics

from benchmarks import models

NUM_SEQS = 64
NUM_WARM_UP, NUM_STEPS = 20, 100


def measure(dtype: str, temperature: float, top_p: float) -> None:
    """Run the steps and print the median milliseconds of each part."""
    from pagemill import EngineArgs, LLMEngine, SamplingParams

    engine = LLMEngine.from_engine_args(
        EngineArgs(model=str(models.smollm2_folder()), dtype=dtype, max_model_len=2048)
    )
    rng = random.Random(0)
    for i in range(NUM_SEQS):
        params = SamplingParams(
            temperature=temperature, top_p=top_p, seed=i, ignore_eos=True,
            max_tokens=NUM_WARM_UP + NUM_STEPS + 50,
        )  # fmt: skip
        prompt = {"prompt_token_ids": [rng.randrange(300, 30_000) for _ in range(128)]}
        engine.add_request(str(i), prompt, params)
    while engine.last_step_stats is None or engine.last_step_stats.iteration_tokens != NUM_SEQS:
        engine.step()
    for _ in range(NUM_WARM_UP):
        engine.step()
    samples: dict[str, list[float]] = {}
    for _ in range(NUM_STEPS):
        engine.step()
        for part, seconds in engine.last_step_stats.timings_s.items():
            samples.setdefault(part, []).append(seconds)
    medians = {part: statistics.median(times) * 1e3 for part, times in samples.items()}
    total = medians.pop("total")
    model = medians["model"]
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
