"""The engine step by step: requests in and out, aborts, duplicates, death."""

from __future__ import annotations

import time

import pytest

from pagemill.errors import EngineDeadError, RequestError
from pagemill.outputs import RequestOutput
from pagemill.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.harness import (
    StatsList,
    assert_clean,
    engine_config,
    generate,
    make_engine,
    run,
    says,
)
from tests.fakes.byte_tokenizer import EOS_ID


def test_text_comes_out_and_the_end_token_is_kept_in_the_ids() -> None:
    engine, _ = make_engine(says("hello"))
    out = generate(engine).outputs[0]
    assert (out.text, out.finish_reason, out.stop_reason) == ("hello", "stop", None)
    assert out.token_ids == [*b"hello", EOS_ID]


def test_requests_of_different_lengths_run_together() -> None:
    engine, _ = make_engine(lambda prompt, sample: [*prompt, EOS_ID])
    texts = ["a", "bcd", "efghijklmnop", "q" * 30]
    for i, text in enumerate(texts):
        engine.add_request(str(i), text, SamplingParams(max_tokens=50, temperature=0.0))
    finals = {o.request_id: o for o in run(engine) if o.finished}
    assert [finals[str(i)].outputs[0].text for i in range(len(texts))] == texts


def test_a_live_request_id_is_refused_and_the_first_goes_on() -> None:
    engine, _ = make_engine(says("abc"))
    engine.add_request("x", "p", SamplingParams(temperature=0.0))
    with pytest.raises(RequestError, match="'x'") as caught:
        engine.add_request("x", "q", SamplingParams(temperature=0.0))
    assert caught.value.param == "request_id"
    assert run(engine)[-1].outputs[0].text == "abc"


def test_an_ended_request_id_may_be_used_again() -> None:
    engine, _ = make_engine(says("abc"))
    assert generate(engine).outputs[0].text == "abc"
    assert generate(engine).outputs[0].text == "abc"


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_an_abort_at_any_time_leaves_no_trace(steps: int) -> None:
    """Before scheduling (0), in a chunked prefill (1, 2), in decode (4)."""
    config = engine_config(max_num_batched_tokens=8)
    engine, executor = make_engine(says("x" * 30), config=config)
    engine.add_request("x", "p" * 20, SamplingParams(temperature=0.0, max_tokens=30))
    for _ in range(steps):
        engine.step()
    last = engine.abort_request("x")
    assert [o.finished for o in last] == [True]
    assert last[0].outputs[0].finish_reason == "abort"
    assert_clean(engine)
    assert engine.abort_request("x") == []  # twice
    assert engine.abort_request("never") == []
    assert generate(engine, max_tokens=3).outputs[0].text == "xxx"
    assert len(executor.rows) <= 1  # the aborted row went with the next step


def test_an_abort_after_the_end_says_nothing() -> None:
    engine, _ = make_engine(says("abc"))
    generate(engine)
    assert engine.abort_request("one") == []
    assert_clean(engine)


def test_aborting_one_of_many_leaves_the_others_alone() -> None:
    engine, _ = make_engine(lambda prompt, sample: [*prompt, EOS_ID])
    for name in "abcdef":
        engine.add_request(name, name * 9, SamplingParams(temperature=0.0, max_tokens=20))
    engine.step()
    engine.abort_request(["b", "e"])
    finals = {o.request_id: o.outputs[0].text for o in run(engine) if o.finished}
    assert finals == {name: name * 9 for name in "acdf"}


def test_an_error_of_one_sequence_ends_that_request_alone() -> None:
    engine, executor = make_engine(says("fine"))
    executor.errors[tuple(b"bad")] = "the logits are not finite (dtype float16)"
    engine.add_request("good", "ok", SamplingParams(temperature=0.0))
    engine.add_request("bad", "bad", SamplingParams(n=3))
    finals = {o.request_id: o for o in run(engine) if o.finished}
    assert finals["good"].outputs[0].text == "fine"
    assert {o.finish_reason for o in finals["bad"].outputs} == {"error"}
    assert "float16" in (finals["bad"].error or "")


def test_steps_that_overlap_say_the_same_and_end_with_nothing_in_flight() -> None:
    told = []
    for ahead in (False, True):
        engine, executor = make_engine(says("hello"), config=engine_config(ahead=ahead))
        for name in "abc":
            params = SamplingParams(max_tokens=4 if name == "b" else 20, n=2 if name == "c" else 1)
            engine.add_request(name, name * 5, params)
        finals = {o.request_id: [s.text for s in o.outputs] for o in run(engine) if o.finished}
        told.append(finals)
        assert not executor.results
    assert told[0] == told[1] == {"a": ["hello"], "b": ["hell"], "c": ["hello"] * 2}


def test_what_is_in_flight_at_the_end_is_waited_for_and_not_missed() -> None:
    engine, executor = make_engine(says("x" * 30), config=engine_config(ahead=True))
    engine.add_request("x", "p", SamplingParams(max_tokens=30))
    for _ in range(3):
        engine.step()
    assert len(executor.results) == 1
    engine.abort_request("x")
    engine.shutdown()
    assert not executor.results
    assert executor.is_shut_down


def test_a_failing_step_kills_the_engine_for_everyone() -> None:
    engine, executor = make_engine(says("abc"))
    engine.add_request("x", "p", SamplingParams(temperature=0.0))
    executor.fail_at = 1
    engine.step()
    with pytest.raises(EngineDeadError, match="the script ends here"):
        engine.step()
    assert engine.errored
    with pytest.raises(EngineDeadError, match="RuntimeError"):
        engine.add_request("y", "p", SamplingParams())
    with pytest.raises(EngineDeadError):
        engine.step()


def test_preemption_changes_loses_and_doubles_no_token() -> None:
    config = engine_config(max_num_seqs=8)
    blocks_for_one_and_a_half = 24
    engine, executor = make_engine(
        lambda prompt, sample: [*range(32, 32 + 40)],
        num_blocks=blocks_for_one_and_a_half,
        config=config,
    )
    params = SamplingParams(temperature=0.0, max_tokens=40, output_kind=RequestOutputKind.DELTA)
    for name in "abcd":
        engine.add_request(name, name * 8, params)
    told: dict[str, list[int]] = {name: [] for name in "abcd"}
    metrics = {}
    for output in run(engine):
        told[output.request_id] += output.outputs[0].token_ids
        metrics[output.request_id] = output.metrics
    assert all(tokens == [*range(32, 72)] for tokens in told.values())
    assert sum(step.num_preempted for step in executor.steps) > 0
    assert sum(m.num_preemptions for m in metrics.values() if m is not None) > 0


def test_samples_share_the_prompt_and_come_in_order() -> None:
    engine, executor = make_engine(lambda prompt, sample: [*f"sample {sample}".encode(), EOS_ID])
    out = generate(engine, "a prompt of some length", SamplingParams(n=12, max_tokens=20))
    assert [o.index for o in out.outputs] == list(range(12))
    assert [o.text for o in out.outputs] == [f"sample {i}" for i in range(12)]
    computed = sum(s.num_tokens for step in executor.steps for s in step.scheduled)
    assert computed < 12 * 23  # the prompt was not computed once a sample


def test_stats_say_what_happened() -> None:
    stats = StatsList()
    engine, _ = make_engine(says("four"), stat_loggers=[stats])
    engine.add_request("a", "12345678", SamplingParams(temperature=0.0))
    engine.add_request("b", "123", SamplingParams(temperature=0.0))
    engine.step()
    engine.abort_request("b")
    run(engine)
    ends = [f for step in stats.steps for f in step.finished]
    assert sorted(f.finish_reason for f in ends) == ["abort", "stop"]
    assert stats.total(lambda s: s.num_prompt_tokens) == 11
    assert stats.total(lambda s: s.num_generation_tokens) == 6  # four and its end token; one of b
    assert stats.steps[-1].queues.running == 0
    assert stats.steps[-1].kv_cache_usage == 0.0
    assert {"schedule", "execute", "update", "process", "model"} <= stats.steps[0].timings_s.keys()


def test_a_request_that_is_ignored_ends_with_both_numbers() -> None:
    """The scheduler refuses what an input processor with another limit let through."""
    engine, _ = make_engine(says("x"))
    loose, _ = make_engine(says("x"), config=engine_config(max_model_len=1000), num_blocks=250)
    request = loose.input_processor.process("big", [1] * 100, SamplingParams())
    engine.add_checked(request)
    out: RequestOutput = run(engine)[-1]
    assert out.outputs[0].finish_reason == "error"
    assert "100" in (out.error or "")
    assert "64" in (out.error or "")


def test_a_request_that_is_not_begun_in_time_is_dropped_and_counted() -> None:
    stats = StatsList()
    engine, executor = make_engine(says("four"), stat_loggers=[stats])
    engine.add_request("late", "p", SamplingParams(n=2), start_timeout=1e-9)
    engine.add_request("plain", "p", SamplingParams(temperature=0.0), start_timeout=1e6)
    finals = {o.request_id: o for o in run(engine) if o.finished}
    late = finals["late"]
    assert late.timed_out
    assert "start_timeout" in (late.error or "")
    assert [(o.finish_reason, o.text) for o in late.outputs] == [("abort", "")] * 2
    assert not finals["plain"].timed_out
    assert finals["plain"].outputs[0].text == "four"
    assert [kind for step in stats.steps for kind in step.expired] == ["start"]
    ends = [f.finish_reason for step in stats.steps for f in step.finished]
    assert sorted(ends) == ["abort", "stop"]
    assert all(s.seq_id for step in executor.steps for s in step.scheduled)


def test_a_request_that_is_not_finished_in_time_keeps_what_it_said() -> None:
    engine, _ = make_engine(says("a long story"))
    engine.add_request("x", "p", SamplingParams(temperature=0.0), request_timeout=1e6)
    for _ in range(3):
        engine.step()
    engine._scheduler._clock = lambda: time.monotonic() + 2e6
    out = run(engine)[-1]
    assert out.timed_out
    assert "request_timeout" in (out.error or "")
    assert (out.outputs[0].finish_reason, out.outputs[0].text) == ("abort", "a l")
