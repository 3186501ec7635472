"""Streams over an engine in a thread: many at once, left early, aborted, refused, dead."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pagemill.engine import mailbox
from pagemill.engine.async_engine import AsyncLLMEngine
from pagemill.engine.engine_thread import ThreadHome
from pagemill.engine.input_processor import LengthRule
from pagemill.errors import (
    EngineDeadError,
    InterruptedRequestError,
    PromptTooLongError,
    RequestError,
    UnknownNameError,
)
from pagemill.outputs import RequestOutput
from pagemill.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.harness import StatsList, assert_core_clean, make_core, says
from tests.fakes.byte_tokenizer import EOS_ID, ByteTokenizer
from tests.fakes.script_executor import Script, ScriptExecutor

Body = Callable[["Running"], Awaitable[None]]


class Running:
    """An engine in its thread and what is behind it."""

    def __init__(self, script: Script) -> None:
        self.stats = StatsList()
        self.core, self.executor = make_core(script, num_blocks=400)
        home = ThreadHome(self.core)
        self.engine = AsyncLLMEngine(home, ByteTokenizer(), stat_loggers=[self.stats])

    async def idle(self) -> None:
        """Wait until the engine has nothing to do."""
        end = time.monotonic() + 20.0
        while self.core.has_unfinished_requests() or len(self.engine._outputs):
            assert time.monotonic() < end, "requests are still running"
            await asyncio.sleep(0.005)
        assert_core_clean(self.core)


@asynccontextmanager
async def running(script: Script) -> AsyncIterator[Running]:
    made = Running(script)
    try:
        yield made
    finally:
        made.engine.shutdown()


def play(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 60))


def forever(prompt: tuple[int, ...], sample: int) -> list[int]:
    return []  # fillers only: never an end


def slow(executor: ScriptExecutor, seconds: float = 0.002) -> None:
    """Make each step take a while, so that a request is still running when it is left."""
    execute = executor.execute

    def slowly(scheduled: Any) -> Any:
        time.sleep(seconds)
        return execute(scheduled)

    executor.execute = slowly  # type: ignore[method-assign]


DELTA = RequestOutputKind.DELTA


async def collect(engine: AsyncLLMEngine, prompt: Any, **fields: Any) -> list[RequestOutput]:
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 30} | fields))
    return [output async for output in engine.generate(prompt, params)]


def test_a_hundred_streams_at_once_each_get_their_own_answer() -> None:
    async def body() -> None:
        async with running(lambda prompt, sample: [*prompt[::-1], EOS_ID]) as r:
            prompts = [f"prompt {i}" for i in range(100)]
            results = await asyncio.gather(
                *(collect(r.engine, p, output_kind=DELTA) for p in prompts)
            )
            for prompt, outputs in zip(prompts, results, strict=True):
                assert "".join(o.outputs[0].text for o in outputs) == prompt[::-1]
                assert all(o.prompt == prompt for o in outputs)
                assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]

    play(body())


def test_leaving_early_aborts_within_two_steps_and_frees_the_blocks() -> None:
    async def body() -> None:
        async with running(forever) as r:
            slow(r.executor)
            params = SamplingParams(temperature=0.0, max_tokens=None, output_kind=DELTA)
            stream = r.engine.generate("p", params, "left")
            await anext(stream)
            await stream.aclose()
            steps = len(r.executor.steps)
            await r.idle()
            assert len(r.executor.steps) <= steps + 2
            ends = [f.finish_reason for s in r.stats.steps for f in s.finished]
            assert ends == ["abort"]

    play(body())


def test_a_cancelled_task_aborts_its_request() -> None:
    async def body() -> None:
        async with running(forever) as r:
            slow(r.executor)
            tasks = [
                asyncio.ensure_future(collect(r.engine, "p", max_tokens=None)) for _ in range(5)
            ]
            await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await r.idle()
            assert (await collect(r.engine, "p", max_tokens=2))[-1].outputs[0].text == ".."
            ends = [f.finish_reason for s in r.stats.steps for f in s.finished]
            assert ends == ["abort"] * 5 + ["length"]

    play(body())


def test_a_name_may_be_used_again_as_soon_as_its_stream_was_closed() -> None:
    async def body() -> None:
        async with running(lambda prompt, sample: [*prompt * 9]) as r:
            slow(r.executor)
            params = SamplingParams(temperature=0.0, max_tokens=5, output_kind=DELTA)
            for letter in "abcdefgh":
                left = r.engine.generate("left behind", params, "same")
                await anext(left)
                await left.aclose()
                told = [o async for o in r.engine.generate(letter, params, "same")]
                assert "".join(o.outputs[0].text for o in told) == letter * 5

    play(body())


def test_an_abort_by_name_ends_the_stream_with_that_reason() -> None:
    async def body() -> None:
        async with running(forever) as r:
            slow(r.executor)
            last = None
            params = SamplingParams(temperature=0.0, max_tokens=None)
            async for output in r.engine.generate("p", params, "x"):
                if last is None:
                    await r.engine.abort("x")
                last = output
            assert last is not None
            assert last.outputs[0].finish_reason == "abort"
            await r.engine.abort("x")
            await r.engine.abort(["never", "was"])
            await r.idle()

    play(body())


def test_a_bad_request_answers_itself_alone() -> None:
    async def body() -> None:
        async with running(says("fine")) as r:
            good = asyncio.ensure_future(collect(r.engine, "p"))
            with pytest.raises(RequestError, match="-1"):
                await collect(r.engine, [-1])
            with pytest.raises(RequestError, match="stop_token_ids"):
                await collect(r.engine, "p", stop_token_ids=[99999])
            assert (await good)[-1].outputs[0].text == "fine"

    play(body())


def test_a_live_name_is_refused() -> None:
    async def body() -> None:
        async with running(forever) as r:
            slow(r.executor)
            params = SamplingParams(temperature=0.0, max_tokens=20)
            async for _ in r.engine.generate("p", params, "x"):
                with pytest.raises(RequestError, match="'x'"):
                    async for _ in r.engine.generate("q", params, "x"):
                        pass
                break

    play(body())


def test_a_request_can_be_checked_before_it_is_queued() -> None:
    async def body() -> None:
        async with running(says("ok")) as r:
            with pytest.raises(PromptTooLongError):
                await r.engine.prepare(
                    "p", SamplingParams(max_tokens=999), length_rule=LengthRule.STRICT
                )
            request = await r.engine.prepare("p" * 5000, SamplingParams(truncate_prompt_tokens=3))
            assert request.num_truncated_prompt_tokens == 4997
            assert r.executor.steps == []
            outputs = [o async for o in r.engine.stream(request)]
            assert outputs[-1].outputs[0].text == "ok"

    play(body())


def test_a_dead_engine_ends_every_stream_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with running(forever) as r:
            slow(r.executor)
            tasks = [
                asyncio.ensure_future(collect(r.engine, "p", max_tokens=None)) for _ in range(3)
            ]
            await asyncio.sleep(0.01)
            await r.engine.check_health()
            r.executor.fail_at = 0
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, EngineDeadError)
                assert "the script ends here" in str(result)
            assert r.engine.errored
            assert not r.engine.is_running
            with pytest.raises(EngineDeadError):
                await collect(r.engine, "p")
            with pytest.raises(EngineDeadError):
                await r.engine.check_health()
        assert r.executor.is_shut_down

    play(body())


def test_shutdown_ends_open_streams_and_may_come_twice() -> None:
    async def body() -> None:
        async with running(forever) as r:
            slow(r.executor)
            task = asyncio.ensure_future(collect(r.engine, "p", max_tokens=None))
            await asyncio.sleep(0.01)
            r.engine.shutdown()
            r.engine.shutdown()
            with pytest.raises(EngineDeadError, match="shut down"):
                await task
            assert r.executor.is_shut_down

    play(body())


def test_an_engine_that_is_killed_ends_open_streams() -> None:
    async def body() -> None:
        async with running(forever) as r:
            slow(r.executor)
            task = asyncio.ensure_future(collect(r.engine, "p", max_tokens=None))
            await asyncio.sleep(0.01)
            r.engine.kill()
            with pytest.raises(EngineDeadError, match="killed"):
                await task
        assert r.executor.is_shut_down

    play(body())


def test_an_interruption_ends_what_is_open_with_its_reason_and_nothing_else() -> None:
    async def body() -> None:
        async with running(forever) as r:
            slow(r.executor, 0.01)
            tasks = [
                asyncio.ensure_future(collect(r.engine, "p", max_tokens=None, output_kind=kind))
                for kind in RequestOutputKind
            ]
            await asyncio.sleep(0.05)
            r.engine.interrupt("the time is over")
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, InterruptedRequestError)
                assert str(result) == "the time is over"
            await r.idle()
            assert (await collect(r.engine, "p", max_tokens=2))[-1].outputs[0].text == ".."
            ends = [f.finish_reason for s in r.stats.steps for f in s.finished]
            assert ends == ["abort"] * 3 + ["length"]

    play(body())


@pytest.mark.parametrize("kind", [DELTA, RequestOutputKind.CUMULATIVE])
def test_a_stream_that_is_read_late_tells_all_in_fewer_outputs(kind: RequestOutputKind) -> None:
    async def body() -> None:
        async with running(forever) as r:
            params = SamplingParams(temperature=0.0, max_tokens=60, output_kind=kind, logprobs=1)
            stream = r.engine.generate("p", params)
            told = [await anext(stream)]
            await r.idle()
            told += [output async for output in stream]
            assert len(told) <= 1 + mailbox.MOST_APART
            shown = told if kind is DELTA else told[-1:]
            assert "".join(o.outputs[0].text for o in shown) == "." * 60
            logprobs = [entry for o in shown for entry in o.outputs[0].logprobs or []]
            assert len(logprobs) == 60 and all(ord(".") in entry for entry in logprobs)

    play(body())


def test_a_stream_that_nobody_reads_ends_and_frees_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mailbox, "MOST_WAITING", 20)
    monkeypatch.setattr(mailbox, "PATIENCE_S", 0.0)

    async def body() -> None:
        async with running(forever) as r:
            slow(r.executor)
            params = SamplingParams(temperature=0.0, max_tokens=None, output_kind=DELTA)
            stream = r.engine.generate("p", params)
            await anext(stream)
            other = await collect(r.engine, "q", max_tokens=40, output_kind=DELTA)
            assert "".join(o.outputs[0].text for o in other) == "." * 40
            await r.idle()
            with pytest.raises(RequestError, match="read the stream faster"):
                await anext(stream)
            ends = [f.finish_reason for s in r.stats.steps for f in s.finished]
            assert sorted(ends) == ["abort", "length"]

    play(body())


def test_an_engine_serves_one_event_loop_after_another() -> None:
    made = Running(says("again"))

    async def body() -> None:
        assert (await collect(made.engine, "p"))[-1].outputs[0].text == "again"

    async def leave() -> None:
        async for _ in made.engine.generate("p", SamplingParams(max_tokens=20), "same"):
            return

    for _ in range(3):
        play(body())
        play(leave())
    made.engine.shutdown()


def test_statistics_reach_the_caller_s_loggers() -> None:
    async def body() -> None:
        async with running(says("four")) as r:
            await collect(r.engine, "12345")
            await asyncio.sleep(0.01)
            assert r.stats.total(lambda s: s.num_prompt_tokens) == 5
            assert r.stats.total(lambda s: s.num_generation_tokens) == 5
            assert r.stats.steps[-1].queues.running == 0

    play(body())


def test_an_unknown_home_lists_the_known_ones() -> None:
    from pagemill.engine_args import EngineArgs

    with pytest.raises(UnknownNameError, match="process, thread"):
        AsyncLLMEngine.from_engine_args(EngineArgs(), home="cloud")
