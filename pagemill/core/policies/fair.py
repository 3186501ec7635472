"""Fair shares by tenant: weighted fair queueing over the tokens that are computed.

Each tenant has a virtual time: the tokens computed for it, prompt and output, over its weight. Tokens found
in the prefix cache and tokens computed again after a preemption cost it nothing. The waiting request of the
tenant with the least virtual time is admitted first, a tenant's own in order of arrival; when blocks run short
the newest sequence of the tenant with the most gives way. So tenants that always have work get tokens in
proportion to their weights, however many requests each of them sends, and one that floods the queue delays
itself.

A tenant that comes, or comes back after it had nothing here, starts at no less than the least virtual time of
those that have work: what it did not use is not saved up. (Sheng et al., "Fairness in Serving Large Language
Models", 2024, bound the difference in service that follows.) Its virtual time is forgotten once it
would not count any more.

Virtual times only grow. So tenants are ordered by what their virtual time was when they were last looked at, and
put right when they come to the front: a token costs one addition, a plan a logarithm for each it admits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from pagemill.core.policies.base import Key, Policy, PolicySetting, WaitingQueue
from pagemill.core.policies.fcfs import arrival_key
from pagemill.core.sequence import Sequence, SequenceGroup
from pagemill.core.sequence_queue import SequenceQueue


class Tenant:
    """What the policy remembers of one tenant."""

    __slots__ = (
        "is_busy", "is_idle", "is_queued", "name", "num_unfinished", "number", "virtual", "waiting",
        "weight",
    )  # fmt: skip

    def __init__(self, name: str, number: int, weight: float, virtual: float) -> None:
        self.name = name
        self.number = number  # breaks ties; in order of appearance
        self.weight = weight
        self.virtual = virtual  # computed tokens / weight
        self.num_unfinished = 0  # requests
        self.waiting = SequenceQueue(arrival_key)
        # Whether it has an entry in the heap of that name; each has one for a tenant at most.
        self.is_busy = self.is_idle = self.is_queued = False

    def __lt__(self, other: Tenant) -> bool:
        return self.number < other.number


# (virtual time when the entry was made, tenant): never more than the virtual time of now.
Heap = list[tuple[float, Tenant]]


class Tenants:
    """All tenants that count, by name."""

    def __init__(self, weights: dict[str, float]) -> None:
        self._weights = weights
        self._tenants: dict[str, Tenant] = {}
        self._num_made = 0
        self._floor = 0.0  # where a tenant without a past starts
        self._busy: Heap = []  # those with work, and some that had some
        self._idle: Heap = []  # those without, and some that have some again

    def __len__(self) -> int:
        return len(self._tenants)

    def of(self, sequence: Sequence) -> Tenant:
        """Return the tenant of an unfinished request."""
        return self._tenants[sequence.group.request.tenant]

    def arrive(self, name: str) -> None:
        """Count one more request."""
        self._raise_floor()
        tenant = self._tenants.get(name)
        if tenant is None:
            weight = self._weights.get(name, 1.0)
            tenant = self._tenants[name] = Tenant(name, self._num_made, weight, self._floor)
            self._num_made += 1
        if tenant.num_unfinished == 0:
            tenant.virtual = max(tenant.virtual, self._floor)
        if not tenant.is_busy:
            tenant.is_busy = True
            heapq.heappush(self._busy, (tenant.virtual, tenant))
        tenant.num_unfinished += 1

    def leave(self, name: str) -> None:
        """Count one request less."""
        tenant = self._tenants[name]
        tenant.num_unfinished -= 1
        if tenant.num_unfinished:
            return
        if not tenant.is_idle:
            tenant.is_idle = True
            heapq.heappush(self._idle, (tenant.virtual, tenant))
        self._raise_floor()
        if not self._busy:  # the last one that had work sets the time
            self._floor = max(self._floor, tenant.virtual)
            self._forget()

    def _raise_floor(self) -> None:
        """Take the least virtual time of those with work."""
        while self._busy:
            noted, tenant = self._busy[0]
            if tenant.num_unfinished == 0:
                heapq.heappop(self._busy)
                tenant.is_busy = False
            elif noted < tenant.virtual:
                heapq.heapreplace(self._busy, (tenant.virtual, tenant))
            else:
                self._floor = max(self._floor, noted)
                break
        self._forget()

    def _forget(self) -> None:
        """Drop the tenants without work that would start at the floor in any case."""
        while self._idle and self._idle[0][0] <= self._floor:
            _, tenant = heapq.heappop(self._idle)
            tenant.is_idle = False
            if tenant.num_unfinished:
                continue
            if tenant.virtual <= self._floor:
                del self._tenants[tenant.name]
            else:
                tenant.is_idle = True
                heapq.heappush(self._idle, (tenant.virtual, tenant))


class FairQueue:
    """The waiting, tenant by tenant in the order of their virtual times."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._length = 0
        self._order: Heap = []  # tenants with waiting sequences, and some that had some
        # Not in the order: taken out by the last iteration, or come since.
        self._looked_at: dict[Tenant, None] = {}

    def __len__(self) -> int:
        return self._length

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind its tenant's older ones."""
        tenant = self._tenants.of(sequence)
        tenant.waiting.add(sequence)
        self._length += 1
        if not tenant.is_queued:
            self._looked_at[tenant] = None

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out that is queued."""
        self._tenants.of(sequence).waiting.remove(sequence)
        self._length -= 1

    def __iter__(self) -> Iterator[Sequence]:
        """Yield them as they would be admitted one after the other, each for the price of its tokens."""
        order = self._order
        self._put_back()
        # (virtual time after what was yielded, tenant, its further sequences)
        turns: list[tuple[float, Tenant, Iterator[Sequence]]] = []
        while True:
            while order and (not turns or not turns[0][:2] < order[0]):
                _, tenant = heapq.heappop(order)
                tenant.is_queued = False
                self._looked_at[tenant] = None
                heapq.heappush(turns, (tenant.virtual, tenant, iter(tenant.waiting)))
            if not turns:
                return
            virtual, tenant, further = heapq.heappop(turns)
            sequence = next(further, None)
            if sequence is not None:
                price = max(0, sequence.num_tokens - sequence.num_served) / tenant.weight
                heapq.heappush(turns, (virtual + price, tenant, further))
                yield sequence

    def _put_back(self) -> None:
        for tenant in self._looked_at:
            if len(tenant.waiting) and not tenant.is_queued:
                tenant.is_queued = True
                heapq.heappush(self._order, (tenant.virtual, tenant))
        self._looked_at.clear()


class Fair(Policy):
    """Serve the tenant that has got least for its weight; the one that has got most gives way first."""

    uses_priority = False

    def __init__(self, setting: PolicySetting) -> None:
        self._tenants = Tenants(setting.tenant_weights)

    def make_queue(self) -> WaitingQueue:
        """Return a queue by tenants."""
        return FairQueue(self._tenants)

    def running_key(self, sequence: Sequence) -> Key:
        """Return the order of arrival."""
        return arrival_key(sequence)

    def victim_key(self, sequence: Sequence) -> Key:
        """Return (virtual time of the tenant, order of arrival)."""
        return (self._tenants.of(sequence).virtual, *arrival_key(sequence))

    def note_arrival(self, group: SequenceGroup) -> None:
        """Count the request for its tenant."""
        self._tenants.arrive(group.request.tenant)

    def note_computed(self, sequence: Sequence, start: int, end: int, num_new: int) -> None:
        """Charge new tokens to the tenant."""
        tenant = self._tenants.of(sequence)
        tenant.virtual += num_new / tenant.weight

    def note_end(self, group: SequenceGroup) -> None:
        """Count the request off."""
        self._tenants.leave(group.request.tenant)
