"""Every policy keeps what queues and planner rely on; the order of each."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.core.block_manager import BlockManager
from pagemill.core.host_tier import SwappedTable
from pagemill.core.planner import MOST_PASSES
from pagemill.core.policies import POLICIES
from pagemill.core.policies.base import MOST_PASSED, PolicySetting
from pagemill.core.policies.fair import Tenants
from pagemill.core.policies.priority import MOST_S, STEP_S, Priority, delay_s
from pagemill.core.sequence import Sequence
from tests.core.fake_ranks import NO_PREFIXES, expected_tokens, make_request, policy_names
from tests.core.test_planner import FCFS, make_sequence
from tests.core.test_simulation import Simulation


def arrived(name: str, *sequences: Sequence) -> object:
    """Return a policy that was told of the sequences' requests."""
    policy = POLICIES.load(name)(NO_PREFIXES)
    for group in {id(s.group): s.group for s in sequences}.values():
        policy.note_arrival(group)
    return policy


@pytest.mark.parametrize("name", policy_names())
def test_keys_are_distinct_and_do_not_change_while_a_sequence_runs(name: str) -> None:
    root = make_sequence(0, 5)
    sequences = [root, root.fork(1, 1), root.fork(2, 2), make_sequence(3, 5), make_sequence(4, 5)]
    policy = arrived(name, *sequences)
    for key in (policy.running_key, policy.victim_key):
        before = [key(sequence) for sequence in sequences]
        assert len(set(before)) == len(before)
        for sequence in sequences:
            sequence.append((1, 2), 0.0)
            sequence.num_computed = 3
            sequence.num_preemptions += 1
        assert [key(sequence) for sequence in sequences] == before


@pytest.mark.parametrize("name", policy_names())
@settings(deadline=None, max_examples=40)
@given(
    acts=st.lists(st.tuples(st.sampled_from("arl"), st.integers(0, 30)), max_size=60),
    data=st.data(),
)
def test_a_queue_yields_everyone_once_and_the_same_twice(
    name: str, acts: list[tuple[str, int]], data: st.DataObject
) -> None:
    """`a`: one comes; `r`: one leaves; `l`: somebody looks at some of them."""
    policy = POLICIES.load(name)(NO_PREFIXES)
    queue = policy.make_queue()
    queued: list[Sequence] = []
    for number, (act, at) in enumerate(acts):
        if act == "a":
            sequence = make_sequence(number, 1 + at)
            sequence.group.request = make_request(f"r{number}", 1 + at, tenant=str(at % 4))
            policy.note_arrival(sequence.group)
            queue.add(sequence)
            queued.append(sequence)
        elif act == "r" and queued:
            sequence = queued.pop(at % len(queued))
            queue.remove(sequence)
            if data.draw(st.booleans()):
                policy.note_computed(sequence, 0, sequence.num_tokens, sequence.num_tokens)
            policy.note_end(sequence.group)
        else:
            looking = iter(queue)
            for _ in range(at):
                next(looking, None)
        order = list(queue)
        assert {s.seq_id for s in order} == {s.seq_id for s in queued}
        assert len(order) == len(queued) == len(queue)
        assert list(queue) == order


def test_fcfs_serves_requests_in_order_and_samples_by_index_whenever_they_were_forked() -> None:
    first, second = make_sequence(0, 5), make_sequence(1, 5)
    fork = first.fork(7, 1)
    queue = FCFS.make_queue()
    for sequence in (second, fork, first):
        queue.add(sequence)
    assert list(queue) == [first, fork, second]
    assert sorted([second, fork, first], key=FCFS.victim_key) == [first, fork, second]


def served(*requests: tuple[str, int, float]) -> list[str]:
    """Return the order in which one seat serves (name, priority, arrival in seconds)."""
    sim = Simulation(64, 4, max_model_len=64, max_tokens=64, max_seqs=1, policy="priority")
    for name, priority, arrival_time in requests:
        sim.add(make_request(name, 8, priority=priority, arrival_time=arrival_time))
    return order_of(sim)


def order_of(sim: Simulation) -> list[str]:
    """Run to the end; return the requests in the order of their first tokens."""
    order: list[str] = []
    while sim.scheduler.has_unfinished():
        sim.step()
        order += [name for name, samples in sim.samples.items() if samples and name not in order]
    return order


def test_lower_priority_numbers_are_served_first_and_arrival_breaks_ties() -> None:
    order = served(("low", 5, 0.0), ("plain", 0, 1.0), ("urgent", -1, 2.0), ("later", 0, 3.0))
    assert order == ["urgent", "plain", "later", "low"]


def test_waiting_makes_up_for_priority() -> None:
    assert served(("old", 1, 0.0), ("new", 0, STEP_S - 1)) == ["new", "old"]
    assert served(("old", 1, 0.0), ("new", 0, STEP_S + 1)) == ["old", "new"]


def test_no_priority_puts_a_request_off_without_end() -> None:
    numbers = [*range(-100, 101), 10**4, 2**31 - 1]
    delays = [delay_s(number) for number in numbers]
    assert all(a < b for a, b in pairwise(delays)), "a larger number never comes first"
    assert delays[-1] <= MOST_S
    assert delay_s(-(2**31)) >= -MOST_S
    assert delay_s(1) == STEP_S
    last, first = 2**31 - 1, -(2**31)
    assert served(("old", last, 0.0), ("new", first, 2 * MOST_S - 1)) == ["new", "old"]
    assert served(("old", last, 0.0), ("new", first, 2 * MOST_S + 1)) == ["old", "new"]
    assert served(("a", last, 0.0), ("b", last - 1, 0.0)) == ["b", "a"]


@pytest.mark.parametrize("priority", [1, 2])
def test_under_urgent_work_that_never_stops_a_low_request_ends_when_its_turn_has_come(
    priority: int,
) -> None:
    # Three come a second, and about one is served: what waits grows without end, and so would the
    # wait of whoever is behind all of it. Blocks are short, so that running ones give way as well.
    sim = Simulation(20, 4, max_model_len=64, max_tokens=40, max_seqs=3, policy="priority")
    sim.add(make_request("low", 40, max_tokens=12, priority=priority, arrival_time=0.0))
    turn_s = priority * STEP_S
    passed: set[str] = set()
    second = 0
    while "low" in sim.scheduler._roster.groups:
        for number in range(3):
            name = f"urgent{second}.{number}"
            arrival_time = second + number / 3
            sim.add(make_request(name, 16, max_tokens=4, arrival_time=arrival_time))
            if arrival_time > turn_s:
                passed.add(name)
        sim.step()
        second += 1
        assert second < 12 * turn_s, "starved"
    assert second > turn_s, "low work went first"
    # Of those that came after its turn only a few, which fit where it did not, began before its end.
    began = [name for name in passed if sim.samples[name]]
    assert len(began) <= MOST_PASSES + 3


def test_running_sequence_with_the_last_turn_gives_way() -> None:
    policy = Priority(NO_PREFIXES)
    urgent, low = make_sequence(0, 5), make_sequence(1, 5)
    low.group.request = make_request("low", 5, priority=3)
    assert max([urgent, low], key=policy.victim_key) is low


# ---------------------------------------------------------------- fair


def one_seat(policy: str, **settings: object) -> Simulation:
    """Return a service with a single seat: the order of admission is the order of service."""
    return Simulation(64, 4, max_model_len=64, max_tokens=64, max_seqs=1, policy=policy, **settings)


def test_tenants_take_turns_however_many_requests_one_sends() -> None:
    sim = one_seat("fair")
    for number in range(6):
        sim.add(make_request(f"flood{number}", 8, tenant="flood"))
    for number in range(2):
        sim.add(make_request(f"other{number}", 8, tenant="other"))
    order = order_of(sim)
    assert [name[:5] for name in order[:4]] == ["flood", "other", "flood", "other"]


def test_tokens_count_and_not_requests() -> None:
    sim = one_seat("fair")
    for number in range(4):
        sim.add(make_request(f"long{number}", 30, max_tokens=10, tenant="long"))
        sim.add(make_request(f"tiny{number}", 5, max_tokens=5, tenant="tiny"))
    # One long request is served for four short ones.
    assert order_of(sim) == ["long0", "tiny0", "tiny1", "tiny2", "tiny3", "long1", "long2", "long3"]


def test_weights_give_shares() -> None:
    sim = one_seat("fair", tenant_weights={"heavy": 3.0})
    for number in range(12):
        sim.add(make_request(f"heavy{number}", 8, tenant="heavy"))
        sim.add(make_request(f"light{number}", 8, tenant="light"))
    first = [name[:5] for name in order_of(sim)[:12]]
    assert first.count("heavy") == 9


@pytest.mark.parametrize(
    "weights",
    [{"heir": 5e-324}, {"heir": 1e-17}, {"a": 1e308, "b": 1e308}, {"a": 10**400, "b": 10**400}],
)
def test_no_weight_of_anybody_makes_the_others_tokens_free(weights: dict[str, float]) -> None:
    sim = one_seat("fair", tenant_weights=weights)
    for number in range(4):
        sim.add(make_request(f"heir{number}", 20, tenant="heir"))
    sim.run()
    for number in range(8):
        sim.add(make_request(f"a{number}", 8, tenant="a"))
    for number in range(8):
        sim.add(make_request(f"b{number}", 8, tenant="b"))
    order = [name[0] for name in order_of(sim) if name[0] != "h"]
    assert order == ["a", "b"] * 8


def test_tenant_that_had_much_is_served_while_ever_new_ones_come() -> None:
    """They want all there is, and each starts at the least virtual time, which hardly grows."""
    sim = Simulation(400, 8, max_model_len=200, max_tokens=64, max_seqs=4, policy="fair")
    num_new, num_before = 0, None
    sim.add(make_request("first", 20, max_tokens=150, tenant="regular"))
    while not sim.samples.get("again"):
        sim.add(make_request(f"new{num_new}", 10, max_tokens=4, tenant=f"user{num_new}"))
        num_new += 1
        sim.step()
        first = sim.samples["first"].get(0)
        if num_before is None and first is not None and first.finish_reason is not None:
            num_before = num_new
            sim.add(make_request("again", 20, tenant="regular"))
        assert num_before is None or num_new <= num_before + MOST_PASSED + 20, "it is starved"
    assert num_before is not None
    assert num_new > num_before + 20  # it had much, and that still counts
    for name in list(sim.samples):
        sim.scheduler.abort(name)


def test_overdue_tenants_get_every_second_admission_and_no_more() -> None:
    late = [f"late{number}" for number in range(8)]
    sim = one_seat(
        "fair", tenant_weights=dict.fromkeys(late, 1e-6)
    )  # one request is all that is theirs
    for name in late:
        sim.add(make_request(f"once-{name}", 8, max_tokens=1, tenant=name))
        sim.add(make_request(f"{name}-again", 8, max_tokens=1, tenant=name))
    for number in range(MOST_PASSED + 40):
        sim.add(make_request(f"flood{number}", 8, max_tokens=1, tenant="flood"))
    order = [name[:5] for name in order_of(sim)]
    start = order.index("late0")
    assert MOST_PASSED <= start <= MOST_PASSED + 2
    between = {name[:4] for name in order[start + 1 : start + 15 : 2]}
    assert [name[:4] for name in order[start : start + 15 : 2]] == ["late"] * 8
    assert between == {"floo"}


def test_tenant_that_comes_late_does_not_get_what_it_missed() -> None:
    sim = one_seat("fair")
    for number in range(20):
        sim.add(make_request(f"early{number}", 8, tenant="early"))
    for _ in range(40):
        sim.step()
    for number in range(10):
        sim.add(make_request(f"later{number}", 8, tenant="later"))
    order = order_of(sim)
    behind = order[order.index("later0") :]
    assert [name[:5] for name in behind[:6]] == ["later", "early"] * 3


def test_newest_sequence_of_the_tenant_with_most_gives_way() -> None:
    old, new, other = (make_sequence(number, 5) for number in range(3))
    for sequence, tenant in ((old, "a"), (new, "a"), (other, "b")):
        name = f"r{sequence.seq_id}"
        sequence.group.request = make_request(name, 5, tenant=tenant)
    policy = arrived("fair", old, new, other)
    policy.note_computed(old, 0, 5, 5)
    assert sorted([old, new, other], key=policy.victim_key) == [other, old, new]


def test_one_tenant_that_floods_costs_the_others_little() -> None:
    """Beside a flood, another tenant's wait is that of a service it shares with one tenant."""
    waits = {}
    for policy in ("fcfs", "fair"):
        sim = Simulation(64, 4, max_model_len=64, max_tokens=64, max_seqs=4, policy=policy)
        for number in range(60):
            sim.add(make_request(f"flood{number}", 16, max_tokens=8, tenant="flood"))
        sim.step()
        sim.add(make_request("other", 16, max_tokens=8, tenant="other"))
        while not sim.samples["other"]:
            sim.step()
        waits[policy] = sim.num_steps
        sim.run()
    assert waits["fair"] <= 12 < 60 < waits["fcfs"]


def test_tenants_that_do_not_count_any_more_are_forgotten() -> None:
    tenants = Tenants({})
    tenants.arrive("stays")
    for number in range(1000):
        tenants.arrive(f"user{number}")
        tenants.leave(f"user{number}")
    assert len(tenants) <= 2
    tenants.leave("stays")
    assert len(tenants) == 0


def test_tokens_computed_twice_or_found_in_the_cache_are_not_charged() -> None:
    sim = Simulation(
        9, 4, max_model_len=32, max_tokens=64, max_seqs=8, policy="fair", caches_prefixes=True
    )
    charged = 0

    def note(sequence: Sequence, start: int, end: int, num_new: int) -> None:
        nonlocal charged
        charged += num_new

    sim.scheduler._policy.note_computed = note  # type: ignore[method-assign]
    for number in range(6):
        sim.add(make_request(f"r{number}", 9, max_tokens=8))
    sim.run()
    assert sim.num_preempted > 0
    assert sim.num_hits > 0
    # Every token but the last is computed once; hits of first admissions were not computed.
    assert charged == 6 * (9 + 8 - 1) - sim.num_hits


@pytest.mark.parametrize(("num_drafts", "overlaps"), [(5, False), (0, True)])
def test_every_token_is_charged_once_however_steps_are_made(
    num_drafts: int, overlaps: bool
) -> None:
    sim = Simulation(
        10, 4, max_model_len=40, max_tokens=64, max_seqs=8, policy="fair", num_drafts=num_drafts,
        overlaps=overlaps,
    )  # fmt: skip
    charged = {"a": 0, "b": 0}

    def note(sequence: Sequence, start: int, end: int, num_new: int) -> None:
        charged[sequence.group.request.tenant] += num_new

    sim.scheduler._policy.note_computed = note  # type: ignore[method-assign]
    for number in range(6):
        sim.add(make_request(f"r{number}", 9, max_tokens=20, tenant="ab"[number % 2]))
    sim.run()
    assert sim.num_preempted > 0
    assert (sim.ranks.num_accepted > 0) == (num_drafts > 0)
    assert charged == {"a": 3 * (9 + 20 - 1), "b": 3 * (9 + 20 - 1)}


# ---------------------------------------------------------------- prefix


def prefix_service(max_seqs: int = 1) -> Simulation:
    return Simulation(
        256, 4, max_model_len=64, max_tokens=256, max_seqs=max_seqs, policy="prefix",
        caches_prefixes=True,
    )  # fmt: skip


def document(kind: int, tail: int) -> tuple[int, ...]:
    """Return a prompt of 20 shared tokens and 3 of its own."""
    return (*range(kind * 100, kind * 100 + 20), 900 + tail, 901 + tail, 902 + tail)


def test_longest_cached_prefix_is_first_also_of_what_is_computed_while_they_wait() -> None:
    sim = prefix_service()
    for number in range(9):
        sim.add(make_request(f"doc{number % 3}_{number}", document(number % 3, number)))
    kinds = [name[:4] for name in order_of(sim)]
    assert kinds == ["doc0"] * 3 + ["doc1"] * 3 + ["doc2"] * 3
    assert sim.num_hits == 6 * 20


def test_what_came_with_a_cached_prefix_passes_what_came_without() -> None:
    sim = prefix_service()
    sim.add(make_request("first", document(0, 0)))
    sim.run()
    sim.add(make_request("other", document(1, 1)))
    sim.add(make_request("again", document(0, 2)))
    assert order_of(sim)[1:] == ["again", "other"]


@pytest.mark.parametrize(("num_drafts", "overlaps"), [(5, False), (0, True)])
def test_what_is_said_by_one_request_brings_those_forward_that_begin_with_it(
    num_drafts: int, overlaps: bool
) -> None:
    """Also where blocks are full of drafts that were right, or of a token that a step in flight draws."""
    sim = Simulation(
        256, 4, max_model_len=64, max_tokens=256, max_seqs=1, policy="prefix",
        caches_prefixes=True, num_drafts=num_drafts, overlaps=overlaps,
    )  # fmt: skip
    first = make_request("first", document(0, 0), max_tokens=24)
    said = expected_tokens(first, 0, 64)
    sim.add(first)
    sim.step()
    sim.add(make_request("other", document(1, 1), max_tokens=1))
    sim.add(make_request("after", (*first.prompt_token_ids, *said, 5), max_tokens=1))
    queue = sim.scheduler._policy._policy._queue  # type: ignore[attr-defined]
    while len(sim.samples["first"]) == 0 or len(sim.samples["first"][0].token_ids) < 20:
        sim.step()
    names = [sequence.group.request_id for sequence in queue]
    depths = [queue._depths[sequence.seq_id] for sequence in queue]
    num_said = len(sim.samples["first"][0].token_ids)
    assert names[0] == "after"
    assert depths[0] >= (23 + num_said - 1) // 4
    sim.run()


def test_evicted_prefix_does_not_count() -> None:
    sim = prefix_service()
    sim.add(make_request("first", document(0, 0)))
    sim.run()
    sim.add(make_request("holder", document(3, 3)))
    sim.step()
    sim.add(make_request("other", document(1, 1)))
    sim.add(make_request("again", document(0, 2)))
    sim.scheduler.forget_prefixes()
    assert order_of(sim)[1:] == ["holder", "other", "again"]


def test_request_without_cached_prefix_waits_for_so_many_others_at_most() -> None:
    sim = prefix_service()
    sim.add(make_request("warm", document(0, 0), max_tokens=1))
    sim.step()
    sim.add(make_request("cold", document(1, 1), max_tokens=1))
    passed = 0
    while not sim.samples["cold"]:
        for _ in range(2):
            sim.add(make_request(f"hit{passed}_{sim.num_steps}_{_}", document(0, 2), max_tokens=1))
        sim.step()
        passed += 1
        assert passed <= MOST_PASSED + 2, "it is starved"
    assert passed > MOST_PASSED // 2
    sim.run()


def test_overdue_ones_get_every_second_admission_where_a_step_has_one() -> None:
    sim = prefix_service()
    sim.add(make_request("warm", document(0, 0), max_tokens=1))
    sim.step()
    for number in range(8):
        sim.add(make_request(f"cold{number}", document(1 + number, 1), max_tokens=1))
    for number in range(MOST_PASSED + 40):
        sim.add(make_request(f"hit{number}", document(0, 2 + number), max_tokens=1))
    order = [name[:3] for name in order_of(sim)][1:]
    start = order.index("col")
    assert order[start : start + 4] == ["col", "hit", "col", "hit"]


def test_many_that_wait_for_one_prefix_are_looked_up_some_a_step() -> None:
    blocks = BlockManager(64, 4, caches_prefixes=True)
    policy = POLICIES.load("prefix")(PolicySetting(blocks))
    queue = policy.make_queue()
    sequences = []
    for number in range(500):
        sequence = make_sequence(number, 1)
        sequence.prompt_token_ids = document(0, number)
        sequence.num_tokens = 23
        blocks.name_blocks(sequence)
        sequences.append(sequence)
        queue.add(sequence)
    first = sequences[-1]
    queue.remove(first)
    blocks.extend(first.seq_id, 0, 23)
    blocks.seal(first, 0, 23)
    policy.note_computed(first, 0, 23, 23)
    num_lookups = 0
    find = blocks.find

    def counted(name: bytes) -> int | None:
        nonlocal num_lookups
        num_lookups += 1
        return find(name)

    blocks.find = counted  # type: ignore[method-assign]
    for _ in range(10):
        before = num_lookups
        assert next(iter(queue)) is sequences[0]
        assert num_lookups - before < 1000
    assert {queue._depths[s.seq_id] for s in sequences[:-1]} == {5}


class Tiers:
    """An index of two tiers: names of blocks on the device, in the host tier, and swapped tokens."""

    block_size = 4

    def __init__(self) -> None:
        self.device: set[bytes] = set()
        self.host: set[bytes] = set()
        self.tables: dict[int, SwappedTable] = {}

    def find(self, name: bytes) -> int | None:
        return 0 if name in self.device else None

    def find_slot(self, name: bytes) -> int | None:
        return 0 if name in self.host else None

    def swapped(self, seq_id: int) -> SwappedTable | None:
        return self.tables.get(seq_id)


def test_what_the_host_tier_has_counts_as_cached() -> None:
    tiers = Tiers()
    queue = POLICIES.load("prefix")(PolicySetting(tiers)).make_queue()
    plain, known, swapped = (make_sequence(number, 12) for number in range(3))
    for sequence in (plain, known, swapped):
        sequence.block_names.extend(b"%d-%d" % (sequence.seq_id, i) for i in range(3))
    tiers.device = {b"1-0"}
    tiers.host = {b"1-1"}
    tiers.tables = {2: SwappedTable((0, 1, 2), 12)}
    for sequence in (plain, known, swapped):
        queue.add(sequence)
    assert list(queue) == [swapped, known, plain]
    tiers.host.clear()
    tiers.tables.clear()
    assert list(queue) == [known, plain, swapped]


@pytest.mark.parametrize("policy", policy_names())
def test_a_short_request_never_waits_for_the_whole_of_a_long_prompt(policy: str) -> None:
    sim = Simulation(4000, 16, max_model_len=1024, max_tokens=64, max_seqs=64, policy=policy)
    for number in range(60):
        sim.add(make_request(f"long{number}", 900, max_tokens=2))
    sim.add(make_request("short", 5, max_tokens=2))
    for _ in range(4):
        sim.step()
    assert sim.samples["short"]
    assert not any(sim.samples[f"long{number}"] for number in range(60))
