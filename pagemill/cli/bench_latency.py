"""`pagemill bench latency [MODEL]`: the time of one batch, from its prompts to its last token."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

from pagemill.cli.arguments import settle
from pagemill.cli.bench import (
    add_bench_arguments,
    check_counts,
    check_fits,
    fixed_length,
    random_prompts,
    report,
)
from pagemill.engine_args import EngineArgs
from pagemill.log import setup_logging

if TYPE_CHECKING:
    from pagemill.engine.llm_engine import LLMEngine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's flags and the engine's."""
    add_bench_arguments(parser, input_len=32, output_len=128)
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument("--num-iters-warmup", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--num-iters", type=int, default=5, metavar="N", help="default: 5")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    check_counts(args, "input_len", "output_len", "batch_size", "num_iters")
    check_counts(args, "num_iters_warmup", least=0)
    engine_args = settle(args, EngineArgs)
    setup_logging()
    from tqdm import tqdm

    from pagemill.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(engine_args)
    try:
        check_fits(engine, args.input_len, args.output_len)
        vocab = engine.config.model.shape.vocab_size
        prompts = random_prompts(args.batch_size, args.input_len, vocab)
        for _ in range(args.num_iters_warmup):
            batch_s(engine, prompts, args.output_len)
        rounds = tqdm(range(args.num_iters), desc="latency", disable=args.quiet)
        times = [batch_s(engine, prompts, args.output_len) for _ in rounds]
    finally:
        engine.shutdown()
    times.sort()
    numbers = {
        "batch_size": args.batch_size,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "avg_latency_s": statistics.fmean(times),
        "median_latency_s": statistics.median(times),
        "min_latency_s": times[0],
        "max_latency_s": times[-1],
        "latencies_s": times,
    }
    lines = [
        f"batch of {args.batch_size}: {args.input_len} tokens in, {args.output_len} out, "
        f"{len(times)} rounds",
        f"latency  avg {numbers['avg_latency_s']:.3f} s  median {numbers['median_latency_s']:.3f} s  "
        f"min {times[0]:.3f} s  max {times[-1]:.3f} s",
        f"per output token  {statistics.median(times) / args.output_len * 1000:.2f} ms",
    ]
    report(numbers, lines, as_json=args.json)
    return 0


def batch_s(engine: LLMEngine, prompts: list[list[int]], output_len: int) -> float:
    """Return the wall seconds of one batch."""
    start = time.perf_counter()
    engine.reset_prefix_cache()  # the same prompts every time: each batch computes them whole
    for i, prompt in enumerate(prompts):
        request_id = f"latency-{i}"
        engine.add_request(request_id, {"prompt_token_ids": prompt}, fixed_length(output_len))
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - start
