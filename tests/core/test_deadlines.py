"""Requests that run out of time are dropped, once, and give everything back."""

from __future__ import annotations

from pagemill.core.deadlines import Deadlines
from pagemill.core.sequence import SequenceGroup
from pagemill.messages import RequestDeadlines
from tests.core.fake_ranks import make_request
from tests.core.test_simulation import Simulation


def service(max_seqs: int = 1) -> Simulation:
    return Simulation(64, 4, max_model_len=64, max_tokens=8, max_seqs=max_seqs)


def within(start: float | None = None, end: float | None = None) -> RequestDeadlines:
    return RequestDeadlines(0.0, start, end)


def test_request_that_is_not_begun_in_time_is_dropped() -> None:
    sim = service()
    sim.add(make_request("first", 8, max_tokens=20))
    sim.add(make_request("late", 8, num_samples=2, deadlines=within(start=5.0)))
    sim.step()
    sim.now = 4.9
    sim.step()
    assert not sim.expired
    sim.now = 5.0
    (expired,) = sim.scheduler.expire()
    assert (expired.request_id, expired.deadline) == ("late", "start")
    assert "start_timeout is 5 s" in expired.message
    assert [u.finish_reason for u in expired.updates] == ["abort", "abort"]
    sim.record(list(expired.updates))
    sim.run()


def test_a_timeout_too_short_to_measure_is_not_told_as_0() -> None:
    sim = service()
    sim.now = 1e5
    for request_id, start, end in (
        ("start", sim.now + 1e-300, None),
        ("end", None, sim.now + 1e-9),
    ):
        deadlines = RequestDeadlines(sim.now, start, end)
        sim.add(make_request(request_id, 8, deadlines=deadlines))
        sim.now += 1
        (expired,) = sim.scheduler.expire()
        assert (
            f"its {request_id if start else 'request'}_timeout is less than 1e-06 s"
            in expired.message
        )
        sim.record(list(expired.updates))


def test_start_deadline_means_nothing_to_what_was_begun() -> None:
    sim = service()
    sim.add(make_request("long", 40, max_tokens=10, deadlines=within(start=1.0)))
    sim.step()
    sim.now = 100.0
    sim.run()
    assert not sim.expired
    assert len(sim.samples["long"][0].token_ids) == 10


def test_request_that_is_not_finished_in_time_keeps_what_it_made_and_frees_its_blocks() -> None:
    sim = service()
    sim.add(make_request("slow", 8, max_tokens=50, deadlines=within(end=3.0)))
    for _ in range(4):
        sim.step()
    sim.now = 3.0
    sim.step()
    assert sim.expired == {"slow": "end"}
    assert len(sim.samples["slow"][0].token_ids) == 4
    assert sim.scheduler.cache_usage() == 0.0
    sim.run()


def test_deadline_that_passes_in_a_prompt_of_several_steps_ends_it() -> None:
    sim = service()
    sim.add(make_request("long", 40, deadlines=within(end=1.0)))
    sim.step()
    sim.now = 2.0
    sim.run()
    assert sim.expired == {"long": "end"}


def test_finished_request_does_not_expire() -> None:
    sim = service()
    sim.add(make_request("quick", 4, max_tokens=2, deadlines=within(start=1.0, end=2.0)))
    sim.run()
    sim.now = 10.0
    assert sim.scheduler.expire() == []


def test_both_deadlines_at_once_are_one_expiry() -> None:
    sim = service()
    sim.add(make_request("both", 4, deadlines=within(start=1.0, end=1.0)))
    sim.now = 1.0
    assert [one.deadline for one in sim.scheduler.expire()] == ["end"]
    assert sim.scheduler.expire() == []


def test_entries_of_ended_requests_do_not_pile_up() -> None:
    deadlines = Deadlines()
    for number in range(20_000):
        request = make_request("r", 1, deadlines=within(start=1e9, end=1e9))
        group = SequenceGroup(request, number, num_unfinished=1)
        deadlines.add(group)
        group.num_unfinished = 0
    assert len(deadlines._heap) < 5000
