"""What a plan finds in the caches and what it counts, against the definition of both."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.cache_layout import CacheLayout
from pagemill.core.block_draft import BlockDraft
from pagemill.core.block_manager import BlockManager
from pagemill.core.host_tier import SwappedTable
from pagemill.core.prefix_cache import HostSlot
from pagemill.core.sequence import Sequence, SequenceGroup
from tests.core.fake_ranks import draw_layout, make_request

LENGTH = 60


class View:
    """A pool of which some blocks, and a tier of which some slots, hold what a sequence begins with."""

    def __init__(
        self, layout: CacheLayout, named: dict[bytes, int], slots: dict[bytes, int]
    ) -> None:
        self.layout = layout
        self.num_free = 1000
        self._named = named
        self._slots = slots

    def table(self, seq_id: int) -> list[int]:
        return []

    def tables(self, seq_id: int) -> list[list[int]]:
        return [[] for _ in self.layout.kinds]

    def ref_count(self, block: int) -> int:
        return block % 2

    def find(self, name: bytes) -> int | None:
        return self._named.get(name)

    def find_slot(self, name: bytes) -> int | None:
        return self._slots.get(name)

    def swapped(self, seq_id: int) -> SwappedTable | None:
        return None


def named_sequence(layout: CacheLayout, length: int) -> Sequence:
    request = make_request("a", length)
    sequence = Sequence(0, SequenceGroup(request, 0, 1), 0, request.prompt_token_ids, length)
    BlockManager(1, 1, caches_prefixes=True, layout=layout).name_blocks(sequence)
    return sequence


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32), st.integers(1, LENGTH), st.sampled_from([0.0, 0.05, 0.3]))
def test_the_longest_prefix_is_found_of_which_every_kind_has_what_it_sees(
    seed: int, length: int, missing: float
) -> None:
    rng = random.Random(seed)
    layout = draw_layout(rng, rng.choice([1, 2, 4]), LENGTH)
    sequence = named_sequence(layout, length)
    chains = [sequence.block_names, *sequence.more_names]
    there = [name for chain in chains for name in chain if rng.random() >= missing]
    named = {name: i for i, name in enumerate(there) if rng.random() < 0.7}
    slots = {name: i for i, name in enumerate(there) if name not in named}

    def is_found(end: int) -> bool:
        return all(
            chain[index] in named or chain[index] in slots
            for kind, chain in zip(layout.kinds, chains, strict=True)
            for index in range(kind.first_block(end), end // kind.block_tokens)
        )

    step = layout.step_tokens
    longest = max(end for end in range(0, length, step) if is_found(end))
    draft = BlockDraft(View(layout, named, slots))
    hits = draft.hits(sequence)
    assert hits.num_tokens == longest
    wanted = [
        chain[index]
        for kind, chain in zip(layout.kinds, chains, strict=True)
        for index in range(kind.first_block(longest), longest // kind.block_tokens)
    ]
    assert list(hits.blocks) == [
        named[name] if name in named else HostSlot(slots[name]) for name in wanted
    ]
    if hits:
        before = draft.free
        cost = draft.cost_of_all(sequence, hits)
        share = draft.first_that_fit(sequence, hits, length - longest, before - cost)
        chunks = [kind.chunk for kind in layout.kinds if kind.window is not None]
        assert share >= min(length - longest, *chunks), "a chunk was promised"
        draft.charge(sequence, share, hits)
        assert before - draft.free <= cost
