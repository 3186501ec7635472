"""The log line and the Prometheus metrics: true also when requests are aborted."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pagemill.engine.prometheus import PrometheusStatLogger, length_buckets
from pagemill.engine.stats import LoggingStatLogger, count_drafts, step_stats
from pagemill.messages import (
    BlockMoves,
    LostMoves,
    QueueSizes,
    SchedulerOutput,
    SequenceOutput,
    StepOutput,
    StepStats,
    SwapIn,
    SwapOut,
)
from pagemill.sampling_params import SamplingParams
from tests.engine.harness import MAX_MODEL_LEN, StatsList, engine_config, make_engine, run, says


def prometheus(prefix: str = "pagemill") -> PrometheusStatLogger:
    return PrometheusStatLogger(prefix, "fake", engine_config().cache, MAX_MODEL_LEN, 64)


def values(logger: PrometheusStatLogger) -> dict[str, float]:
    """Return each sample by its name, with finished_reason where it has one."""
    found = {}
    for family in text_string_to_metric_families(logger.render().decode()):
        for sample in family.samples:
            if "le" not in sample.labels:
                reason = sample.labels.get("finished_reason")
                found[sample.name + (f"/{reason}" if reason else "")] = sample.value
    return found


def test_five_aborts_show_as_five_and_every_start_has_an_end() -> None:
    logger = prometheus()
    engine, executor = make_engine(says("abc"), stat_loggers=[logger])
    executor.errors[tuple(b"bad")] = "broken"
    started = 0
    for i in range(5):
        engine.add_request(f"a{i}", "p" * (i + 1), SamplingParams())
    for i in range(3):
        engine.add_request(f"s{i}", "p", SamplingParams(n=2))
    engine.add_request("l", "p", SamplingParams(max_tokens=2))
    engine.add_request("e", "bad", SamplingParams())
    started = 10
    engine.step()
    engine.abort_request([f"a{i}" for i in range(5)])
    engine.abort_request("a0")
    run(engine)
    seen = values(logger)
    ends = {k.split("/")[1]: v for k, v in seen.items() if "request_success_total/" in k}
    assert ends == {"abort": 5, "stop": 3, "length": 1, "error": 1, "repetition": 0}
    assert sum(ends.values()) == started
    assert seen["pagemill:e2e_request_latency_seconds_count"] == started
    assert seen["pagemill:request_prompt_tokens_sum"] == 15 + 3 + 1 + 3
    assert seen["pagemill:num_requests_running"] == 0
    assert seen["pagemill:kv_cache_usage_perc"] == 0


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        (None, (4, 2, 0, 0)),
        (LostMoves(slots=(2, 3), ends_tier=True), (2, 2, 2, 0)),
        (LostMoves(blocks=(9,), slots=(11, 0)), (3, 1, 1, 1)),
    ],
)
def test_moves_that_were_not_done_are_counted_apart(
    lost: LostMoves | None, expected: tuple[int, ...]
) -> None:
    moves = BlockMoves(
        swap_out=tuple(SwapOut(block, slot=block) for block in range(4)),
        swap_in=(SwapIn(slot=10, block=8), SwapIn(slot=11, block=9)),
    )
    step = SchedulerOutput(step_id=0, scheduled=(), block_moves=moves)
    logger = prometheus()
    logger.record(step_stats(QueueSizes(0, 0), 0.0, 0.0, step=step, lost=lost))
    seen = values(logger)
    names = [f"swapped_{way}_blocks{end}_total" for end in ("", "_failed") for way in ("out", "in")]
    assert tuple(seen[f"pagemill:{name}"] for name in names) == expected


def test_expired_requests_show_by_deadline() -> None:
    logger = prometheus()
    engine, _ = make_engine(says("abc"), stat_loggers=[logger])
    for i in range(3):
        engine.add_request(f"a{i}", "p", SamplingParams(), start_timeout=1e-9)
    run(engine)
    text = logger.render().decode()
    assert (
        'request_deadline_exceeded_total{deadline="start",engine="0",model_name="fake"} 3.0' in text
    )
    assert (
        'request_deadline_exceeded_total{deadline="end",engine="0",model_name="fake"} 0.0' in text
    )
    assert values(logger)["pagemill:request_success_total/abort"] == 3


def test_request_aborted_inside_its_prompt_has_waited_its_time() -> None:
    logger = prometheus()
    engine, _ = make_engine(says("abc"), stat_loggers=[logger])
    engine.add_request("chunked", "p" * 50, SamplingParams(max_tokens=2))  # 32 tokens a step
    engine.add_request("waiting", "p" * 50, SamplingParams(max_tokens=2))
    engine.step()
    chunked, waiting = engine.abort_request(["chunked", "waiting"])
    assert chunked.metrics is not None and waiting.metrics is not None
    assert chunked.metrics.first_scheduled_time is not None
    assert waiting.metrics.first_scheduled_time is None
    seen = values(logger)
    assert seen["pagemill:request_queue_time_seconds_count"] == 1
    assert seen["pagemill:request_prefill_time_seconds_count"] == 0
    run(engine)


def test_tokens_and_times_are_counted() -> None:
    logger = prometheus("vllm")
    engine, _ = make_engine(says("abc"), stat_loggers=[logger])
    engine.add_request("x", "12345", SamplingParams(n=2))
    run(engine)
    seen = values(logger)
    assert seen["vllm:prompt_tokens_total"] == 5
    assert seen["vllm:generation_tokens_total"] == 8
    assert seen["vllm:time_to_first_token_seconds_count"] == 1
    assert seen["vllm:inter_token_latency_seconds_count"] == 6
    assert seen["vllm:request_time_per_output_token_seconds_count"] == 1
    assert seen["vllm:iteration_tokens_total_sum"] == 5 + 6
    assert seen["vllm:cache_config_info"] == 1
    for name in ("request_queue_time", "request_prefill_time", "request_decode_time"):
        assert seen[f"vllm:{name}_seconds_count"] == 1


def step_with_drafts(*runs: tuple[int, int]) -> StepStats:
    """Return a step's statistics, one (drafted, accepted) a sequence."""
    outputs = tuple(
        SequenceOutput(i, ((7,) * (accepted + 1),), num_drafted=drafted)
        for i, (drafted, accepted) in enumerate(runs)
    )
    drafts = count_drafts(StepOutput(0, outputs))
    return StepStats(
        queues=QueueSizes(1, 0), kv_cache_usage=0.5, num_generation_tokens=9, drafts=drafts
    )


def test_drafts_are_counted_by_what_came_of_them_and_by_place() -> None:
    logger = prometheus()
    logger.record(step_with_drafts((4, 2), (3, 0), (0, 0), (2, 2)))
    logger.record(step_with_drafts((0, 0)))
    seen = values(logger)
    name = "pagemill:spec_decode_num"
    assert seen[f"{name}_drafts_total"] == 3
    assert seen[f"{name}_draft_tokens_total"] == 9
    assert seen[f"{name}_accepted_tokens_total"] == 4
    by_place = {
        m.labels["position"]: m.value for m in logger.metrics() if m.name.endswith("_per_pos")
    }
    assert by_place == {"0": 2, "1": 2, "2": 0, "3": 0}


def test_metrics_can_be_read_as_objects() -> None:
    logger = prometheus()
    engine, _ = make_engine(says("abc"), stat_loggers=[logger])
    engine.add_request("x", "12345", SamplingParams())
    run(engine)
    found = {m.name: m for m in logger.metrics() if "finished_reason" not in m.labels}
    assert found["pagemill:generation_tokens"].value == 4
    assert found["pagemill:generation_tokens"].kind == "counter"
    assert found["pagemill:generation_tokens"].labels["model_name"] == "fake"
    lengths = found["pagemill:request_prompt_tokens"]
    assert (lengths.kind, lengths.count, lengths.value) == ("histogram", 1, 5.0)
    assert (lengths.buckets["2.0"], lengths.buckets["5.0"]) == (0, 1)


def test_two_engines_in_a_process_do_not_share_metrics() -> None:
    first, second = prometheus(), prometheus()
    first.record(StepStats(queues=QueueSizes(3, 0), kv_cache_usage=0.5))
    assert values(first)["pagemill:num_requests_running"] == 3
    assert values(second)["pagemill:num_requests_running"] == 0


def test_length_buckets_end_at_the_context() -> None:
    assert length_buckets(64) == [1, 2, 5, 10, 20, 50]
    assert length_buckets(1) == [1]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list that the log's lines are appended to."""
    found: list[str] = []
    logger = logging.getLogger("pagemill.engine.stats")
    monkeypatch.setattr(logger, "info", lambda text, *args: found.append(text % args))
    return found


def test_one_line_each_interval_while_work_is_done(lines: list[str]) -> None:
    clock = Clock()
    logger = LoggingStatLogger(5.0, clock)
    step = StepStats(
        queues=QueueSizes(running=2, waiting=3),
        kv_cache_usage=0.25,
        num_prompt_tokens=10,
        num_generation_tokens=4,
    )
    for _ in range(51):
        logger.record(step)
        clock.now += 0.2
    assert len(lines) == 2
    assert "generation 20.8 tokens/s" in lines[0]
    for part in ("running 2", "waiting 3", "swapped 0", "25.0%"):
        assert part in lines[0]


def test_the_line_says_what_drafts_came_to_where_there_are_any(lines: list[str]) -> None:
    clock = Clock()
    logger = LoggingStatLogger(5.0, clock)
    for drafted in ((4, 2), (4, 0)):
        logger.record(step_with_drafts(drafted))
        clock.now += 2.6
    logger.record(step_with_drafts((0, 0)))
    assert lines[-1].endswith("drafts accepted 25.0% of 8 tokens, 2.00 tokens a step with one")
    clock.now += 5
    logger.record(step_with_drafts((0, 0)))
    assert "drafts" not in lines[-1]


def test_a_pause_gives_no_line_and_lowers_no_rate(lines: list[str]) -> None:
    clock = Clock()
    logger = LoggingStatLogger(5.0, clock)
    step = StepStats(queues=QueueSizes(1, 0), kv_cache_usage=0.1, num_generation_tokens=10)
    for _ in range(26):
        logger.record(step)
        clock.now += 0.2
    assert len(lines) == 1
    clock.now += 1000.0
    for _ in range(26):
        logger.record(step)
        clock.now += 0.2
    assert len(lines) == 2
    assert "generation 52.0 tokens/s" in lines[1]


@settings(deadline=None, max_examples=30)
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["add", "abort", "step"]), st.integers(0, 5)), max_size=40
    )
)
def test_every_started_request_is_counted_once_at_its_end(actions: list[tuple[str, int]]) -> None:
    stats = StatsList()
    engine, _ = make_engine(says("abcd"), stat_loggers=[stats], num_blocks=20)
    started, live = 0, 0
    for action, number in actions:
        if action == "add":
            live += 1
            engine.add_request(f"r{live}", "p" * (number + 1), SamplingParams(n=1 + number % 3))
            started += 1
        elif action == "abort":
            engine.abort_request(f"r{max(1, live - number)}")
        else:
            engine.step()
    run(engine)
    assert sum(len(step.finished) for step in stats.steps) == started
