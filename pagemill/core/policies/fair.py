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

Bounded waiting: where ever new tenants come and want more than there is, the least virtual time hardly grows, and one
that had much would wait for as long as they come. So a tenant of which nothing left the queue while `MOST_PASSED`
requests of others did is overdue, and while there are overdue ones every second admission is theirs, the one that
waits for longest first.

Virtual times are whole numbers, so that the largest weight beside the smallest costs no token its price. They only grow. So tenants are ordered by what their virtual time was when they were last looked at, and
put right when they come to the front: a token costs one addition, a plan a logarithm for each it admits.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from fractions import Fraction

from pagemill.core.policies.base import MOST_PASSED, Key, Policy, PolicySetting, WaitingQueue
from pagemill.core.policies.fcfs import arrival_key
from pagemill.core.sequence import Sequence, SequenceGroup
from pagemill.core.sequence_queue import SequenceQueue

_UNITS = 1 << 32  # of virtual time, that a token costs a tenant of the largest weight


class Tenant:
    """What the policy remembers of one tenant."""

    __slots__ = (
        "is_busy", "is_idle", "is_queued", "name", "num_unfinished", "number", "price", "virtual",
        "waiting",
    )  # fmt: skip

    def __init__(self, name: str, number: int, price: int, virtual: int) -> None:
        self.name = name
        self.number = number  # breaks ties; in order of appearance
        self.price = price  # of a token: units / weight
        self.virtual = virtual  # computed tokens * price
        self.num_unfinished = 0  # requests
        self.waiting = SequenceQueue(arrival_key)
        # Whether it has an entry in the heap of that name; each has one for a tenant at most.
        self.is_busy = self.is_idle = self.is_queued = False

    def __lt__(self, other: Tenant) -> bool:
        return self.number < other.number


# (virtual time when the entry was made, tenant): never more than the virtual time of now.
Heap = list[tuple[int, Tenant]]


class Tenants:
    """All tenants that count, by name."""

    def __init__(self, weights: dict[str, float]) -> None:
        self._weights = weights
        self._largest = Fraction(max([1.0, *weights.values()]))
        self._tenants: dict[str, Tenant] = {}
        self._num_made = 0
        self._floor = 0  # where a tenant without a past starts
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
            price = self._price(self._weights.get(name, 1.0))
            tenant = self._tenants[name] = Tenant(name, self._num_made, price, self._floor)
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

    def _price(self, weight: float) -> int:
        """Return what a token costs at this weight; exact to one part in `_UNITS`, whatever the weights."""
        return round(_UNITS * self._largest / Fraction(weight))

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
        self._num_left = 0
        # Tenants with waiting sequences -> how many had left when one of theirs did, or the first came; in that
        # order.
        self._since: OrderedDict[Tenant, int] = OrderedDict()

    def __len__(self) -> int:
        return self._length

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind its tenant's older ones."""
        tenant = self._tenants.of(sequence)
        tenant.waiting.add(sequence)
        self._length += 1
        self._since.setdefault(tenant, self._num_left)
        if not tenant.is_queued:
            self._looked_at[tenant] = None

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out that is queued."""
        tenant = self._tenants.of(sequence)
        tenant.waiting.remove(sequence)
        self._length -= 1
        self._num_left += 1
        del self._since[tenant]
        if len(tenant.waiting):
            self._since[tenant] = self._num_left

    def __iter__(self) -> Iterator[Sequence]:
        """Yield them by virtual times, and those of overdue tenants in every second place."""
        overdue, in_turn = self._overdue(), self._in_turn()
        yielded: set[int] = set()
        turn = in_turn if self._num_left % 2 else overdue
        while True:
            sequence = next((s for s in turn if s.seq_id not in yielded), None)
            if sequence is not None:
                yielded.add(sequence.seq_id)
                yield sequence
            elif turn is in_turn:
                return  # in turn come all of them
            turn = in_turn if turn is overdue else overdue

    def _overdue(self) -> Iterator[Sequence]:
        """Yield the oldest sequence of each tenant that was passed too often."""
        for tenant, since in self._since.items():
            if self._num_left - since < MOST_PASSED:
                return
            yield next(iter(tenant.waiting))

    def _in_turn(self) -> Iterator[Sequence]:
        """Yield them as they would be admitted one after the other, each for the price of its tokens."""
        order = self._order
        self._put_back()
        # (virtual time after what was yielded, tenant, its further sequences)
        turns: list[tuple[int, Tenant, Iterator[Sequence]]] = []
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
                price = max(0, sequence.num_tokens - sequence.num_served) * tenant.price
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
        tenant.virtual += num_new * tenant.price

    def note_end(self, group: SequenceGroup) -> None:
        """Count the request off."""
        self._tenants.leave(group.request.tenant)
