"""`pagemill generate PROMPT...`: continue prompts with a model and print the text.

Without a prompt, standard input is one prompt. The text goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import typing
from typing import Any

from pagemill.cli.arguments import add_fields, settle
from pagemill.cli.sampling import add_sampling, sampling_values
from pagemill.engine_args import EngineArgs
from pagemill.errors import RequestError
from pagemill.log import setup_logging

if typing.TYPE_CHECKING:
    from pagemill.outputs import RequestOutput
    from pagemill.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add PROMPT, --model, --json, the sampling flags and the engine's."""
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="text to continue; none: stdin")
    parser.add_argument(
        "--model", default=argparse.SUPPRESS, help="folder, .gguf file, hub id or pulled model"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt")
    add_sampling(parser)
    add_fields(parser, EngineArgs)


def run(args: argparse.Namespace) -> int:
    """Generate and print; 0 when every prompt got its text."""
    engine_args = settle(args, EngineArgs)
    sampling = sampling_values(args)
    prompts = args.prompt or [_read_stdin()]
    setup_logging()
    import dataclasses

    from pagemill.llm import LLM

    llm = LLM(**{f.name: getattr(engine_args, f.name) for f in dataclasses.fields(EngineArgs)})
    params = llm.get_default_sampling_params()
    for name, value in sampling.items():
        setattr(params, name, value)
    if "max_tokens" not in sampling and params.max_tokens == 16:
        params.max_tokens = None  # a person wants the whole answer: up to the context's end
    outputs = llm.generate(prompts, params.checked_copy(), use_tqdm=len(prompts) > 1)
    for output in outputs:
        _print(output, params, as_json=args.json)
    return 1 if any(o.error for o in outputs) else 0


def _read_stdin() -> str:
    if sys.stdin.isatty():
        print("reading the prompt from the terminal; Ctrl-D ends it", file=sys.stderr)
    text = sys.stdin.read()
    if not text:
        raise RequestError("no prompt: give one as an argument or on stdin", param="prompt")
    return text.removesuffix("\n")


def _print(output: RequestOutput, params: SamplingParams, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_as_object(output)), flush=True)
        return
    for choice in output.outputs:
        print(f"{output.prompt}{choice.text}", flush=True)
    if output.error:
        print(f"pagemill: error: {output.error}", file=sys.stderr)


def _as_object(output: RequestOutput) -> dict[str, Any]:
    choices = [
        {
            "index": c.index,
            "text": c.text,
            "num_tokens": len(c.token_ids),
            "finish_reason": c.finish_reason,
            "stop_reason": c.stop_reason,
            "seed": c.seed,
        }
        for c in output.outputs
    ]
    return {"prompt": output.prompt, "outputs": choices, "error": output.error}
