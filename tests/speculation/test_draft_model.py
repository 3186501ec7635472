"""A draft model follows the target's blocks: the target as its own draft model is always right.

The fake model's tokens depend on every token before them, read back through the cache: one slot that holds
another text, or was never written, and a draft is wrong.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.batch.kv_store import KVStore
from pagemill.config import EngineConfig, SpeculativeConfig
from pagemill.device.cpu import CPUDevice
from pagemill.engine.llm_engine import LLMEngine
from pagemill.engine.stats import count_drafts
from pagemill.messages import DraftCounts, SchedulerOutput, StepOutput
from pagemill.sampling.sampler import Sampler
from pagemill.sampling_params import RequestOutputKind, SamplingParams
from pagemill.speculation.base import RankParts
from pagemill.speculation.draft_model import DraftModelProposer
from tests.e2e.test_same_answer import ENGINE_SHAPES, MAX_LEN, run, said, sampled_requests
from tests.fakes.byte_tokenizer import ByteTokenizer
from tests.fakes.fake_model import FakeCausalLM, FakeExecutor, NaiveAttention, fake_config

CONFIG = SpeculativeConfig(
    method="draft_model", num_speculative_tokens=3, adaptive_length=False, options={}
)


def make_proposer(
    config: EngineConfig, *, mode: str = "hash", max_model_len: int = MAX_LEN
) -> DraftModelProposer:
    backend, device = NaiveAttention(), CPUDevice()
    model: Any = FakeCausalLM({"fake_mode": mode})
    num_blocks = config.cache.num_blocks
    assert num_blocks is not None
    sampler = Sampler(dtype="float32", logprobs_mode="raw_logprobs")
    rank = RankParts(backend, sampler, device.torch_device, "torch", num_blocks, lambda model: None)
    kv = KVStore(
        backend, model.attention_specs, num_blocks=num_blocks, dtype=torch.float32,
        block_size=config.cache.block_size, device=device.torch_device,
    )  # fmt: skip
    return DraftModelProposer(
        model, kv, rank, max_model_len=max_model_len,
        max_num_tokens=config.scheduler.max_num_batched_tokens,
    )  # fmt: skip


class CountingExecutor(FakeExecutor):
    """Keeps what the drafts of each step came to."""

    def __init__(self, config: EngineConfig, proposer: DraftModelProposer) -> None:
        super().__init__(config, proposer)
        self.counts: list[DraftCounts] = []

    def execute(self, scheduled: SchedulerOutput) -> StepOutput:
        result = super().execute(scheduled)
        self.counts.append(count_drafts(result))
        return result

    def totals(self) -> tuple[int, int]:
        return sum(c.num_drafted for c in self.counts), sum(c.num_accepted for c in self.counts)


def make_engine(
    adaptive: bool = False, mode: str = "hash", draft_len: int = MAX_LEN, **shape: Any
) -> tuple[LLMEngine, CountingExecutor]:
    fields = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "num_blocks": 200, **shape}
    speculative = dataclasses.replace(CONFIG, adaptive_length=adaptive)
    config = fake_config(max_model_len=MAX_LEN, speculative=speculative, **fields)
    executor = CountingExecutor(config, make_proposer(config, mode=mode, max_model_len=draft_len))
    return LLMEngine(config, executor, ByteTokenizer()), executor


@settings(deadline=None, max_examples=6)
@given(
    st.lists(sampled_requests(), min_size=2, max_size=6),
    st.booleans(),
    st.sampled_from(ENGINE_SHAPES),
)
def test_the_target_as_its_own_draft_model_is_always_right(
    requests: list[Any], adaptive: bool, shape: dict[str, Any]
) -> None:
    plain = fake_config(max_model_len=MAX_LEN, num_blocks=200)
    alone = [
        said(run(LLMEngine(plain, FakeExecutor(plain), ByteTokenizer()), [request])[0])
        for request in requests
    ]
    engine, executor = make_engine(adaptive, **shape)
    for _ in range(2 if shape.get("enable_prefix_caching") else 1):
        assert [said(output) for output in run(engine, requests)] == alone
    drafted, accepted = executor.totals()
    assert accepted == drafted


FINAL = RequestOutputKind.FINAL_ONLY


def test_a_long_prompt_is_made_up_for_over_several_steps_before_drafts_begin() -> None:
    engine, executor = make_engine(max_num_batched_tokens=9)
    run(engine, [([65] * 50, SamplingParams(seed=1, max_tokens=20, output_kind=FINAL))])
    drafted, accepted = executor.totals()
    assert accepted == drafted > 0
    first = next(i for i, c in enumerate(executor.counts) if c.num_drafts)
    assert 6 + 3 < first < 6 + 8  # 6 chunks of the prompt, then as many of the draft model's


def test_another_model_s_drafts_are_rejected_and_nothing_changes() -> None:
    request = ([65] * 20, SamplingParams(seed=1, max_tokens=30, output_kind=FINAL))
    outputs = []
    for mode in ("hash", "successor"):
        engine, executor = make_engine(mode=mode)
        outputs.append(said(run(engine, [request])[0]))
        drafted, accepted = executor.totals()
        assert drafted > 0
        assert (accepted == drafted) == (mode == "hash")
    assert outputs[0] == outputs[1]


def test_a_draft_model_with_a_shorter_context_drafts_as_far_as_it_goes() -> None:
    request = ([65] * 20, SamplingParams(seed=1, max_tokens=60, output_kind=FINAL))
    engine, executor = make_engine(draft_len=40)
    run(engine, [request])
    drafted, accepted = executor.totals()
    assert 0 < accepted == drafted <= 20


def test_what_the_target_writes_anew_is_forgotten_from_the_first_slot_on() -> None:
    engine, executor = make_engine()
    request = ([65] * 6, SamplingParams(seed=1, max_tokens=9, output_kind=FINAL))
    engine.add_request("r", *request)
    for _ in range(2):
        engine.step()
    proposer = executor.runner._drafter._proposer  # type: ignore[union-attr]
    assert isinstance(proposer, DraftModelProposer)
    # 7 known tokens and three drafts, of which the last is proposed and not computed.
    assert sorted(proposer.filled[np.flatnonzero(proposer.filled)].tolist()) == [1, 4, 4]
