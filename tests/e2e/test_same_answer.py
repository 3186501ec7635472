"""One request, one answer: alone, in a batch, in chunks, after preemptions, by any executor.

Greedy requests run on a tiny random Llama in float32. Sampled ones run on the fake model, whose
arithmetic is exact, so that not even a last bit may differ: there tokens and logprobs are equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.engine.llm_engine import LLMEngine
from pagemill.engine.resolve import resolve
from pagemill.engine_args import EngineArgs
from pagemill.executor.in_process import InProcessExecutor
from pagemill.llm import LLM
from pagemill.outputs import RequestOutput
from pagemill.sampling_params import RequestOutputKind, SamplingParams
from tests.fakes.byte_tokenizer import ByteTokenizer
from tests.fakes.fake_model import FakeExecutor, fake_config, save_tiny_llama

MAX_LEN = 96
ENGINE_SHAPES = [
    {"max_num_batched_tokens": 64, "max_num_seqs": 8},
    {"max_num_batched_tokens": 7, "max_num_seqs": 3},  # chunks
    {"max_num_batched_tokens": 1, "max_num_seqs": 2},  # the smallest chunks there are
    {"max_num_batched_tokens": 64, "max_num_seqs": 8, "num_blocks": 27},  # preemptions
    {"max_num_batched_tokens": 64, "max_num_seqs": 8, "enable_prefix_caching": True},
    {
        "max_num_batched_tokens": 9,
        "max_num_seqs": 4,
        "num_blocks": 27,
        "enable_prefix_caching": True,
    },
]
STEM = [65 + i % 26 for i in range(40)]


def run(engine: LLMEngine, requests: Sequence[tuple[Any, SamplingParams]]) -> list[RequestOutput]:
    """Serve all requests together; return their final outputs in order, and check the pool."""
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(str(index), prompt, params)
    finals: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            finals[output.request_id] = output
        engine._scheduler.check_invariants()
    assert engine._scheduler.cache_usage() == 0.0
    return [finals[str(index)] for index in range(len(requests))]


def said(output: RequestOutput) -> list[tuple[Any, ...]]:
    """Return everything of an output that must not depend on its company."""
    return [
        (o.index, o.text, o.token_ids, o.logprobs, o.finish_reason, o.stop_reason, o.seed)
        for o in output.outputs
    ] + [(output.prompt_logprobs, output.error)]


# ------------------------------------------------------------ sampled, exact arithmetic


def fake_engine(
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 8,
    num_blocks: int = 200,
    enable_prefix_caching: bool = False,
) -> LLMEngine:
    config = fake_config(
        max_model_len=MAX_LEN,
        num_blocks=num_blocks,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=enable_prefix_caching,
    )
    return LLMEngine(config, FakeExecutor(config), ByteTokenizer())


@st.composite
def sampled_requests(draw: st.DrawFn) -> tuple[list[int], SamplingParams]:
    stem = STEM[: draw(st.integers(0, 30))]  # what requests have in common
    tail = st.lists(st.integers(32, 126), min_size=not stem, max_size=40 - len(stem))
    prompt = [*stem, *draw(tail)]
    greedy = draw(st.booleans())
    fields: dict[str, Any] = {
        "temperature": 0.0 if greedy else draw(st.sampled_from([0.3, 1.0, 3.0])),
        "n": 1 if greedy else draw(st.integers(1, 3)),
        "seed": draw(st.integers(0, 3)),
        "max_tokens": draw(st.integers(1, 40)),
        "top_p": draw(st.sampled_from([1.0, 0.5])),
        "top_k": draw(st.sampled_from([0, 5])),
        "min_p": draw(st.sampled_from([0.0, 0.05])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.5])),
        "frequency_penalty": draw(st.sampled_from([0.0, 1.0])),
        "presence_penalty": draw(st.sampled_from([0.0, -1.0])),
        "logprobs": draw(st.sampled_from([None, 3])),
        "prompt_logprobs": draw(st.sampled_from([None, 1])),
        "stop": draw(st.sampled_from([[], ["a"], ["b c", "Q"]])),
        "stop_token_ids": draw(st.sampled_from([[], [ord("m")]])),
        "bad_words": draw(st.sampled_from([[], ["e", "xy"]])),
        "logit_bias": draw(st.sampled_from([None, {ord("z"): 5.0}])),
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    fields["min_tokens"] = draw(st.integers(0, min(5, fields["max_tokens"])))
    return prompt, SamplingParams(**fields)


@settings(deadline=None, max_examples=25)
@given(st.lists(sampled_requests(), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_a_request_says_the_same_in_any_company(requests: list[Any], random: Any) -> None:
    alone = [said(run(fake_engine(), [request])[0]) for request in requests]
    for shape in ENGINE_SHAPES:
        order = list(range(len(requests)))
        random.shuffle(order)
        engine = fake_engine(**shape)
        # The second time whatever the first one left is found.
        for _ in range(2 if shape.get("enable_prefix_caching") else 1):
            outputs = run(engine, [requests[i] for i in order])
            assert [said(output) for output in outputs] == [alone[i] for i in order]


def test_preemption_really_happened_in_the_smallest_pool() -> None:
    """The property above would hold for no reason if its pool were large enough."""
    engine = fake_engine(**ENGINE_SHAPES[3])
    params = SamplingParams(seed=1, n=2, max_tokens=40, output_kind=RequestOutputKind.FINAL_ONLY)
    outputs = run(engine, [([65 + i] * 30, params) for i in range(4)])
    assert sum(o.metrics.num_preemptions for o in outputs if o.metrics) > 0


def test_a_warm_cache_really_saves_the_computation() -> None:
    engine = fake_engine(enable_prefix_caching=True)
    params = SamplingParams(max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY)
    cold, warm = (run(engine, [(STEM, params)] * 3) for _ in range(2))
    assert [output.num_cached_tokens for output in cold] == [0, 36, 36]
    assert [output.num_cached_tokens for output in warm] == [36, 36, 36]
    assert engine.reset_prefix_cache()
    assert run(engine, [(STEM, params)])[0].num_cached_tokens == 0


# ------------------------------------------------------------ greedy, a real model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


PROMPTS = ["a", "The capital", "x" * 37, "one two three four five six seven", "zz" * 20, "é"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2, prompt_logprobs=1)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[list[RequestOutput]]:
    with LLM(str(folder), max_model_len=MAX_LEN, kv_cache_memory_bytes=1 << 20) as llm:
        yield [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]


def same(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for output, other in zip(outputs, expected, strict=True):
        ours, theirs = output.outputs[0], other.outputs[0]
        assert ours.token_ids == theirs.token_ids
        assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)
        pairs = zip(ours.logprobs or [], theirs.logprobs or [], strict=True)
        for one, two in pairs:
            chosen = next(iter(one))
            assert one[chosen].logprob == pytest.approx(two[chosen].logprob, abs=1e-4)
        assert len(output.prompt_logprobs or []) == len(other.prompt_logprobs or [])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 16, "block_size": 1},
        {"max_num_seqs": 2, "block_size": 256},
        {"distributed_executor_backend": "multi_process"},
        {"enable_prefix_caching": False},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())) or "default",
)
def test_greedy_tokens_are_equal_in_any_batch(
    folder: Path, alone: list[RequestOutput], fields: dict[str, Any]
) -> None:
    memory = 1 << 20
    with LLM(
        str(folder), max_model_len=MAX_LEN, kv_cache_memory_bytes=memory, debug=True, **fields
    ) as llm:
        same(llm.generate(PROMPTS, GREEDY, use_tqdm=False), alone)


def test_greedy_tokens_are_equal_after_preemptions(
    folder: Path, alone: list[RequestOutput]
) -> None:
    args = EngineArgs(model=str(folder), max_model_len=MAX_LEN, block_size=4, debug=True)
    block_bytes = 2 * 2 * 2 * 16 * 4 * 4  # K and V, layers, heads, head_dim, float32, tokens
    config = resolve(dataclasses.replace(args, kv_cache_memory_bytes=26 * block_bytes))
    engine = LLMEngine(config, InProcessExecutor(config), ByteTokenizer())
    outputs = run(engine, [(list(prompt.encode()), GREEDY) for prompt in PROMPTS])
    same(outputs, alone)
    assert sum(o.metrics.num_preemptions for o in outputs if o.metrics) > 0
