"""Speculation changes the number of steps and nothing else: tokens and logprobs are the same bits.

Random requests, with every sampling parameter, run on the fake model: its arithmetic is exact. Drafts come
from a proposer that was told the answers and is wrong now and then, so that runs of every length occur.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.config import SpeculativeConfig
from pagemill.core.step_results import StepResults
from pagemill.engine.llm_engine import LLMEngine
from pagemill.outputs import RequestOutput
from pagemill.sampling_params import RequestOutputKind, SamplingParams
from tests.e2e.test_same_answer import ENGINE_SHAPES, MAX_LEN, run, said, sampled_requests
from tests.fakes.byte_tokenizer import ByteTokenizer
from tests.fakes.fake_model import FakeExecutor, fake_config
from tests.fakes.knowing_proposer import KnowingProposer

REPEATING = SpeculativeConfig(
    method="ngram",
    num_speculative_tokens=4,
    adaptive_length=False,
    options={"prompt_lookup_min": 1, "prompt_lookup_max": 3},
)
FINAL = RequestOutputKind.FINAL_ONLY


def engine_and_executor(
    speculative: SpeculativeConfig | None, proposer: KnowingProposer | None = None, **fields: Any
) -> tuple[LLMEngine, FakeExecutor]:
    shape = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "num_blocks": 200}
    config = fake_config(**{"max_model_len": MAX_LEN, **shape, **fields}, speculative=speculative)
    executor = FakeExecutor(config, proposer)
    return LLMEngine(config, executor, ByteTokenizer()), executor


def answers_known(
    requests: list[Any], outputs: list[RequestOutput]
) -> dict[tuple[tuple[int, ...], int, int], list[int]]:
    known = {}
    for (prompt, _), output in zip(requests, outputs, strict=True):
        for sample in output.outputs:
            assert sample.seed is not None
            known[(tuple(prompt), sample.seed, sample.index)] = sample.token_ids
    return known


@settings(deadline=None, max_examples=8)
@given(
    st.lists(sampled_requests(), min_size=2, max_size=6),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([0.0, 0.2, 0.6]),
    st.booleans(),
    st.sampled_from(ENGINE_SHAPES),
)
def test_a_request_says_the_same_with_and_without(
    requests: list[Any], length: int, wrong: float, adaptive: bool, shape: dict[str, Any]
) -> None:
    plain = [run(engine_and_executor(None)[0], [request])[0] for request in requests]
    alone = [said(output) for output in plain]
    known = answers_known(requests, plain)
    config = dataclasses.replace(REPEATING, num_speculative_tokens=length, adaptive_length=adaptive)
    engine, _ = engine_and_executor(config, KnowingProposer(known, wrong=wrong), **shape)
    # The second time whatever the first one left is found.
    for _ in range(2 if shape.get("enable_prefix_caching") else 1):
        assert [said(output) for output in run(engine, requests)] == alone


def test_right_drafts_save_steps() -> None:
    request = ([65] * 5, SamplingParams(seed=3, max_tokens=41, output_kind=FINAL))
    engine, executor = engine_and_executor(None)
    [plain] = run(engine, [request])
    assert len(executor.steps) == 41
    proposer = KnowingProposer(answers_known([request], [plain]), wrong=0.0)
    engine, executor = engine_and_executor(REPEATING, proposer)
    assert said(run(engine, [request])[0]) == said(plain)
    assert len(executor.steps) == 1 + 40 / 5  # the prompt, then 5 tokens a step


def test_n_gram_look_up_saves_steps_where_the_text_repeats() -> None:
    """The model goes through its 95 characters over and over: the second round is known."""
    request = (list(b"A"), SamplingParams(temperature=0.0, max_tokens=295, output_kind=FINAL))
    counts = []
    for speculative in (None, REPEATING):
        engine, executor = engine_and_executor(
            speculative, hf_config={"fake_mode": "successor"}, max_model_len=300
        )
        outputs = run(engine, [request])
        counts.append((len(executor.steps), said(outputs[0])))
    assert counts[0][1] == counts[1][1]
    assert counts[0][0] == 295
    assert counts[1][0] == 95 + 200 / 5


def test_adaptive_lengths_fall_to_none_where_every_draft_is_wrong() -> None:
    request = ([65] * 5, SamplingParams(seed=3, max_tokens=290, output_kind=FINAL))
    [plain] = run(engine_and_executor(None, max_model_len=300)[0], [request])
    known = answers_known([request], [plain])
    counts = {}
    for adaptive in (False, True):
        engine, executor = engine_and_executor(
            dataclasses.replace(REPEATING, adaptive_length=adaptive),
            KnowingProposer(known, wrong=1.0),
            max_model_len=300,
        )
        assert said(run(engine, [request])[0]) == said(plain)
        shares = [share for step in executor.steps for share in step.scheduled]
        counts[adaptive] = sum(share.num_drafts for share in shares)
    assert counts[False] > 4 * 280
    assert counts[True] < 80  # some at first, and two every 32 steps


def test_no_draft_goes_past_what_a_request_may_still_say() -> None:
    request = ([65] * 5, SamplingParams(seed=3, max_tokens=4, output_kind=FINAL))
    [plain] = run(engine_and_executor(None)[0], [request])
    proposer = KnowingProposer(answers_known([request], [plain]), wrong=0.0)
    engine, executor = engine_and_executor(REPEATING, proposer)
    run(engine, [request])
    drafts = [share.num_drafts for step in executor.steps for share in step.scheduled]
    assert drafts == [0, 2]  # the prompt gives the first token; two drafts and one more are three


def asked_again(wrong: float) -> tuple[RequestOutput, RequestOutput]:
    """Ask for what follows an answer of 30 tokens that a stop token ended, and one token more.

    In the engine that gave the answer, and in a fresh one.
    """
    prompt, free = [65] * 6, SamplingParams(seed=3, max_tokens=30, output_kind=FINAL)
    [plain] = run(engine_and_executor(None)[0], [(prompt, free)])
    told = plain.outputs[0].token_ids
    assert told[-1] not in told[:-1]
    known = answers_known([(prompt, free)], [plain])
    stopping = dataclasses.replace(free, max_tokens=60, stop_token_ids=[told[-1]])
    engine, _ = engine_and_executor(
        REPEATING, KnowingProposer(known, wrong=wrong), enable_prefix_caching=True
    )
    [stopped] = run(engine, [(prompt, stopping)])
    assert stopped.outputs[0].token_ids == told
    again = ([*prompt, *told, 66], SamplingParams(seed=3, max_tokens=9, output_kind=FINAL))
    [cold] = run(engine_and_executor(None)[0], [again])
    [warm] = run(engine, [again])
    return warm, cold


@pytest.mark.parametrize(("wrong", "num_found"), [(0.0, 36), (1.0, 32)])
def test_accepted_tokens_are_found_in_the_cache_and_a_last_sampled_one_is_not(
    wrong: float, num_found: int
) -> None:
    """Of 36 tokens the last was an accepted draft, or was sampled and never computed."""
    warm, cold = asked_again(wrong)
    assert warm.num_cached_tokens == num_found
    assert said(warm) == said(cold)


def test_a_block_named_before_its_last_token_is_computed_would_be_seen() -> None:
    """A rejected draft's keys lie in the slot of the token that was sampled in its place."""
    before = StepResults._settle_drafts

    def settle(self: StepResults, sequence: Any, share: Any, num_accepted: int) -> None:
        before(self, sequence, share, num_accepted)
        blocks = self._roster.blocks
        held = len(blocks.table(sequence.seq_id)) * blocks.block_size
        blocks.seal(sequence, share.num_computed, min(held, sequence.num_tokens))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepResults, "_settle_drafts", settle)
        warm, cold = asked_again(wrong=1.0)
    assert warm.num_cached_tokens == 36
    assert said(warm) != said(cold)
