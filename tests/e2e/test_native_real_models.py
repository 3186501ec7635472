"""A trained model on the native kernels: the same texts and logprobs alone and among many, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagemill import LLM, SamplingParams
from tests.e2e.native_runs import answers
from tests.ops.conftest import needs_extension

pytestmark = needs_extension
OPENINGS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "Water boils at",
    "1, 2, 3, 4, 5,",
    "The three laws of motion, which Newton published in 1687, say that",
    "Liebe Freunde, heute möchte ich euch",
    "Q: Why is the sky blue?\nA:",
    "🎉 Happy birthday to",
    "The train stops at every village between the river and the hills. " * 8,
]
TOPICS = ["rain", "bread", "the moon", "trains", "an old clock", "mathematics", "salt"]


def prompts(count: int) -> list[str]:
    """Return so many different prompts, from 4 to 130 tokens long."""
    made = [*OPENINGS]
    made += [f"{opening} {topic}" for topic in TOPICS for opening in OPENINGS]
    return made[:count]


def check(path: Path, texts: list[str], copies: int, num_tokens: int, **arguments: Any) -> None:
    """Compare answers one by one with those to all `copies` of all prompts at once."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=3)
    room = {"max_model_len": 1024, "kv_cache_memory_bytes": 1 << 30, "disable_log_stats": True}
    with LLM(str(path), max_num_seqs=len(texts) * copies, **room, **arguments) as llm:
        alone = answers(llm, texts, params, alone=True)
        together = answers(llm, texts * copies, params)
    assert len({tuple(tokens) for tokens, *_ in alone}) > len(texts) // 2
    for i, one in enumerate(together):
        assert one == alone[i % len(texts)], texts[i % len(texts)]


def test_twenty_prompts_in_float32_are_equal_together_and_one_by_one(smollm2_gguf: Path) -> None:
    check(smollm2_gguf, prompts(20), 1, 4, dtype="float32")


def test_ten_prompts_in_bfloat16_are_equal_alone_and_twenty_at_a_time(smollm2_gguf: Path) -> None:
    check(smollm2_gguf, prompts(10), 2, 6, dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_64_prompts_are_equal_alone_and_128_at_a_time(smollm2_gguf: Path, dtype: str) -> None:
    check(smollm2_gguf, prompts(64), 2, 16, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_answers_are_equal_alone_and_at_once(
    smollm2_gguf: Path, quantization: str
) -> None:
    check(smollm2_gguf, prompts(20), 2, 16, dtype="bfloat16", quantization=quantization)


@pytest.mark.slow
def test_a_window_that_is_crossed_does_not_matter(gemma_gguf: Path) -> None:
    long = [
        "The train stops at every village between the river and the hills. " * n for n in (36, 42)
    ]
    check(gemma_gguf, [*prompts(6), *long], 1, 16, dtype="bfloat16", max_num_batched_tokens=300)
