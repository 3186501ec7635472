"""What a step's planning does grows at most with the logarithm of the waiting queue, whatever the policy.

Counted, not timed: lines of Python that the planning wing runs, keys that sorted queues and heaps compare, and
sequences that are yielded by the queue.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from pagemill.config import SchedulerConfig
from pagemill.core.policies import POLICIES, fair, fcfs, prefix, priority, walled
from pagemill.core.scheduler import Scheduler
from pagemill.messages import SchedulerOutput, SequenceOutput, StepOutput
from tests.core.fake_ranks import make_request

REGISTERED = tuple(name for name in POLICIES.names() if name != "shuffled")
FEW, MANY = 500, 8_000
NUM_RUNNING = 10
NUM_STEPS = 16

# Who makes the keys that queues are sorted by.
KEYS: list[tuple[Any, str]] = [
    (fcfs, "arrival_key"),
    (fair, "arrival_key"),
    (prefix.PrefixQueue, "_key"),
    (priority, "turn_key"),
    (walled, "_size"),
]


class Operations:
    """Counts what happens while it is asked to."""

    def __init__(self) -> None:
        self.count = 0

    def during(self, act: Callable[[], Any]) -> Any:
        """Do something and count the lines that the planning wing runs."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return act()
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if "/pagemill/core/" in frame.f_code.co_filename else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.count += event == "line"
        return self._line

    def key(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that makes the same keys, whose comparisons are counted."""
        operations = self

        class Counted(tuple[Any, ...]):
            __slots__ = ()
            __hash__ = tuple.__hash__

            def __eq__(self, other: object) -> bool:
                operations.count += 1
                return tuple.__eq__(self, other)

            def __lt__(self, other: tuple[Any, ...]) -> bool:
                operations.count += 1
                return tuple.__lt__(self, other)

        return lambda *what: Counted(make(*what))


class Yielding:
    """An order of sequences that counts whom it yields."""

    def __init__(self, queue: Any, operations: Operations) -> None:
        self._queue = queue
        self._operations = operations

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Any]:
        for sequence in self._queue:
            self._operations.count += 1
            yield sequence


class Counting(Yielding):
    """The queue of the waiting, in both of its orders."""

    def __init__(self, queue: Any, operations: Operations) -> None:
        super().__init__(queue, operations)
        self.add, self.remove = queue.add, queue.remove
        self.smallest = Yielding(queue.smallest, operations)


class Service:
    """A scheduler in which one of a few running ends in each step, and one comes."""

    def __init__(self, policy: str, num_waiting: int, operations: Operations) -> None:
        self._operations = operations
        self._uses_priority = POLICIES.load(policy).uses_priority
        self._count = 0
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=4096, max_num_seqs=NUM_RUNNING, policy=policy),
            block_size=4,
            num_blocks=64 * NUM_RUNNING,
            max_model_len=128,
            caches_prefixes=True,
        )
        roster = self.scheduler._roster
        roster.waiting = Counting(roster.waiting, operations)  # type: ignore[assignment]
        for _ in range(NUM_RUNNING + num_waiting):
            self._add()

    def step(self) -> SchedulerOutput:
        """Run one step, and let the oldest running sequence end."""
        step = self._operations.during(self.scheduler.schedule)
        outputs = tuple(
            SequenceOutput(s.seq_id, ((7,),) if s.num_samples else ()) for s in step.scheduled
        )
        result = StepOutput(step.step_id, outputs)
        self._operations.during(lambda: self.scheduler.update(step, result))
        oldest = min(share.seq_id for share in step.scheduled)
        self._operations.during(lambda: self.scheduler.finish(oldest, "stop", "x"))
        self._operations.during(self._add)
        return step

    def _add(self) -> None:
        number = self._count
        self._count += 1
        stem = number % 7 * 100
        self.scheduler.add(
            make_request(
                f"r{number}",
                (*range(stem, stem + 5), *range(number, number + 4)),
                max_tokens=100,
                priority=number % 5 - 2 if self._uses_priority else 0,
                tenant=f"tenant{number * number % 13}",
                arrival_time=number / 100,
            )
        )


def operations_of(policy: str, num_waiting: int) -> int:
    """Return the most that one of some steps does."""
    operations = Operations()
    with pytest.MonkeyPatch.context() as patch:
        for place, name in KEYS:
            patch.setattr(place, name, operations.key(getattr(place, name)))
        service = Service(policy, num_waiting, operations)
        counts = []
        for _ in range(NUM_STEPS):
            before = operations.count
            service.step()
            counts.append(operations.count - before)
    return max(counts)


def growth(policy: str) -> float:
    """Return how many times as much the busiest step does with many waiting as with few."""
    return operations_of(policy, MANY) / operations_of(policy, FEW)


@pytest.mark.parametrize("policy", REGISTERED)
def test_a_step_does_about_as_much_with_many_waiting_as_with_few(policy: str) -> None:
    # A logarithm may grow by log(MANY) / log(FEW), 1.45 times; and not all that is done is that.
    assert growth(policy) < 1.25


def test_a_step_that_looks_all_of_the_queue_up_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "_PER_STEP", 1 << 30)
    assert growth("prefix") > 2
