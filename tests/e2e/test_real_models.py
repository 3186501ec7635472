"""Trained models, read from GGUF: 64 greedy tokens on ten prompts equal transformers' in float32.

The oracle reads the same weights from a folder, eager attention, and is asked for the best token at each
of the 64 places in one pass: if every answer is ours, its own greedy loop would say the same.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill import LLM, SamplingParams
from pagemill.checkpoint.pull import pull
from tests.ops.conftest import needs_extension

NUM_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "1, 2, 3, 4, 5,",
    "The three laws of motion, which Newton published in 1687, say that",
    "Liebe Freunde, heute möchte ich euch",
    "Q: Why is the sky blue?\nA:",
    "🎉 Happy birthday to",
    # Longer than Gemma's window of 512, so that it is crossed in the prefill.
    "The train stops at every village between the river and the hills. " * 42,
]


def oracle(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma-3-270m"])
def test_greedy_tokens_equal_transformers(name: str, hf_folder: Callable[[str], Path]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    path = pull(name, progress=False)
    # Plain weights: the file's blocks, kept as they are, round scales that are products of two.
    with LLM(
        str(path), dtype="float32", quantization="none", max_model_len=1024,
        kv_cache_memory_bytes=1 << 30,
    ) as llm:  # fmt: skip
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    model = oracle(hf_folder(name))
    for output in outputs:
        said = output.outputs[0].token_ids
        assert len(said) == NUM_TOKENS
        ids = torch.tensor([[*output.prompt_token_ids, *said[:-1]]])
        with torch.inference_mode():
            best = model(ids, logits_to_keep=NUM_TOKENS).logits[0].argmax(-1)
        assert said == best.tolist(), output.prompt
    del model
    gc.collect()


# Name -> the largest difference of logprobs: float rounding alone, and scales rounded to float16.
CLOSENESS = {"smollm2-135m-instruct": 1e-3, "gemma-3-270m": 5e-2}


@needs_extension
@pytest.mark.parametrize("name", CLOSENESS)
def test_blocks_that_are_kept_give_the_logprobs_of_their_plain_weights(
    name: str, hf_folder: Callable[[str], Path]
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=1)
    path = pull(name, progress=False)
    with LLM(
        str(path), dtype="float32", quantization="gguf", max_model_len=1024,
        kv_cache_memory_bytes=1 << 30,
    ) as llm:  # fmt: skip
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    model = oracle(hf_folder(name))
    for output in outputs:
        (ours,) = output.outputs
        ids = torch.tensor([[*output.prompt_token_ids, *ours.token_ids[:-1]]])
        with torch.inference_mode():
            logits = model(ids, logits_to_keep=len(ours.token_ids)).logits[0].log_softmax(-1)
        assert ours.logprobs is not None
        for theirs, token, known in zip(logits, ours.token_ids, ours.logprobs, strict=True):
            assert float(theirs[token]) == pytest.approx(known[token].logprob, abs=CLOSENESS[name])
            assert float(theirs.max() - theirs[token]) <= CLOSENESS[name]
    del model
    gc.collect()


def test_a_chat_turn_stops_on_the_model_s_own_end_token(smollm2_gguf: Path) -> None:
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    with LLM(str(smollm2_gguf), max_model_len=256, kv_cache_memory_bytes=1 << 28) as llm:
        (output,) = llm.chat(turn, SamplingParams(temperature=0.0, max_tokens=32), use_tqdm=False)
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"
