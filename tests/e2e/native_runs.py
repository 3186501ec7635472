"""Runs of whole engines on the native kernels, and what of their outputs must be equal to the bit.

Used by the tests of the product's promise: one request, one answer. A weight format or cache type that lands
is one line in QUANTIZED.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagemill import LLM, SamplingParams
from pagemill.outputs import RequestOutput

# Tokens and chosen tokens' and alternatives' logprobs, as they are: never rounded, never compared with
# a tolerance.
Answer = tuple[Any, ...]


@dataclass(frozen=True)
class Format:
    """How weights and cache are kept: a name, and the engine arguments that ask for it."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


FORMATS = [
    Format("float32", {"dtype": "float32"}),
    Format("bfloat16", {"dtype": "bfloat16"}),
]
# Run by fewer families.
QUANTIZED = [
    Format("int8", {"dtype": "bfloat16", "quantization": "int8"}),
    Format("int4", {"dtype": "bfloat16", "quantization": "int4"}),
    Format("int8-float32", {"dtype": "float32", "quantization": "int8"}),
    Format("int8-cache", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
]


def answer(output: RequestOutput) -> Answer:
    """Return all that a request was told, to be compared with ==."""
    assert output.error is None and len(output.outputs) == 1
    [sample] = output.outputs
    return (
        list(sample.token_ids),
        [_scores(entry) for entry in sample.logprobs or []],
        [_scores(entry) for entry in output.prompt_logprobs or []],
        sample.finish_reason,
    )


def _scores(entry: Any) -> list[tuple[int, float]]:
    return [] if entry is None else [(token, score.logprob) for token, score in entry.items()]


def answers(
    llm: LLM, prompts: Sequence[Any], params: SamplingParams, *, alone: bool = False
) -> list[Answer]:
    """Return the answers to all prompts together, or to one after the other."""
    batches = [[prompt] for prompt in prompts] if alone else [list(prompts)]
    return [
        answer(output)
        for batch in batches
        for output in llm.generate(batch, params, use_tqdm=False)
    ]
