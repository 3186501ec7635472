"""Every family against transformers' eager attention in float32."""

from __future__ import annotations

import pytest
import torch

from tests.models.conftest import load
from tests.models.driver import generate
from tests.models.tiny import TINY

# Mixed lengths; the windows of 8 and 11 are crossed inside the longer prompts, by the middle ones
# while decoding, and not yet filled by the first.
LENGTHS = (1, 5, 7, 20, 41)
NUM_TOKENS = 24
PROMPTS = [
    torch.randint(3, 151, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in LENGTHS
]


def assert_same(runs, theirs) -> None:
    """Check tokens and logprobs against one forward pass of transformers over prompt and tokens.

    Position by position, transformers' argmax after the same tokens must be the token that was made:
    so its own greedy continuation is the same.
    """
    for run, prompt in zip(runs, PROMPTS, strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor([run.token_ids[:-1]]), use_cache=False).logits[0]
        rows = logits[len(prompt) - 1 :].float()
        assert run.new_ids == rows.argmax(-1).tolist()
        picked = rows.log_softmax(-1)[torch.arange(len(rows)), torch.tensor(run.new_ids)]
        torch.testing.assert_close(torch.tensor(run.logprobs), picked, atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, 16, None], ids=lambda c: f"chunk-{c or 'whole'}")
@pytest.mark.parametrize("name", TINY)
def test_greedy_tokens_and_logprobs_equal_transformers(name, chunk, tiny_pair) -> None:
    folder, theirs = tiny_pair(name)
    assert_same(generate(load(folder), PROMPTS, NUM_TOKENS, chunk=chunk), theirs)


@pytest.mark.parametrize("name", TINY)
def test_a_sequence_alone_makes_the_same_tokens_as_in_a_batch(name, tiny_pair) -> None:
    model = load(tiny_pair(name)[0])
    together = generate(model, PROMPTS, NUM_TOKENS)
    for run, prompt in zip(together, PROMPTS, strict=True):
        assert generate(model, [prompt], NUM_TOKENS)[0].new_ids == run.new_ids


@pytest.mark.parametrize("name", TINY)
def test_the_tokens_vary(name, tiny_pair) -> None:
    """A model that repeats one token whatever it reads would prove nothing above."""
    runs = generate(load(tiny_pair(name)[0]), PROMPTS, NUM_TOKENS)
    assert all(len(set(run.new_ids)) >= 4 for run in runs[1:])
    assert len({tuple(run.new_ids) for run in runs}) == len(runs)
