"""What the two benchmarks share: random prompts, flags, output."""

from __future__ import annotations

import argparse
import json
import random
from typing import TYPE_CHECKING, Any

from pagemill.cli.arguments import add_fields, add_model
from pagemill.engine_args import EngineArgs
from pagemill.errors import ConfigError

if TYPE_CHECKING:
    from pagemill.engine.llm_engine import LLMEngine
    from pagemill.sampling_params import SamplingParams

PROMPT_SEED = 0


def add_bench_arguments(
    parser: argparse.ArgumentParser, *, input_len: int, output_len: int
) -> None:
    """Add MODEL, the lengths, --json and the engine's flags."""
    add_model(parser)
    group = parser.add_argument_group("benchmark")
    group.add_argument(
        "--input-len", type=int, default=input_len, metavar="N",
        help="tokens a prompt (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--output-len", type=int, default=output_len, metavar="N",
        help="tokens to generate a request (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--json", action="store_true", help="print the numbers as one JSON object")
    group.add_argument("--quiet", action="store_true", help="no progress bar")
    add_fields(parser, EngineArgs)


def check_counts(args: argparse.Namespace, *names: str, least: int = 1) -> None:
    """Raise ConfigError for a count under `least`."""
    for name in names:
        value = getattr(args, name)
        if value < least:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is {value}; it must be at least {least}")


def random_prompts(num: int, length: int, vocab_size: int) -> list[list[int]]:
    """Return prompts of random token ids: [num][length], the same ones in every run."""
    draw = random.Random(PROMPT_SEED)
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(num)]


def fixed_length(output_len: int) -> SamplingParams:
    """Return greedy parameters that generate exactly `output_len` tokens and no text."""
    from pagemill.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=output_len,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def check_fits(engine: LLMEngine, input_len: int, output_len: int) -> None:
    """Raise ConfigError when a request is longer than the context: it would be cut short."""
    limit = engine.config.model.max_model_len
    if input_len + output_len > limit:
        raise ConfigError(
            f"--input-len {input_len} and --output-len {output_len} are {input_len + output_len} "
            f"tokens, but the context is {limit} (--max-model-len); lower one of them"
        )


def report(numbers: dict[str, Any], lines: list[str], *, as_json: bool) -> None:
    """Print the numbers for a program, or the lines for a person."""
    print(json.dumps(numbers) if as_json else "\n".join(lines))
