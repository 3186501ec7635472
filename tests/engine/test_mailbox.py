"""What waits for a reader is told whole, in as many pieces as the reader has the time for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.engine import mailbox
from pagemill.engine.mailbox import MOST_APART, Mailbox
from pagemill.errors import EngineDeadError, RequestError
from pagemill.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from pagemill.sampling_params import RequestOutputKind

DELTA = RequestOutputKind.DELTA


def piece(number: int, *, index: int = 0, last: bool = False) -> RequestOutput:
    """Return news: one token of one sample."""
    sample = CompletionOutput(
        index,
        f"<{number}>",
        [number],
        cumulative_logprob=-float(number),
        logprobs=[{number: Logprob(-0.5, 1, f"<{number}>")}],
        finish_reason="length" if last else None,
        seed=7,
    )
    metrics = RequestMetrics(0.0, last_token_time=float(number))
    return RequestOutput("r", "p", [1], None, [sample], last, metrics, num_cached_tokens=3)


def in_loop(body: Callable[[], Any]) -> Any:
    return asyncio.run(asyncio.wait_for(body(), 20))


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=200),
)
def test_a_reader_of_any_speed_gets_every_token_once_and_in_order(
    moves: list[tuple[int, int]],
) -> None:
    async def body() -> None:
        box = Mailbox(DELTA)
        taken: list[RequestOutput] = []
        for number, (index, num_reads) in enumerate(moves):
            assert box.put(piece(number, index=index, last=number == len(moves) - 1))
            for _ in range(num_reads):
                if box._items:
                    taken.append(await box.take())
        while not (taken and taken[-1].finished):
            taken.append(await box.take())
        assert not box._items and box._num_waiting == 0
        assert len(taken) <= len(moves)
        for index in range(3):
            numbers = [n for n, (i, _) in enumerate(moves) if i == index]
            samples = [s for o in taken for s in o.outputs if s.index == index]
            assert [t for s in samples for t in s.token_ids] == numbers
            assert "".join(s.text for s in samples) == "".join(f"<{n}>" for n in numbers)
            assert [next(iter(e)) for s in samples for e in s.logprobs or []] == numbers
            assert all(s.cumulative_logprob == -s.token_ids[-1] for s in samples)
        assert taken[-1].metrics is not None
        assert taken[-1].metrics.last_token_time == len(moves) - 1
        assert sum(s.finish_reason == "length" for o in taken for s in o.outputs) == 1

    in_loop(body)


def test_what_a_reader_leaves_stays_few_outputs_and_one_that_keeps_up_gets_each() -> None:
    async def body() -> None:
        box = Mailbox(DELTA)
        for number in range(10 * MOST_APART):
            assert box.put(piece(number))
        assert len(box._items) == MOST_APART
        box = Mailbox(DELTA)
        for number in range(10 * MOST_APART):
            assert box.put(piece(number))
            output = await box.take()
            assert isinstance(output, RequestOutput) and output.outputs[0].token_ids == [number]

    in_loop(body)


def test_of_what_is_told_from_the_beginning_each_time_the_last_remains() -> None:
    async def body() -> None:
        box = Mailbox(RequestOutputKind.CUMULATIVE)
        for number in range(3 * MOST_APART):
            assert box.put(piece(number))
        told = [await box.take() for _ in range(MOST_APART)]
        ids = [o.outputs[0].token_ids for o in told if isinstance(o, RequestOutput)]
        assert ids == [[n] for n in (*range(MOST_APART - 1), 3 * MOST_APART - 1)]

    in_loop(body)


def test_an_error_comes_behind_what_was_said() -> None:
    async def body() -> None:
        box = Mailbox(DELTA)
        for number in range(2 * MOST_APART):
            box.put(piece(number))
        box.put(EngineDeadError("gone"))
        items = [await box.take() for _ in range(MOST_APART + 1)]
        assert isinstance(items[-1], EngineDeadError)

    in_loop(body)


class Watch:
    """A clock that tests move on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def large(number: int, size: int = 100) -> RequestOutput:
    """Return news of one step: a token of each of two samples, with so many alternatives in all."""
    entry = {n: Logprob(-0.5, 1, "x") for n in range(size // 2 - 1)}
    samples = [CompletionOutput(index, "x", [number], logprobs=[entry]) for index in range(2)]
    return RequestOutput("r", "p", [1], None, samples, False)


def test_past_its_end_the_reader_finds_an_error_and_the_request_is_to_be_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mailbox, "MOST_WAITING", 100)

    async def body() -> None:
        clock = Watch()
        box = Mailbox(DELTA, clock)
        told = []
        for number in range(60):  # a token and an alternative each
            told.append(box.put(piece(number)))
            clock.now += mailbox.PATIENCE_S / 50
        assert told == [True] * 51 + [False] + [True] * 8
        error = await box.take()
        assert isinstance(error, RequestError) and "102 tokens and alternatives" in str(error)
        assert f"nothing is read for {mailbox.PATIENCE_S:g} s" in str(error)
        assert not box._items

    in_loop(body)


def test_steps_of_any_size_end_no_request_whose_reader_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mailbox, "MOST_WAITING", 99)

    async def body() -> None:
        clock = Watch()
        box = Mailbox(DELTA, clock)
        clock.now = 1000.0  # the request waited for its turn
        for number in range(50):  # two wait at once while the reader writes one out
            assert box.put(large(number))
            clock.now += mailbox.PATIENCE_S - 1
            if number:
                output = await box.take()
                assert isinstance(output, RequestOutput)
                assert output.outputs[0].token_ids == [number - 1]
        assert box.put(EngineDeadError("gone"))

    in_loop(body)


@pytest.mark.parametrize("reads", [False, True])
def test_what_waits_never_exceeds_the_bound_and_the_news_of_one_step(
    monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    monkeypatch.setattr(mailbox, "MOST_WAITING", 150)
    monkeypatch.setattr(mailbox, "MOST_FOR_A_READER", 950)

    async def body() -> None:
        clock = Watch()
        box = Mailbox(DELTA, clock)
        most, number = 0, 0
        while box.put(large(number)):
            number += 1
            most = max(most, box._num_waiting)
            clock.now += mailbox.PATIENCE_S / 4
            if reads and number % 3 == 0:  # slower than the news come
                await box.take()
        assert most == (1000 if reads else 400)
        error = await box.take()
        assert isinstance(error, RequestError)
        assert ("at most 950 may" if reads else "at most 150 may") in str(error)

    in_loop(body)
