"""Priority with ageing: lower numbers first, and nobody waits for ever.

A step of priority is worth `STEP_S` seconds of waiting: a request is served as if it had come
priority * STEP_S seconds later than it did. So a lower number passes what is not much older, equal ones are
served in order of arrival, and whoever has waited long enough is first whatever comes after.

Beyond `EVEN_STEPS` steps are worth less and less, so that no priority, however large, puts a request off by more
than `MOST_S` seconds, and none brings it forward by more: whoever has waited twice that is before all that come.
"""

from __future__ import annotations

from pagemill.core.policies.base import Key, Policy, PolicySetting, WaitingQueue
from pagemill.core.sequence import Sequence
from pagemill.core.sequence_queue import SequenceQueue

STEP_S = 30.0
EVEN_STEPS = 20
MOST_S = 2 * EVEN_STEPS * STEP_S  # 20 minutes


def delay_s(priority: int) -> float:
    """Return by how many seconds a priority puts a request off; rising, within -MOST_S and MOST_S."""
    steps = abs(priority)
    if steps > EVEN_STEPS:
        steps_worth = EVEN_STEPS * (2 - EVEN_STEPS / steps)
        return STEP_S * (steps_worth if priority > 0 else -steps_worth)
    return STEP_S * priority


def turn_key(sequence: Sequence) -> Key:
    """Return (when its turn is, in milliseconds; priority; number of the request; index of the sample)."""
    group, priority = sequence.group, sequence.group.request.priority
    turn_s = group.arrival_time + delay_s(priority)
    return (round(1000 * turn_s), priority, group.number, sequence.sample_index)


class Priority(Policy):
    """Serve the most urgent request first; the least urgent gives way first."""

    uses_priority = True

    def __init__(self, setting: PolicySetting) -> None:
        """Take nothing of the setting."""

    def make_queue(self) -> WaitingQueue:
        """Return a queue in order of turns."""
        return SequenceQueue(turn_key)

    def running_key(self, sequence: Sequence) -> Key:
        """Return the turn."""
        return turn_key(sequence)

    def victim_key(self, sequence: Sequence) -> Key:
        """Return the same key: whose turn is last gives way first."""
        return turn_key(sequence)
