"""A room that fails on one request ends that request; the others, their blocks and the engine are untouched."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from pagemill.core import step_results
from pagemill.core.policies import fcfs
from pagemill.core.roster import Roster
from pagemill.core.sequence import Sequence
from pagemill.core.sequence_queue import SequenceQueue
from pagemill.engine import sample_text
from pagemill.engine.async_engine import AsyncLLMEngine
from pagemill.engine.engine_core import EngineCore
from pagemill.engine.engine_thread import ThreadHome
from pagemill.engine.llm_engine import LLMEngine
from pagemill.engine.output_processor import OutputProcessor
from pagemill.outputs import RequestOutput
from pagemill.sampling_params import RequestOutputKind, SamplingParams
from pagemill.tokenizer.fast import FastTokenizer, TokenizerSettings
from tests.engine.harness import (
    StatsList,
    assert_core_clean,
    engine_config,
    make_core,
    make_engine,
    make_executor,
    run,
)
from tests.fakes.byte_tokenizer import EOS_ID, ByteTokenizer

BAD = "z"  # of the prompt of the request that fails
Plant = Callable[[pytest.MonkeyPatch], None]


class PlantedError(Exception):
    """Raised in a room."""


def once_bad(original: Any, is_bad: Callable[..., bool]) -> Any:
    """Return a function that raises where `is_bad` says so of its arguments."""

    def planted(*args: Any, **kwargs: Any) -> Any:
        if is_bad(*args, **kwargs):
            raise PlantedError("planted")
        return original(*args, **kwargs)

    return planted


def is_bad_group(group: Any) -> bool:
    return group.request.prompt_token_ids[0] == ord(BAD)


def in_stop_checker(patch: pytest.MonkeyPatch) -> None:
    def bad(run: Any, num_output: int, request: Any, limit: int) -> bool:
        return request.prompt_token_ids[0] == ord(BAD) and num_output == 3

    patch.setattr(step_results, "check_tokens", once_bad(step_results.check_tokens, bad))


def in_fork(patch: pytest.MonkeyPatch) -> None:
    def bad(roster: Roster, root: Sequence) -> bool:
        return is_bad_group(root.group)

    patch.setattr(Roster, "fork", once_bad(Roster.fork, bad))


def in_middle_of_fork(patch: pytest.MonkeyPatch) -> None:
    def bad(roster: Roster, sequence: Sequence) -> bool:
        return is_bad_group(sequence.group) and sequence.sample_index == 1

    patch.setattr(Roster, "_register", once_bad(Roster._register, bad))


def _in_policy(hook: str) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        def bad(policy: Any, subject: Any, *rest: Any) -> bool:
            return is_bad_group(subject.group if isinstance(subject, Sequence) else subject)

        kind = fcfs.FirstComeFirstServed
        patch.setattr(kind, hook, once_bad(getattr(kind, hook), bad))

    return plant


def in_arrival_key(patch: pytest.MonkeyPatch) -> None:
    def bad(sequence: Sequence) -> bool:
        return is_bad_group(sequence.group)

    patch.setattr(fcfs, "arrival_key", once_bad(fcfs.arrival_key, bad))


def in_decoder(patch: pytest.MonkeyPatch) -> None:
    original = sample_text.SampleText.push

    def push(self: Any, token_id: int, num_tokens: int) -> str | None:
        if token_id == ord(BAD):
            raise PlantedError("planted")
        return original(self, token_id, num_tokens)

    patch.setattr(sample_text.SampleText, "push", push)


def in_last_text(patch: pytest.MonkeyPatch) -> None:
    def bad(text: Any, num_tokens: int) -> bool:
        return BAD in text.text

    original = sample_text.SampleText.finish
    patch.setattr(sample_text.SampleText, "finish", once_bad(original, bad))


def in_output(patch: pytest.MonkeyPatch) -> None:
    def bad(processor: Any, state: Any, index: int, sample: Any, *rest: int) -> bool:
        return len(sample.token_ids) >= 2 and is_bad_group(state)

    original = OutputProcessor._completion
    patch.setattr(OutputProcessor, "_completion", once_bad(original, bad))


PLANTS: dict[str, Plant] = {
    "stop checker": in_stop_checker,
    "fork": in_fork,
    "middle of a fork": in_middle_of_fork,
    "policy, arrival": _in_policy("note_arrival"),
    "policy, computed": _in_policy("note_computed"),
    "policy, running": _in_policy("running_key"),
    "policy, key": in_arrival_key,
    "decoder": in_decoder,
    "last text": in_last_text,
    "output": in_output,
}


def say(prompt: tuple[int, ...], sample: int) -> list[int]:
    return [*prompt, *b"abc", EOS_ID]


PROMPTS = ["first", f"{BAD}bad", "second", "third"]
PARAMS = {"n": 2, "max_tokens": 20, "logprobs": 1}


def check(finals: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for prompt, output, plain in zip(PROMPTS, finals, expected, strict=True):
        if prompt.startswith(BAD):
            assert "error" in {o.finish_reason for o in output.outputs}
            assert output.error is not None and "PlantedError: planted" in output.error
        else:
            assert [(o.text, o.logprobs) for o in output.outputs] == [
                (o.text, o.logprobs) for o in plain.outputs
            ]


def serve(engine: LLMEngine) -> list[RequestOutput]:
    outputs = []
    for prompt in PROMPTS:
        engine.add_request(prompt, prompt, SamplingParams(**PARAMS))
        outputs += engine.step()
    finals = {o.request_id: o for o in [*outputs, *run(engine)] if o.finished}
    return [finals[prompt] for prompt in PROMPTS]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", PLANTS)
def test_an_error_on_one_request_ends_that_request_alone(
    name: str, ahead: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = serve(make_engine(say)[0])
    stats = StatsList()
    config = engine_config(ahead=ahead)
    engine, executor = make_engine(say, stat_loggers=[stats], config=config)
    PLANTS[name](monkeypatch)
    check(serve(engine), expected)
    ends = sorted(f.finish_reason for step in stats.steps for f in step.finished)
    assert ends == ["error", "stop", "stop", "stop"]
    assert stats.steps[-1].queues.running == 0
    assert any(r.levelno >= logging.ERROR and r.exc_info for r in caplog.records)
    monkeypatch.undo()
    check_goes_on(engine, executor)


def check_goes_on(engine: LLMEngine, executor: Any, said: list[int] | None = None) -> None:
    name = "a" if said else BAD
    engine.add_request(name, name, SamplingParams(temperature=0.0, max_tokens=9))
    expected = bytes(said).decode() if said else f"{BAD}abc"
    assert run(engine)[-1].outputs[0].text == expected
    assert len(executor.rows) <= 1  # every other row has gone


def test_an_error_of_the_policy_at_the_end_of_a_request_costs_nobody_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = serve(make_engine(say)[0])
    _in_policy("note_end")(monkeypatch)
    finals = serve(make_engine(say)[0])
    assert [o.outputs for o in finals] == [o.outputs for o in expected]


def test_an_error_of_the_policy_while_blocks_run_short_ends_that_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, executor = make_engine(lambda prompt, sample: [*range(32, 72)], num_blocks=24)
    _in_policy("victim_key")(monkeypatch)
    params = SamplingParams(temperature=0.0, max_tokens=40)
    for name in "abzd":
        engine.add_request(name, name * 8, params)
    finals = {o.request_id: o for o in run(engine) if o.finished}
    assert sum(step.num_preempted for step in executor.steps) > 0
    assert finals["z"].outputs[0].finish_reason == "error"
    assert all(finals[name].outputs[0].token_ids == [*range(32, 72)] for name in "abd")


class BadQueue(SequenceQueue):
    """A policy's queue that fails on one request: `mode` says when."""

    mode = ""

    def add(self, sequence: Sequence) -> None:
        """Fail when the request comes back."""
        if self.mode == "add" and is_bad_group(sequence.group) and sequence.num_preemptions:
            raise PlantedError("planted")
        super().add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Fail when the request is to begin, or to begin again."""
        if self.mode == "remove" and is_bad_group(sequence.group):
            raise PlantedError("planted")
        super().remove(sequence)

    def __iter__(self) -> Iterator[Sequence]:
        """Fail behind the first, or name somebody twice, or nobody."""
        for count, sequence in enumerate(super().__iter__()):
            yield sequence
            if self.mode == "twice":
                yield sequence
            if self.mode == "iterate" and count:
                raise PlantedError("planted")
            if self.mode == "forget":
                return


class OddKeys(fcfs.FirstComeFirstServed):
    """A policy with a key that cannot be compared."""

    mode = ""

    def running_key(self, sequence: Sequence) -> Any:
        """Return what is no key."""
        key = {"none": None, "text": ("a",), "nan": (float("nan"),)}[self.mode]
        return key if is_bad_group(sequence.group) else super().running_key(sequence)

    victim_key = running_key


def crowd() -> dict[str, RequestOutput]:
    """Run four requests in a pool that is too small for them; return their ends."""
    engine, executor = make_engine(lambda prompt, sample: [*range(32, 72)], num_blocks=24)
    params = SamplingParams(temperature=0.0, max_tokens=40)
    for name in "abzd":
        engine.add_request(name, name * 8, params)
    finals = {o.request_id: o for o in run(engine) if o.finished}
    assert sum(step.num_preempted for step in executor.steps) > 0
    check_goes_on(engine, executor, [*range(32, 41)])
    return finals


@pytest.mark.parametrize("mode", ["add", "remove", "iterate", "twice", "forget"])
def test_an_error_of_the_policy_s_queue_costs_the_request_alone_and_never_the_engine(
    mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(BadQueue, "mode", mode)
    monkeypatch.setattr(fcfs, "SequenceQueue", BadQueue)
    finals = crowd()
    ends = {name: o.outputs[0].finish_reason for name, o in finals.items()}
    blamed = mode in ("add", "remove")  # else nobody in particular
    assert ends == dict.fromkeys("abd", "length") | {"z": "error" if blamed else "length"}
    assert all(finals[name].outputs[0].token_ids == [*range(32, 72)] for name in "abd")
    if blamed:
        assert "PlantedError: planted" in (finals["z"].error or "")
    assert any(r.exc_info for r in caplog.records) == (blamed or mode == "iterate")


@pytest.mark.parametrize("mode", ["none", "text", "nan"])
def test_a_key_that_cannot_be_compared_ends_its_request_alone(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OddKeys, "mode", mode)
    monkeypatch.setattr(fcfs, "FirstComeFirstServed", OddKeys)
    engine, _ = make_engine(say)
    for name in ("a", BAD, "d"):
        engine.add_request(name, name, SamplingParams(temperature=0.0, max_tokens=9))
    finals = {o.request_id: o.outputs[0] for o in run(engine) if o.finished}
    assert {name: o.finish_reason for name, o in finals.items()} == {
        "a": "stop", BAD: "error", "d": "stop",
    }  # fmt: skip


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("name", PLANTS)
def test_streams_of_other_requests_go_on(
    name: str, kind: RequestOutputKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, _ = make_core(say)
    stats = StatsList()
    engine = AsyncLLMEngine(ThreadHome(core), ByteTokenizer(), stat_loggers=[stats])
    PLANTS[name](monkeypatch)
    params = SamplingParams(temperature=0.0, n=1, max_tokens=20, output_kind=kind)
    if "fork" in name:
        params = SamplingParams(n=2, max_tokens=20, output_kind=kind)

    async def collect(prompt: str) -> list[RequestOutput]:
        return [output async for output in engine.generate(prompt, params)]

    async def body() -> None:
        told = await asyncio.wait_for(asyncio.gather(*map(collect, PROMPTS)), 30)
        for prompt, outputs in zip(PROMPTS, told, strict=True):
            samples = [o for output in outputs for o in output.outputs]
            if prompt.startswith(BAD):
                assert "error" in {o.finish_reason for o in samples}
                continue
            text = "".join(o.text for o in samples if o.index == 0)
            if kind is not RequestOutputKind.DELTA:
                text = outputs[-1].outputs[0].text
            assert text == f"{prompt}abc"

    asyncio.run(body())
    engine.shutdown()
    assert_core_clean(core)
    assert sorted(f.finish_reason for s in stats.steps for f in s.finished) == [
        "error", "stop", "stop", "stop",
    ]  # fmt: skip


def test_a_panic_of_the_tokenizers_library_ends_the_request_that_it_meets() -> None:
    backend = Backend(models.WordLevel({chr(i): i for i in range(256)}, unk_token="?"))
    backend.decoder = decoders.CTC()  # text is made as a whole, at the end
    tokenizer = FastTokenizer(backend, TokenizerSettings("a test"))
    tokenizer.backend.decoder = decoders.Strip("z", 0, 2)  # panics on a token that is one z
    config = engine_config()
    executor = make_executor(lambda prompt, sample: [*prompt, EOS_ID], 64, config)
    core = EngineCore(config, executor, tokenizer, counts=True)
    engine = AsyncLLMEngine(ThreadHome(core), tokenizer, stat_loggers=[])

    async def collect(prompt: str) -> RequestOutput:
        params = SamplingParams(temperature=0.0, max_tokens=20)
        outputs = [o async for o in engine.generate([ord(c) for c in prompt], params)]
        return outputs[-1]

    async def body() -> None:
        told = await asyncio.wait_for(asyncio.gather(*map(collect, ("abc", BAD, "de"))), 30)
        assert [o.outputs[0].finish_reason for o in told] == ["stop", "error", "stop"]
        assert "the tokenizers library fails" in (told[1].error or "")
        assert (told[0].outputs[0].text, told[2].outputs[0].text) == ("abc", "de")
        assert (await collect("on")).outputs[0].text == "on"

    asyncio.run(body())
    engine.shutdown()
    assert_core_clean(core)
