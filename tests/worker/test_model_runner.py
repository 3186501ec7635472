"""The step of a rank, over the fake model whose answer depends on every cached token."""

from __future__ import annotations

from pagemill.messages import (
    NewSequence,
    SamplingSpec,
    ScheduledSequence,
    SchedulerOutput,
)
from tests.fakes.fake_model import FakeExecutor, fake_config

GREEDY = SamplingSpec(temperature=0.0)
PROMPT = tuple(b"Hello, my name is")


def test_runs_of_tokens_survive_chunks() -> None:
    whole = generate(PROMPT, GREEDY, 8, [len(PROMPT)])
    assert generate(PROMPT, GREEDY, 8, [1] * len(PROMPT)) == whole
    assert generate(PROMPT, GREEDY, 8, [7, 7, 3]) == whole


def generate(
    prompt: tuple[int, ...], spec: SamplingSpec, count: int, chunks: list[int]
) -> list[int]:
    executor = FakeExecutor(fake_config())
    blocks = tuple(range(40, 40 + 16))
    new = (NewSequence(1, "r", prompt, len(prompt), 0, spec),)
    done, tokens, step_id = 0, [], 0
    for i, chunk in enumerate([*chunks, *[1] * (count - 1)]):
        samples = int(i >= len(chunks) - 1)
        part = ScheduledSequence(
            1, done, chunk, 0, blocks if not i else (), samples
        )  # all blocks at first
        result = executor.execute(
            SchedulerOutput(step_id=step_id, scheduled=(part,), new_sequences=new)
        )
        new, step_id, done = (), step_id + 1, done + chunk
        tokens += [t for run in result.sequences[0].tokens for t in run]
    return tokens
