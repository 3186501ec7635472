"""Text that is made while later steps run: the answers are those of an engine that waits for it.

The home here holds each message back until so many further steps have been run, so that stop strings are found
late and the core has made tokens of sequences that have ended.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pagemill.core import step_results
from pagemill.core.sequence import Sequence as CoreSequence
from pagemill.core.step_results import StepResults
from pagemill.core.stop_checker import TokenStop
from pagemill.engine.async_engine import AsyncLLMEngine
from pagemill.engine.engine_core import EngineCore
from pagemill.engine.engine_loop import FromEngine
from pagemill.engine.engine_thread import ThreadHome
from pagemill.engine.output_processor import OutputProcessor
from pagemill.messages import SequenceUpdate
from pagemill.outputs import RequestOutput
from pagemill.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.harness import StatsList, assert_core_clean, make_core, make_engine, run
from tests.fakes.byte_tokenizer import EOS_ID, ByteTokenizer
from tests.fakes.script_executor import ScriptExecutor


class LateHome(ThreadHome):
    """Delivers message i once `lags[i % n]` more steps have been run, or the core has nothing to do."""

    def __init__(self, core: EngineCore, executor: ScriptExecutor, lags: Sequence[int]) -> None:
        super().__init__(core)
        self._lags = itertools.cycle(lags)
        self._executor = executor
        self.num_steps_told = 0

    def start(self, deliver: Callable[[FromEngine], None]) -> None:
        """Start with a `deliver` that waits."""

        def late(message: FromEngine) -> None:
            self.num_steps_told += 1
            goal = self.num_steps_told + next(self._lags)
            end = time.monotonic() + 5
            while len(self._executor.steps) < goal and self._core.has_unfinished_requests():
                assert time.monotonic() < end, "no further step was run"
                time.sleep(0.0005)
            deliver(message)

        super().start(late)


class Late:
    """An engine whose text comes late, and what is behind it."""

    def __init__(self, script: Any, lags: Sequence[int] = (3,), ahead: bool = False) -> None:
        self.core, self.executor = make_core(script, num_blocks=400, ahead=ahead)
        self.stats = StatsList()
        home = LateHome(self.core, self.executor, lags)
        self.engine = AsyncLLMEngine(home, ByteTokenizer(), stat_loggers=[self.stats])

    async def told(self, ask: Ask, name: str) -> dict[int, Any]:
        """Return what a request is told."""
        stream = self.engine.generate(list(ask.prompt), ask.params.clone(), name)
        return joined([output async for output in stream], ask.params)

    def close(self) -> None:
        """End the engine, and check that nothing is left in it."""
        self.engine.shutdown()
        assert_core_clean(self.core)
        assert len(self.engine._outputs) == 0


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: bytes
    params: SamplingParams


def joined(outputs: list[RequestOutput], params: SamplingParams) -> dict[int, Any]:
    """Return everything that each sample was told, however it came."""
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    told: dict[int, Any] = {-1: outputs[0].prompt_logprobs}
    parts = outputs if params.output_kind is RequestOutputKind.DELTA else outputs[-1:]
    for output in parts:
        for sample in output.outputs:
            so_far = told.setdefault(sample.index, [[], "", [], None, None])
            assert so_far[3] is None, "a sample goes on after its end"
            so_far[0] += sample.token_ids
            so_far[1] += sample.text
            so_far[2] += sample.logprobs or []
            so_far[3:] = sample.finish_reason, sample.stop_reason
    return told


def echo(prompt: tuple[int, ...], sample: int) -> list[int]:
    return [*prompt[sample:], *prompt, EOS_ID]


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    """Draw a request that says its prompt twice; most have stop strings that come up in it."""
    best_of = draw(st.sampled_from([None, None, 3]))
    return Ask(
        prompt=bytes(draw(st.lists(st.integers(97, 100), min_size=1, max_size=12))),
        params=SamplingParams(
            n=draw(st.integers(1, 2)),
            best_of=best_of,
            stop=draw(st.sampled_from([[], ["a"], ["ab", "ba"], ["bcd"], ["dd", "d"]])),
            include_stop_str_in_output=draw(st.booleans()),
            min_tokens=draw(st.integers(0, 3)),
            max_tokens=draw(st.integers(3, 24)),
            logprobs=draw(st.sampled_from([None, 2])),
            prompt_logprobs=draw(st.sampled_from([None, 1])),
            output_kind=draw(st.sampled_from(list(RequestOutputKind))),
        ),
    )


def counted(stats: StatsList) -> tuple[Any, ...]:
    ends = sorted(
        (f.finish_reason, f.num_generation_tokens) for s in stats.steps for f in s.finished
    )
    prompts = stats.total(lambda s: s.num_prompt_tokens)
    return ends, prompts, stats.total(lambda s: s.num_generation_tokens)


def check_late_text(asked: list[Ask], lags: list[int], ahead: bool) -> None:
    """Assert that an engine whose text comes late tells and counts what one that waits for it does."""
    stats = StatsList()
    waiting, _ = make_engine(echo, num_blocks=400, stat_loggers=[stats])
    for i, ask in enumerate(asked):
        waiting.add_request(str(i), list(ask.prompt), ask.params.clone())
    outputs = run(waiting)
    expected = [
        joined([o for o in outputs if o.request_id == str(i)], ask.params)
        for i, ask in enumerate(asked)
    ]
    late = Late(echo, lags, ahead)

    async def body() -> list[dict[int, Any]]:
        told = (late.told(ask, str(i)) for i, ask in enumerate(asked))
        return await asyncio.wait_for(asyncio.gather(*told), 60)

    try:
        assert asyncio.run(body()) == expected
    finally:
        late.engine.shutdown()
    late.close()
    assert counted(late.stats) == counted(stats)
    if late.stats.steps:
        assert late.stats.steps[-1].queues.running == 0


LATE = st.tuples(
    st.lists(asks(), min_size=1, max_size=5),
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(LATE)
def test_late_text_changes_no_answer_and_no_count(drawn: tuple[list[Ask], list[int], bool]) -> None:
    check_late_text(*drawn)


# ------------------------------------------------------------ it can fail


def _surplus(
    patch: pytest.MonkeyPatch, act: Callable[[Any, Any, SequenceUpdate, Any], None]
) -> None:
    """Do something with each update that comes behind its sample's end, while the request goes on."""
    before = OutputProcessor._update

    def update(self: OutputProcessor, updates: Any, now: float, counts: Any, step: Any) -> None:
        for one in updates:
            state = self._requests.get(one.request_id)
            if state is not None and state.samples[one.sample_index].finish_reason is not None:
                act(state, state.samples[one.sample_index], one, counts)
        before(self, updates, now, counts, step)

    patch.setattr(OutputProcessor, "_update", update)


def _surplus_told(patch: pytest.MonkeyPatch) -> None:
    """Tokens behind a stop string are told."""

    def act(state: Any, sample: Any, update: SequenceUpdate, counts: Any) -> None:
        sample.token_ids += update.token_ids

    _surplus(patch, act)


def _surplus_counted(patch: pytest.MonkeyPatch) -> None:
    """Tokens behind a stop string are counted."""

    def act(state: Any, sample: Any, update: SequenceUpdate, counts: Any) -> None:
        counts.num_generation_tokens += len(update.token_ids)

    _surplus(patch, act)


def _end_overwritten(patch: pytest.MonkeyPatch) -> None:
    """A sample that a stop string has ended ends for another reason when its tokens do."""

    def act(state: Any, sample: Any, update: SequenceUpdate, counts: Any) -> None:
        if update.finish_reason is not None:
            sample.end(update.finish_reason)

    _surplus(patch, act)


def _prompt_counted_again(patch: pytest.MonkeyPatch) -> None:
    """A request's prompt is counted again with each update behind a sample's end."""

    def act(state: Any, sample: Any, update: SequenceUpdate, counts: Any) -> None:
        counts.num_prompt_tokens += len(state.request.prompt_token_ids)

    _surplus(patch, act)


def _stop_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A token does not end a sequence of which the next one is being made already."""
    before = StepResults._append

    def append(self: StepResults, sequence: Any, *rest: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            if sequence.num_scheduled:
                inner.setattr(step_results, "check_tokens", lambda run, *_: TokenStop(len(run)))
            return before(self, sequence, *rest)

    patch.setattr(StepResults, "_append", append)


def _expected_token_stays(patch: pytest.MonkeyPatch) -> None:
    """Who knows how many tokens a sequence has counts one that nobody has drawn yet."""
    patch.setattr(CoreSequence, "num_output", property(lambda self: len(self.output_token_ids)))


FAULTS = [
    _surplus_told,
    _surplus_counted,
    _end_overwritten,
    _prompt_counted_again,
    _stop_forgotten,
    _expected_token_stays,
]


@pytest.mark.parametrize("plant", FAULTS)
def test_a_planted_fault_is_seen(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    @settings(
        max_examples=200,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    @given(LATE)
    def property_holds(drawn: tuple[list[Ask], list[int], bool]) -> None:
        check_late_text(*drawn)

    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises(AssertionError):
            property_holds()


def test_tokens_behind_a_stop_string_are_made_and_nobody_sees_them() -> None:
    late = Late(lambda prompt, sample: [*b"one stop two three four", EOS_ID], lags=[3])
    params = SamplingParams(temperature=0.0, max_tokens=40, stop=["stop"], logprobs=0)
    ask = Ask(b"p", params)

    told = asyncio.run(late.told(ask, "x"))[0]
    late.close()
    assert (told[0], told[1], told[3]) == ([*b"one stop"], "one ", "stop")
    assert len(told[2]) == 8
    assert sum(len(step.scheduled) for step in late.executor.steps) > 8
    assert late.stats.total(lambda s: s.num_generation_tokens) == 8


def test_a_name_is_free_as_soon_as_a_late_stop_has_ended_its_stream() -> None:
    late = Late(lambda prompt, sample: [*prompt, *b"; and so on and on", EOS_ID], lags=[4])
    params = SamplingParams(temperature=0.0, max_tokens=40, stop=[";"])

    async def body() -> None:
        for word in (b"a", b"bcd", b"e", b"fg"):
            told = await asyncio.wait_for(late.told(Ask(word, params), "same"), 20)
            assert told[0][1] == word.decode()

    asyncio.run(body())
    late.close()


def test_steps_go_on_while_text_is_being_made() -> None:
    core, executor = make_core(echo)
    may_go_on = threading.Event()

    class StuckHome(ThreadHome):
        def start(self, deliver: Callable[[FromEngine], None]) -> None:
            def stuck(message: FromEngine) -> None:
                assert may_go_on.wait(20)
                deliver(message)

            super().start(stuck)

    engine = AsyncLLMEngine(StuckHome(core), ByteTokenizer())
    params = SamplingParams(temperature=0.0, max_tokens=40)

    async def body() -> str:
        stream = engine.generate(list(b"abcdefghijklm"), params, "x")
        task = asyncio.ensure_future(collect(stream))
        end = time.monotonic() + 20
        while len(executor.steps) < 5:
            assert time.monotonic() < end, "the engine waits for the text"
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        assert len(executor.steps) < 20  # and it does not run away from it
        may_go_on.set()
        return (await asyncio.wait_for(task, 20))[-1].outputs[0].text

    assert asyncio.run(body()) == "abcdefghijklm" * 2
    engine.shutdown()
    assert_core_clean(core)


async def collect(stream: Any) -> list[RequestOutput]:
    return [output async for output in stream]
