"""The step of a rank, over the fake model whose answer depends on every cached token."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.messages import (
    BlockMoves,
    NewSequence,
    SamplingSpec,
    ScheduledSequence,
    SchedulerOutput,
    SequenceOutput,
    StepOutput,
    TokenScores,
)
from tests.fakes.fake_model import FakeCausalLM, FakeExecutor, fake_config

GREEDY = SamplingSpec(temperature=0.0)
PROMPTS = [
    tuple(b"Hello, my name is"),
    tuple(b"The capital"),
    tuple(b"x"),
    tuple(b"0123456789" * 4),
]
BLOCK_SIZE = 4


class Driver:
    """A plain stand-in for the scheduler: gives blocks, counts, and collects tokens."""

    def __init__(self, **config: Any) -> None:
        self.executor = FakeExecutor(fake_config(block_size=BLOCK_SIZE, **config))
        self.free = list(range(self.executor.memory_plan.num_blocks))
        self.tokens: dict[int, list[int]] = {}
        self.specs: dict[int, SamplingSpec] = {}
        self.prompt_lengths: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.fresh: set[int] = set()
        self.removed: list[int] = []
        self.copies: list[tuple[int, int]] = []
        self.prompt_scores: dict[int, list[TokenScores]] = {}
        self.steps = 0

    def add(self, seq_id: int, prompt: tuple[int, ...], spec: SamplingSpec = GREEDY) -> None:
        self.tokens[seq_id] = list(prompt)
        self.specs[seq_id] = spec
        self.prompt_lengths[seq_id] = len(prompt)
        self.computed[seq_id] = 0
        self.tables[seq_id] = []
        self.fresh.add(seq_id)
        self.prompt_scores[seq_id] = []

    def remove(self, seq_id: int) -> None:
        self.free += self.tables.pop(seq_id)
        self.removed.append(seq_id)

    def preempt(self, seq_id: int) -> None:
        self.remove(seq_id)
        self.computed[seq_id] = 0
        self.tables[seq_id] = []
        self.fresh.add(seq_id)

    def step(self, chunks: dict[int, int], samples: int = 1) -> dict[int, SequenceOutput]:
        """Compute up to chunks[seq_id] tokens of each sequence, in the order given."""
        new, parts = [], []
        for seq_id, chunk in chunks.items():
            known, done = self.tokens[seq_id], self.computed[seq_id]
            count = min(chunk, len(known) - done)
            table = self.tables[seq_id]
            start = 0 if seq_id in self.fresh else len(table)
            while len(table) * BLOCK_SIZE < done + count:
                table.append(self.free.pop())
            if seq_id in self.fresh:
                new.append(
                    NewSequence(
                        seq_id,
                        f"r{seq_id}",
                        tuple(known),
                        self.prompt_lengths[seq_id],
                        0,
                        self.specs[seq_id],
                    )
                )
            owed = None
            scored = len(self.prompt_scores[seq_id])
            if self.specs[seq_id].prompt_logprobs is not None:
                owed = 1 + scored if 1 + scored < self.prompt_lengths[seq_id] else None
            reaches = done + count == len(known)
            parts.append(
                ScheduledSequence(
                    seq_id,
                    done,
                    count,
                    start,
                    tuple(table[start:]),
                    samples if reaches else 0,
                    owed,
                )
            )
            self.computed[seq_id] = done + count
        self.fresh -= set(chunks)
        result = self._execute(new, parts)
        for output in result.sequences:
            if output.tokens:
                self.tokens[output.seq_id] += output.tokens[0]
            self.prompt_scores[output.seq_id] += output.prompt_scores
        return {output.seq_id: output for output in result.sequences}

    def _execute(self, new: list[NewSequence], parts: list[ScheduledSequence]) -> StepOutput:
        step = SchedulerOutput(
            step_id=self.steps,
            scheduled=tuple(parts),
            new_sequences=tuple(new),
            removed_seq_ids=tuple(self.removed),
            block_moves=BlockMoves(tuple(self.copies)),
        )
        self.steps += 1
        self.removed, self.copies = [], []
        result = self.executor.execute(step)
        assert result.step_id == step.step_id
        assert [s.seq_id for s in result.sequences] == [p.seq_id for p in parts]
        return result

    def run(self, seq_id: int, count: int, chunk: int = 1000) -> list[int]:
        """Step one sequence alone until it has `count` new tokens; return them."""
        length = self.prompt_lengths[seq_id] + count
        while len(self.tokens[seq_id]) < length:
            self.step({seq_id: chunk})
        return self.tokens[seq_id][self.prompt_lengths[seq_id] :]


def alone(prompt: tuple[int, ...], spec: SamplingSpec, count: int) -> list[int]:
    driver = Driver()
    driver.add(0, prompt, spec)
    return driver.run(0, count)


SPECS = [
    GREEDY,
    SamplingSpec(temperature=1.5, seed=3),
    SamplingSpec(temperature=2.0, top_p=0.9, seed=-4, repetition_penalty=1.2, prompt_logprobs=2),
    SamplingSpec(temperature=0.0, frequency_penalty=1.0, logprobs=2),
]


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32))
def test_tokens_do_not_depend_on_chunks_order_or_preemption(seed: int) -> None:
    rng = random.Random(seed)
    driver = Driver()
    for i, prompt in enumerate(PROMPTS):
        driver.add(i, prompt, SPECS[i])
    goal = 8
    while any(len(driver.tokens[i]) < len(p) + goal for i, p in enumerate(PROMPTS)):
        ids = rng.sample(range(len(PROMPTS)), rng.randint(1, len(PROMPTS)))
        if rng.random() < 0.1 and ids[0] not in driver.fresh:
            driver.preempt(ids[0])
        driver.step({i: rng.choice([1, 3, 7, 99]) for i in ids})
    for i, prompt in enumerate(PROMPTS):
        got = driver.tokens[i][len(prompt) : len(prompt) + goal]
        assert got == EXPECTED[i]


EXPECTED = [alone(prompt, SPECS[i], 8) for i, prompt in enumerate(PROMPTS)]


def test_fake_model_reads_every_cached_token() -> None:
    base = alone(PROMPTS[0], GREEDY, 6)
    changed = (PROMPTS[0][0] + 1, *PROMPTS[0][1:])
    assert alone(changed, GREEDY, 6) != base
    driver = Driver()
    driver.add(0, PROMPTS[0])
    driver.step({0: 99})
    driver.executor.runner._table.block_tables[0, 0] = driver.free[0]
    assert driver.run(0, 6) != base


def test_rows_of_removed_sequences_go_even_in_an_empty_step() -> None:
    driver = Driver()
    driver.add(0, PROMPTS[0])
    driver.step({0: 99})
    driver.remove(0)
    assert driver.step({}) == {}
    assert len(driver.executor.runner._table) == 0


def test_removing_an_unknown_sequence_is_harmless() -> None:
    driver = Driver()
    driver.add(0, PROMPTS[0])
    driver.removed = [77]
    assert driver.run(0, 3) == alone(PROMPTS[0], GREEDY, 3)


def test_forked_sample_goes_on_from_copied_blocks() -> None:
    spec = SamplingSpec(temperature=2.0, seed=9)
    driver = Driver()
    driver.add(0, PROMPTS[0], spec)
    first = driver.step({0: 99}, samples=3)[0]
    assert len(first.tokens) == 3
    prompt_blocks = list(driver.tables[0])
    for index in (1, 2):
        driver.add(index, PROMPTS[0], dataclasses.replace(spec))
        driver.tokens[index] += first.tokens[index]
        driver.computed[index] = len(PROMPTS[0])
        own = driver.free.pop()
        driver.copies.append((prompt_blocks[-1], own))
        driver.tables[index] = [*prompt_blocks[:-1], own]
    driver.step({0: 1, 1: 1, 2: 1})
    for index in (1, 2):
        # the same tokens as a sequence computed from nothing, whose sample index is 0 in this driver
        fresh = Driver()
        fresh.add(0, (*PROMPTS[0], *first.tokens[index]), spec)
        assert driver.tokens[index][-1] == fresh.run(0, 1)[0]


def test_the_model_is_asked_for_the_rows_that_need_logits_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[list[int] | None] = []
    inner = FakeCausalLM.forward

    def forward(self: Any, ids: Any, positions: Any, attend: Any, rows: Any = None) -> Any:
        asked.append(None if rows is None else rows.tolist())
        return inner(self, ids, positions, attend, rows)

    monkeypatch.setattr(FakeCausalLM, "forward", forward)
    driver = Driver()
    driver.add(0, PROMPTS[3])
    driver.add(1, PROMPTS[1])
    driver.step({0: 9})  # nobody samples: a chunk in the middle
    driver.step({1: 99, 0: 9})  # one does
    driver.step({1: 99, 0: 99})
    driver.step({1: 1, 0: 1})  # every token has its row
    driver.add(2, PROMPTS[0], SamplingSpec(temperature=0.0, prompt_logprobs=1))
    driver.step({1: 1, 2: 5})  # scores of a prompt: hidden states of all
    last = len(PROMPTS[3]) - 18
    assert asked == [[], [len(PROMPTS[1]) - 1], [0, last], None, None]


def test_prompt_logprobs_do_not_depend_on_chunks() -> None:
    spec = SamplingSpec(temperature=0.0, prompt_logprobs=3)
    results = []
    for chunk in (1, 4, 7, 99):
        driver = Driver(max_num_seqs=3)  # scored three rows at a time
        driver.add(0, PROMPTS[3], spec)
        driver.run(0, 2, chunk)
        results.append(driver.prompt_scores[0])
    assert [s.token_id for s in results[0]] == list(PROMPTS[3][1:])
    assert all(len(s.top_ids) == 3 for s in results[0])
    assert all(r == results[0] for r in results)


def test_prompt_logprobs_equal_those_of_generation() -> None:
    driver = Driver()
    driver.add(0, PROMPTS[1], SamplingSpec(temperature=0.0, logprobs=2))
    outputs = []
    for _ in range(5):
        outputs.append(driver.step({0: 99})[0])
    generated = [o.scores[0][0] for o in outputs]
    again = Driver()
    again.add(0, tuple(driver.tokens[0]), SamplingSpec(temperature=0.0, prompt_logprobs=2))
    again.step({0: 9999})
    assert again.prompt_scores[0][-5:] == generated


def test_delivered_prompt_logprobs_are_not_sent_again() -> None:
    driver = Driver()
    driver.add(0, PROMPTS[3], SamplingSpec(temperature=0.0, prompt_logprobs=0))
    driver.step({0: 10})
    assert len(driver.prompt_scores[0]) == 10
    driver.preempt(0)
    driver.step({0: 99})
    assert [s.token_id for s in driver.prompt_scores[0]] == list(PROMPTS[3][1:])


def test_failing_processor_leaves_the_others_alone() -> None:
    def fail(token_ids: list[int], logits: Any) -> Any:
        raise KeyError("broken")

    driver = Driver()
    driver.add(0, PROMPTS[0])
    driver.add(1, PROMPTS[1], SamplingSpec(logits_processors=(fail,)))
    driver.add(2, PROMPTS[2])
    outputs = driver.step({0: 99, 1: 99, 2: 99})
    assert outputs[1].tokens == () and "KeyError" in (outputs[1].error or "")
    driver.remove(1)
    for _ in range(3):
        driver.step({2: 1, 0: 1})
    for i in (0, 2):
        assert driver.tokens[i] == [*PROMPTS[i], *alone(PROMPTS[i], GREEDY, 4)]


def test_overflow_in_a_prompt_is_an_error_of_its_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    real = FakeCausalLM.logits

    def overflowing(self: FakeCausalLM, hidden: torch.Tensor) -> torch.Tensor:
        logits = real(self, hidden)
        logits[hidden[:, -1] == ord("!")] = float("nan")
        return logits

    monkeypatch.setattr(FakeCausalLM, "logits", overflowing)
    driver = Driver()
    driver.add(0, tuple(b"ab!cd"), SamplingSpec(temperature=0.0, prompt_logprobs=0))
    driver.add(1, tuple(b"ab!"))
    driver.add(2, tuple(b"abc"))
    outputs = driver.step({0: 99, 1: 99, 2: 99})
    assert "float32" in (outputs[0].error or "") and "float32" in (outputs[1].error or "")
    assert outputs[2].error is None and len(outputs[2].tokens) == 1


def test_timings_are_given_by_part() -> None:
    driver = Driver()
    driver.add(0, PROMPTS[0])
    part = ScheduledSequence(0, 0, 1, 0, (5,), 0)
    new = NewSequence(0, "r", PROMPTS[0], len(PROMPTS[0]), 0, GREEDY)
    result = driver._execute([new], [part])
    assert set(result.timings_s) == {"prepare", "model", "sample"}
    assert result.sequences[0].tokens == ()


def test_many_sequences_at_once_are_each_as_if_alone() -> None:
    count = 40  # more than the table's first rows
    driver = Driver(num_blocks=1024, max_num_seqs=64)
    prompts = [tuple((7 * i + j) % 256 for j in range(1 + i % 9)) for i in range(count)]
    for i, prompt in enumerate(prompts):
        driver.add(i, prompt)
    for _ in range(4):
        driver.step(dict.fromkeys(range(count), 99))
    for i in (0, 13, count - 1):
        assert driver.tokens[i][len(prompts[i]) :] == alone(prompts[i], GREEDY, 4)
