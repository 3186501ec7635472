"""Engines over models with sliding windows: small pools serve long contexts, and say what everybody says.

The answers are those of an engine in which every layer keeps every token, to the bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagemill import LLM, SamplingParams, cache_layout
from tests.models.tiny import TINY, save_tiny
from tests.ops.conftest import needs_extension

pytestmark = needs_extension
MAX_LEN = 128
PROMPTS = [[(7 * i * i + 3 * seed) % 140 + 5 for i in range(60 + seed)] for seed in range(3)]
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=1, prompt_logprobs=0, detokenize=False
)


def engine(folder: Path, **arguments: Any) -> LLM:
    return LLM(
        str(folder), skip_tokenizer_init=True, max_model_len=MAX_LEN, num_threads=1, block_size=4,
        disable_log_stats=True, **arguments,
    )  # fmt: skip


def answers(llm: LLM) -> list[Any]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], PARAMS, use_tqdm=False)
    return [
        (
            list(output.outputs[0].token_ids),
            [[(t, s.logprob) for t, s in e.items()] for e in output.outputs[0].logprobs or []],
            [e and [(t, s.logprob) for t, s in e.items()] for e in output.prompt_logprobs or []],
        )
        for output in outputs
    ]


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gemma2"])
def test_a_pool_too_small_for_every_token_serves_windows_with_the_same_bits(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(TINY[family], tmp_path / family)
    with monkeypatch.context() as patch:
        patch.setattr(
            cache_layout,
            "cache_layout",
            lambda shape, **sizes: cache_layout.plain_layout(sizes["block_size"], shape.num_layers),
        )
        with engine(tmp_path / family, kv_cache_memory_bytes=1 << 21) as llm:
            expected = answers(llm)
            whole = llm.llm_engine._executor.memory_plan  # type: ignore[attr-defined]
    assert whole.layout is not None and not whole.layout.lets_go
    one = -(-MAX_LEN // 4) * whole.block_bytes  # of a request, if every layer keeps every token
    with engine(
        tmp_path / family,
        kv_cache_memory_bytes=one * 3 // 4,
        max_num_batched_tokens=16,
        swap_space=0.01,
    ) as llm:
        plan = llm.llm_engine._executor.memory_plan  # type: ignore[attr-defined]
        assert plan.layout.lets_go and plan.num_tokens > plan.num_tokens_without_windows
        assert plan.num_tokens_without_windows < MAX_LEN <= plan.num_tokens
        assert answers(llm) == expected
        scheduler = llm.llm_engine._scheduler  # type: ignore[attr-defined]
        scheduler.check_invariants()
        assert scheduler.cache_usage() == 0.0
