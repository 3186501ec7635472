"""`pagemill bench throughput [MODEL]`: tokens a second when all requests are there at once."""

from __future__ import annotations

import argparse
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
from pagemill.errors import EngineDeadError
from pagemill.log import setup_logging

if TYPE_CHECKING:
    from pagemill.engine.llm_engine import LLMEngine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's flags and the engine's."""
    add_bench_arguments(parser, input_len=128, output_len=128)
    parser.add_argument("--num-prompts", type=int, default=64, metavar="N", help="default: 64")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    check_counts(args, "input_len", "output_len", "num_prompts")
    engine_args = settle(args, EngineArgs)
    setup_logging()
    from pagemill.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(engine_args)
    try:
        check_fits(engine, args.input_len, args.output_len)
        vocab = engine.config.model.shape.vocab_size
        prompts = random_prompts(args.num_prompts, args.input_len, vocab)
        elapsed, num_output = serve_all(engine, prompts, args.output_len, quiet=args.quiet)
    finally:
        engine.shutdown()
    num_input = args.num_prompts * args.input_len
    numbers = {
        "num_requests": args.num_prompts,
        "elapsed_s": elapsed,
        "num_input_tokens": num_input,
        "num_output_tokens": num_output,
        "requests_per_s": args.num_prompts / elapsed,
        "total_tokens_per_s": (num_input + num_output) / elapsed,
        "output_tokens_per_s": num_output / elapsed,
    }
    lines = [
        f"{args.num_prompts} requests: {args.input_len} tokens in, {args.output_len} out, "
        f"{elapsed:.2f} s",
        f"throughput  {numbers['requests_per_s']:.2f} requests/s  "
        f"{numbers['total_tokens_per_s']:.1f} tokens/s  "
        f"{numbers['output_tokens_per_s']:.1f} output tokens/s",
    ]
    report(numbers, lines, as_json=args.json)
    return 0


def serve_all(
    engine: LLMEngine, prompts: list[list[int]], output_len: int, *, quiet: bool
) -> tuple[float, int]:
    """Run all prompts; return the wall seconds and the number of generated tokens."""
    from tqdm import tqdm

    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        params = fixed_length(output_len)
        engine.add_request(f"throughput-{i}", {"prompt_token_ids": prompt}, params)
    num_output = 0
    with tqdm(total=len(prompts), desc="requests", disable=quiet) as bar:
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.error:
                    raise EngineDeadError(f"a request failed: {output.error}")
                num_output += sum(len(choice.token_ids) for choice in output.outputs)
                bar.update()
    return time.perf_counter() - start, num_output
