"""Every family through the whole engine, against transformers' eager attention in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagemill import LLM, SamplingParams
from tests.models.test_families import NUM_TOKENS, PROMPTS
from tests.models.tiny import TINY, save_tiny


@pytest.mark.parametrize("name", TINY)
def test_the_engine_gives_the_tokens_and_logprobs_of_transformers(name, tmp_path: Path) -> None:
    theirs = save_tiny(TINY[name], tmp_path)
    engine = LLM(
        str(tmp_path),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=4,
        max_num_batched_tokens=16,  # prompts of 20 and 41 tokens come in chunks beside decodes
        max_num_seqs=3,
        kv_cache_memory_bytes=2**20,
        disable_log_stats=True,
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, detokenize=False
    )
    with engine as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        [sample] = output.outputs
        made = list(sample.token_ids)
        assert len(made) == NUM_TOKENS
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + made[:-1]]), use_cache=False).logits[0]
        expected = logits[len(prompt) - 1 :].log_softmax(-1)
        assert made == expected.argmax(-1).tolist()
        given = [entry[token].logprob for entry, token in zip(sample.logprobs, made, strict=True)]
        picked = expected[torch.arange(NUM_TOKENS), torch.tensor(made)]
        torch.testing.assert_close(torch.tensor(given), picked, atol=1e-4, rtol=0)
