"""The whole planning wing against ranks that remember block contents, with random everything."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagemill.cache_layout import CacheLayout, plain_layout
from pagemill.config import SchedulerConfig, SpeculativeConfig
from pagemill.core.scheduler import Scheduler
from pagemill.messages import (
    EngineRequest,
    RequestDeadlines,
    SchedulerOutput,
    SequenceUpdate,
    StepOutput,
)
from tests.core.fake_ranks import (
    VOCAB,
    FakeRanks,
    draw_layout,
    expected_tokens,
    first_history,
    make_request,
    policy_names,
    tier_plan,
)

# Prompts begin with a piece of one of these, so that many have a prefix in common.
STEMS = tuple(tuple((stem * 31 + 7 * i) % VOCAB for i in range(64)) for stem in (1, 2))
SALTS = (None, None, "one", "two")


@dataclass
class Sample:
    """What came out for one sample."""

    token_ids: list[int] = field(default_factory=list)
    num_scores: int = 0
    finish_reason: str | None = None
    seq_id: int | None = None


class Simulation:
    """A scheduler, its ranks, and a caller who writes down what is delivered."""

    def __init__(
        self, num_blocks: int, block_size: int, max_model_len: int, max_tokens: int, max_seqs: int,
        policy: str = "fcfs", caches_prefixes: bool = False, num_slots: int = 0, mode: str = "auto",
        tenant_weights: dict[str, float] | None = None, num_drafts: int = 0,
        lasts: bool = False, layout: CacheLayout | None = None, overlaps: bool = False,
    ) -> None:  # fmt: skip
        config = SchedulerConfig(
            max_num_batched_tokens=max_tokens, max_num_seqs=max_seqs, policy=policy,
            preemption_mode=mode, tenant_weights=tenant_weights or {}, async_scheduling=overlaps,
        )  # fmt: skip
        self.now = 0.0
        self.max_model_len = max_model_len
        self.config = config
        self.scheduler = Scheduler(
            config, block_size=block_size, num_blocks=num_blocks, max_model_len=max_model_len,
            caches_prefixes=caches_prefixes, speculative=drafting(num_drafts),
            host_tier=tier_plan(num_slots, lasts=lasts) if num_slots else None, layout=layout,
            clock=lambda: self.now,
        )  # fmt: skip
        self.ranks = FakeRanks(num_blocks, block_size, layout)
        # Begun and not ended. What the ranks do they have done by then, but nobody knows.
        self.flight: list[tuple[SchedulerOutput, StepOutput]] = []
        self.num_overlapped = 0
        self.requests: dict[str, EngineRequest] = {}
        self.samples: dict[str, dict[int, Sample]] = {}
        self.prompt_scores: dict[str, list[int]] = {}
        self.ignored: set[str] = set()
        self.num_steps = 0
        self.num_preempted = 0
        self.expired: dict[str, str] = {}  # request_id -> the deadline that passed
        self.num_queried = self.num_hits = self.num_host_hits = self.num_swapped = 0

    def add(self, request: EngineRequest) -> None:
        self.scheduler.add(request)
        self.ranks.first[request.request_id] = first_history(request)
        self.requests[request.request_id] = request
        self.samples[request.request_id] = {}
        self.prompt_scores[request.request_id] = []

    def begin_step(self) -> tuple[SchedulerOutput, StepOutput]:
        for one in self.scheduler.expire():
            assert one.request_id not in self.expired
            self.expired[one.request_id] = one.deadline
            self.record(list(one.updates))
        step = self.scheduler.schedule()
        self._check_step(step)
        return step, self.ranks.execute(step)

    def end_step(self, step: SchedulerOutput, result: StepOutput) -> None:
        self.record(self.scheduler.update(step, result))

    def step(self) -> SchedulerOutput:
        self.begin_steps()
        step, result = self.flight.pop(0)
        self.end_step(step, result)
        self.scheduler.check_invariants()
        return step

    def begin_steps(self) -> None:
        """Begin a step, unless one is in flight, and another behind it."""
        if not self.flight:
            self.flight.append(self.begin_step())
        if self.scheduler.has_unfinished() and self.scheduler.may_overlap():
            self.num_overlapped += 1
            self.flight.append(self.begin_step())

    def _check_step(self, step: SchedulerOutput) -> None:
        self.num_steps += 1
        self.num_preempted += step.num_preempted
        self.num_queried += step.prefix_lookups.num_queried
        self.num_hits += step.prefix_lookups.num_hits
        self.num_host_hits += step.prefix_lookups.num_host_hits
        self.num_swapped += step.num_swapped_out
        for answer in step.ignored:
            assert answer.request_id not in self.ignored
            self.ignored.add(answer.request_id)
        num_drafts = sum(share.num_drafts for share in step.scheduled)
        assert step.num_tokens + num_drafts <= self.config.max_num_batched_tokens
        assert len(step.scheduled) <= self.config.max_num_seqs
        assert step.queues == self.scheduler.queue_sizes()
        if self.scheduler.has_unfinished() and not self.flight:
            assert step.scheduled, "something is unfinished and nothing runs"

    def record(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            sample = self.samples[update.request_id].setdefault(update.sample_index, Sample())
            assert sample.finish_reason is None, "news after the end"
            assert sample.seq_id in (None, update.seq_id), "another sequence for one sample"
            sample.seq_id = update.seq_id
            sample.token_ids.extend(update.token_ids)
            assert [s.token_id for s in update.scores] == list(update.token_ids)
            sample.num_scores += len(update.scores)
            sample.finish_reason = update.finish_reason
            self.prompt_scores[update.request_id].extend(
                int(-score.logprob) for score in update.prompt_scores
            )

    def run(self, max_steps: int = 100_000) -> None:
        """Step until everything has ended."""
        while self.scheduler.has_unfinished():
            self.step()
            assert self.num_steps < max_steps, "no end"
        while self.flight:
            self.step()
        self.step()  # drops the last rows
        last = self.scheduler.last_step()
        if last is not None:
            self.ranks.execute(last)
            self.scheduler.check_invariants()
        self.check_end()

    def check_end(self) -> None:
        assert self.scheduler.cache_usage() == 0.0
        assert self.scheduler.num_unfinished() == 0
        assert not self.ranks.rows, "rows of ended sequences"
        for request_id, request in self.requests.items():
            if request_id in self.ignored:
                assert not self.samples[request_id]
                continue
            samples = self.samples[request_id]
            assert sorted(samples) == list(range(request.num_samples))
            for index, sample in samples.items():
                self._check_sample(request, index, sample)
            self._check_prompt_scores(request)

    def _check_sample(self, request: EngineRequest, index: int, sample: Sample) -> None:
        expected = expected_tokens(request, index, self.max_model_len)
        assert sample.num_scores == len(sample.token_ids)
        if sample.finish_reason in ("abort", "error", "cut"):
            assert sample.token_ids == expected[: len(sample.token_ids)]
            return
        assert sample.token_ids == expected
        stops = request.eos_token_ids | request.stop_token_ids
        may_stop = len(expected) >= max(1, request.sampling.min_tokens)
        stopped = may_stop and expected[-1] in stops
        assert sample.finish_reason == ("stop" if stopped else "length")

    def _check_prompt_scores(self, request: EngineRequest) -> None:
        positions = self.prompt_scores[request.request_id]
        if request.sampling.prompt_logprobs is None:
            assert positions == []
            return
        whole = list(range(1, len(request.prompt_token_ids)))
        assert positions == whole[: len(positions)]
        if self.samples[request.request_id][0].token_ids:
            assert positions == whole


def drafting(num_drafts: int) -> SpeculativeConfig | None:
    """Return the settings under which every sequence always has so many drafts, 0: off."""
    if not num_drafts:
        return None
    return SpeculativeConfig(
        method="fake", num_speculative_tokens=num_drafts, adaptive_length=False, options={}
    )


class RandomService(RuleBasedStateMachine):
    """Requests, steps, aborts, string stops and failures in any order."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        block_size = data.draw(st.sampled_from([1, 2, 3, 4, 8]))
        max_model_len = data.draw(st.integers(2, 24))
        layout = plain_layout(block_size)
        if data.draw(st.booleans()):
            layout = draw_layout(data.draw(st.randoms()), block_size, max_model_len)
        least = layout.blocks_of_request(max_model_len)
        self.sim = Simulation(
            num_blocks=least + data.draw(st.integers(0, 2 * least)),
            block_size=block_size,
            max_model_len=max_model_len,
            max_tokens=data.draw(st.integers(1, 20)),
            max_seqs=data.draw(st.integers(1, 6)),
            policy=data.draw(st.sampled_from(policy_names())),
            caches_prefixes=data.draw(st.booleans()),
            num_drafts=data.draw(st.sampled_from([0, 1, 4, 9])),
            num_slots=data.draw(st.sampled_from([0, 1, least, 4 * least])),
            lasts=data.draw(st.booleans()),
            mode=data.draw(st.sampled_from(["auto", "swap", "recompute"])),
            layout=layout,
            overlaps=data.draw(st.booleans()),
        )
        self.num_added = 0

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        limit = self.sim.max_model_len
        stem = data.draw(st.sampled_from(STEMS))[: data.draw(st.integers(0, limit))]
        tail = st.lists(st.integers(0, VOCAB - 1), min_size=not stem, max_size=limit - len(stem))
        prompt = [*stem, *data.draw(tail)]
        scored = data.draw(st.booleans())
        max_tokens = data.draw(st.integers(0 if scored else 1, limit))
        every = data.draw(st.sampled_from([0, 3, 10]))
        ending = frozenset(range(0, VOCAB, every)) if every else frozenset()
        by_stop = data.draw(st.booleans())
        self.sim.add(
            make_request(
                f"r{self.num_added}",
                tuple(prompt),
                num_samples=data.draw(st.sampled_from([1, 1, 2, 3, 9])),
                max_tokens=max_tokens,
                min_tokens=data.draw(st.integers(0, max_tokens)),
                eos=frozenset() if by_stop else ending,
                stop_ids=ending if by_stop else frozenset(),
                prompt_logprobs=1 if scored else None,
                salt=data.draw(st.sampled_from(SALTS)),
                tenant=data.draw(st.sampled_from(["", "a", "b"])),
                deadlines=data.draw(st.sampled_from([None, None, self.deadlines(3, 20)])),
            )
        )
        self.num_added += 1

    def deadlines(self, start: float, end: float) -> RequestDeadlines:
        now = self.sim.now
        return RequestDeadlines(now, now + start, now + end)

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.sim.now += 1.0
            self.sim.step()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.num_added:
            self._abort(data.draw(st.integers(0, self.num_added - 1)))

    @rule(data=st.data())
    def abort_in_flight(self, data: st.DataObject) -> None:
        self.sim.begin_steps()
        for _ in range(data.draw(st.integers(1, 2))):
            if self.num_added:
                self._abort(data.draw(st.integers(0, self.num_added - 1)))
        self.sim.end_step(*self.sim.flight.pop(0))

    @rule(data=st.data())
    def cut_by_string(self, data: st.DataObject) -> None:
        live = [
            sample
            for samples in self.sim.samples.values()
            for sample in samples.values()
            if sample.finish_reason is None and sample.token_ids
        ]
        if live:
            sample = data.draw(st.sampled_from(live))
            assert sample.seq_id is not None
            self.sim.scheduler.finish(sample.seq_id, "stop", "x")
            self.sim.scheduler.finish(sample.seq_id, "stop", "x")
            sample.finish_reason = "cut"

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        if self.sim.ranks.rows:
            self.sim.ranks.fail = {data.draw(st.sampled_from(sorted(self.sim.ranks.rows)))}
            self.sim.step()

    @rule(data=st.data())
    def spoil(self, data: st.DataObject) -> None:
        """Some slots can be neither read nor written for a step; rarely it is the end of the tier."""
        self.sim.ranks.spoilt = data.draw(st.sets(st.integers(0, 12), max_size=6))
        self.sim.ranks.ends_tier = data.draw(st.integers(0, 9)) == 0
        self.sim.step()

    @rule()
    def forget(self) -> None:
        self.sim.scheduler.forget_prefixes()

    @invariant()
    def blocks_add_up(self) -> None:
        if hasattr(self, "sim"):
            self.sim.scheduler.check_invariants()

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            self.sim.ranks.fail = set()
            self.sim.run()

    def _abort(self, number: int) -> None:
        request_id = f"r{number}"
        updates = self.sim.scheduler.abort(request_id)
        assert all(update.finish_reason == "abort" for update in updates)
        self.sim.record(updates)
        if self.sim.requests[request_id] and not self.sim.samples[request_id]:
            assert request_id in self.sim.ignored
        assert self.sim.scheduler.abort(request_id) == []


TestRandomService = RandomService.TestCase
TestRandomService.settings = settings(
    deadline=None,
    max_examples=60,
    stateful_step_count=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.parametrize("overlaps", [False, True])
def test_crowded_service_gives_every_sample_its_own_tokens(overlaps: bool) -> None:
    swapped = []
    for seed in range(6):
        rng = random.Random(seed)
        block_size = rng.choice([2, 4, 16])
        max_model_len = 64
        least = -(-max_model_len // block_size)
        sim = Simulation(
            num_blocks=least + rng.randrange(2 * least),
            block_size=block_size,
            max_model_len=max_model_len,
            max_tokens=rng.choice([5, 16, 64]),
            max_seqs=rng.choice([2, 8, 32]),
            policy=rng.choice(policy_names()),
            caches_prefixes=seed % 2 == 0,
            num_drafts=seed % 3 * 3,
            num_slots=rng.choice([0, 3 * least]),
            overlaps=overlaps,
        )
        for number in range(25):
            stem = rng.choice(STEMS)[: rng.randrange(30)]
            prompt = (*stem, *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))))
            sim.add(
                make_request(
                    f"r{number}",
                    prompt,
                    num_samples=rng.choice([1, 1, 1, 4, 12]),
                    max_tokens=rng.randrange(1, 40),
                    prompt_logprobs=rng.choice([None, 1]),
                )
            )
            for _ in range(rng.randrange(3)):
                sim.step()
        sim.run(max_steps=20_000)
        assert sim.ranks.num_copies > 0
        swapped.append(sim.num_swapped)
        assert (sim.num_hits > 0) == (seed % 2 == 0)
        assert (sim.ranks.num_accepted > 0) == (seed % 3 > 0)
        assert (sim.num_overlapped > 0) == (overlaps and seed % 3 == 0)
    assert sum(swapped) > 0


def test_steps_that_overlap_cost_no_step_and_compute_no_token_twice() -> None:
    """Decodes that end where their caller said: nothing is guessed wrong, and the last step is no other."""
    counts = []
    for overlaps in (False, True):
        sim = Simulation(64, 4, 48, 64, 8, caches_prefixes=True, overlaps=overlaps)
        for number in range(6):
            sim.add(make_request(f"r{number}", 9 + number, max_tokens=20))
        sim.run()
        counts.append(sim.ranks.num_computed)
    assert counts[0] == counts[1]


def test_a_token_that_ends_a_sequence_costs_the_overlapping_step_one_place() -> None:
    eos = frozenset(range(0, VOCAB, 10))
    sim = Simulation(64, 4, 48, 64, 8, overlaps=True)
    for number in range(6):
        sim.add(make_request(f"r{number}", 9 + number, max_tokens=30, eos=eos))
    sim.run()
    stopped = [s for samples in sim.samples.values() for s in samples.values()]
    num_stopped = sum(s.finish_reason == "stop" for s in stopped)
    assert num_stopped > 0
    needed = sum(9 + n for n in range(6)) + sum(len(s.token_ids) - 1 for s in stopped)
    assert needed < sim.ranks.num_computed <= needed + num_stopped


def test_a_block_that_an_expected_token_fills_is_found_by_the_next_request() -> None:
    sim = Simulation(64, 4, 48, 64, 8, caches_prefixes=True, overlaps=True)
    first = make_request("first", 7, max_tokens=14)
    sim.add(first)
    sim.run()
    said = sim.samples["first"][0].token_ids
    sim.add(make_request("next", (*first.prompt_token_ids, *said), max_tokens=2))
    sim.run()
    assert sim.num_hits == 20  # five of the six blocks of 21 tokens; the last token is computed
