"""Where a step's time goes: sequences of SmolLM2-135M decoding, by part and by language.

    python -m benchmarks.step_overhead [--seqs 1,64] [--dtype bfloat16] [--threads 2] [--steps 100] [--streams]

For each number of sequences, each way of sampling, and with recorded steps and without (`enforce_eager`),
all in turn: the milliseconds of a step by part, and how many of them the engine's thread computed outside
native kernels, in Python and in torch, as processor time, which other processes do not add to. "execute" holds "prepare", "model" (the forward pass and the
logits) and "sample". The whole step is taken from outside, statistics included. Medians; on a busy
machine take `--best`, the least of each figure.

"between" is what passes from the end of a step to the next: text ("process") and outputs where one thread does
both, messages and handing over where text is made elsewhere. `--streams` measures that: the same sequences as
streams of `AsyncLLMEngine`, with the engine in a thread and in a process of its own; "process" is not part of the
step then, and a step is its parts on the engine's thread, statistics left out.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time

from benchmarks import models
from pagemill import (
    AsyncLLMEngine,
    EngineArgs,
    LLMEngine,
    RequestOutputKind,
    SamplingParams,
    native,
)
from pagemill.messages import StepStats

NUM_WARM_UP = 20
SAMPLINGS = ((0.0, 1.0), (0.8, 0.95))  # temperature, top_p


class StepRecorder:
    """A stat logger that keeps the last step's statistics."""

    last: StepStats | None = None

    def record(self, stats: StepStats) -> None:
        """Keep them."""
        self.last = stats


def engine_args(arguments: argparse.Namespace, eager: bool) -> EngineArgs:
    """Return the arguments of an engine."""
    return EngineArgs(
        model=str(models.smollm2_folder()), dtype=arguments.dtype, max_model_len=2048,
        num_threads=arguments.threads, enforce_eager=eager, kv_cache_memory_bytes=2 << 30,
        max_num_seqs=256,
    )  # fmt: skip


def make_engine(arguments: argparse.Namespace, eager: bool) -> tuple[LLMEngine, StepRecorder]:
    """Return an engine and what records its steps."""
    recorder = StepRecorder()
    args = engine_args(arguments, eager)
    return LLMEngine.from_engine_args(args, stat_loggers=[recorder]), recorder


def measure(
    engine: LLMEngine, recorder: StepRecorder, num_seqs: int, sampling: tuple[float, float],
    num_steps: int,
) -> list[dict[str, float]]:  # fmt: skip
    """Decode `num_seqs` sequences and return the seconds of each step by part."""
    rng = random.Random(0)
    temperature, top_p = sampling
    for i in range(num_seqs):
        params = SamplingParams(
            temperature=temperature, top_p=top_p, seed=i, ignore_eos=True,
            max_tokens=NUM_WARM_UP + num_steps + 50,
        )  # fmt: skip
        prompt = {"prompt_token_ids": [rng.randrange(300, 30_000) for _ in range(128)]}
        engine.add_request(str(i), prompt, params)
    while recorder.last is None or recorder.last.iteration_tokens != num_seqs:
        engine.step()
    for _ in range(NUM_WARM_UP):
        engine.step()
    module = native.extension()
    steps = []
    for _ in range(num_steps):
        if module is not None:
            module.kernel_seconds(True)
        start, cpu_start = time.perf_counter(), time.thread_time()
        engine.step()
        cpu, total = time.thread_time() - cpu_start, time.perf_counter() - start
        kernels = 0.0 if module is None else module.kernel_seconds(False)
        assert recorder.last is not None and recorder.last.iteration_tokens == num_seqs
        parts = dict(recorder.last.timings_s)
        parts.pop("between", None)  # the caller's own, and what "total" holds already
        steps.append({**parts, "total": total, "outside": cpu - kernels})
    engine.abort_request([str(i) for i in range(num_seqs)])
    recorder.last = None
    while engine.has_unfinished_requests():
        engine.step()
    return steps


class StepCollector:
    """A stat logger that keeps the steps that only decode so many sequences."""

    def __init__(self, num_seqs: int) -> None:
        self.num_seqs = num_seqs
        self.steps: list[dict[str, float]] = []

    def record(self, stats: StepStats) -> None:
        """Keep a step's seconds by part."""
        parts = stats.timings_s
        if stats.iteration_tokens == self.num_seqs and "between" in parts:
            whole = sum(parts[name] for name in ("between", "schedule", "execute", "update"))
            kernels = parts["model"] + parts["sample"]
            self.steps.append({**parts, "total": whole, "outside": whole - kernels})


def measure_streams(
    arguments: argparse.Namespace, home: str, num_seqs: int
) -> list[dict[str, float]]:
    """Decode `num_seqs` streams and return the seconds of each step by part."""
    collector = StepCollector(num_seqs)
    engine = AsyncLLMEngine.from_engine_args(
        engine_args(arguments, False), home=home, stat_loggers=[collector]
    )
    rng = random.Random(0)

    async def stream(index: int) -> None:
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=NUM_WARM_UP + arguments.steps + 50,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        prompt = {"prompt_token_ids": [rng.randrange(300, 30_000) for _ in range(128)]}
        async for _ in engine.generate(prompt, params, str(index)):
            pass

    async def streams() -> None:
        await asyncio.gather(*(stream(i) for i in range(num_seqs)))

    asyncio.run(streams())
    engine.shutdown()
    return collector.steps[NUM_WARM_UP:][: arguments.steps]


def report(steps: list[dict[str, float]], best: bool) -> str:
    """Return one line."""
    middle = min if best else statistics.median
    ms = {part: 1e3 * middle(step[part] for step in steps) for part in steps[0]}
    total, outside = ms.pop("total"), ms.pop("outside")
    parts = "  ".join(f"{part} {value:.2f}" for part, value in ms.items())
    return (
        f"step {total:8.2f} ms  outside kernels {outside:6.2f} ms = "
        f"{100 * outside / total:4.1f} %  ({parts})"
    )


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seqs", default="1,64")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--streams", action="store_true")
    arguments = parser.parse_args()
    if arguments.streams:
        for num_seqs in (int(word) for word in arguments.seqs.split(",")):
            for home in ("thread", "process"):
                steps = measure_streams(arguments, home, num_seqs)
                print(
                    f"{num_seqs:4d} streams, {home:8s} {report(steps, arguments.best)}", flush=True
                )
        return
    engines = {"recorded": make_engine(arguments, False), "eager": make_engine(arguments, True)}
    for num_seqs in (int(word) for word in arguments.seqs.split(",")):
        for sampling in SAMPLINGS:
            print(f"{num_seqs} sequences, temperature {sampling[0]}, top_p {sampling[1]}")
            for name, (engine, recorder) in engines.items():
                steps = measure(engine, recorder, num_seqs, sampling, arguments.steps)
                print(f"  {name:9s} {report(steps, arguments.best)}", flush=True)


if __name__ == "__main__":
    main()
