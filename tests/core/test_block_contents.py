"""Model checking of the blocks: what each one holds is simulated, so that a wrong reuse is seen.

Thousands of random workloads (hundreds in a usual run) drive the real scheduler and block manager against ranks that write down the
history every slot holds. After every step: free + used + cached = total; each block that the index can
find holds, slot by slot, the history its name stands for; at the end every block is back, whatever the
ends were (stops, lengths, aborts, string stops, errors, an emptied cache, a tier that lost what it had).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from pagemill.cache_layout import plain_layout
from pagemill.core import prefix_cache
from pagemill.core import sequence as core_sequence
from pagemill.core.block_pool import BlockPool
from tests.core.fake_ranks import (
    VOCAB,
    content,
    draw_layout,
    extend_history,
    first_history,
    make_request,
    policy_names,
)
from tests.core.test_simulation import SALTS, STEMS, Simulation


class Workload:
    """One random service, and what the name of every block in it stands for."""

    def __init__(self, seed: int, *, windows: bool = False) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        block_size = rng.choice([1, 2, 4, 8])
        max_model_len = rng.randrange(4, 33)
        layout = plain_layout(block_size)
        if windows:
            layout = draw_layout(rng, block_size, max_model_len)
        self.layout = layout
        least = layout.blocks_of_request(max_model_len)
        self.sim = Simulation(
            num_blocks=least + rng.randrange(2 * least + 1),
            block_size=block_size,
            max_model_len=max_model_len,
            max_tokens=rng.choice([1, 3, 8, 64]),
            max_seqs=rng.choice([1, 2, 4, 8]),
            policy=rng.choice(policy_names()),
            caches_prefixes=rng.random() < 0.8,
            num_slots=rng.choice([0, 2, least, 4 * least]),
            mode=rng.choice(["auto", "auto", "swap", "recompute"]),
            lasts=rng.random() < 0.4,
            num_drafts=rng.choice([0, 0, 1, 4, 9]) if windows else 0,
            layout=layout,
        )
        self.histories: dict[bytes, tuple[int, ...]] = {}  # block name -> what its slots hold
        self.num_added = 0
        self.seen: dict[int, core_sequence.Sequence] = {}

    def run(self) -> None:
        """Add, step and end at random, then drain; look at the contents after every step."""
        for _ in range(self.rng.randrange(4, 12)):
            for _ in range(self.rng.randrange(3)):
                self.add()
            self.disturb()
            self.step()
        self.sim.ranks.fail = set()
        while self.sim.scheduler.has_unfinished():
            self.step()
        self.step()
        last = self.sim.scheduler.last_step()
        if last is not None:
            self.sim.ranks.execute(last)
            self.check_contents()
        self.sim.check_end()

    def add(self) -> None:
        rng, limit = self.rng, self.sim.max_model_len
        stem = rng.choice(STEMS)[: rng.randrange(limit)]
        prompt = (*stem, *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6))))[: limit - 1]
        request = make_request(
            f"r{self.num_added}",
            prompt,
            num_samples=rng.choice([1, 1, 1, 2, 4]),
            max_tokens=rng.randrange(1, 12),
            eos=frozenset(range(0, VOCAB, 7)) if rng.random() < 0.3 else frozenset(),
            prompt_logprobs=1 if rng.random() < 0.2 else None,
            salt=rng.choice(SALTS),
        )
        self.num_added += 1
        self.sim.add(request)

    def disturb(self) -> None:
        """Abort, cut, break or forget, sometimes."""
        rng, sim = self.rng, self.sim
        kind = rng.randrange(12)
        if kind == 0 and self.num_added:
            sim.record(sim.scheduler.abort(f"r{rng.randrange(self.num_added)}"))
        elif kind == 1:
            live = [
                sample
                for samples in sim.samples.values()
                for sample in samples.values()
                if sample.finish_reason is None and sample.token_ids
            ]
            if live:
                sample = rng.choice(live)
                assert sample.seq_id is not None
                sim.scheduler.finish(sample.seq_id, "stop", "x")
                sample.finish_reason = "cut"
        elif kind == 2 and sim.ranks.rows:
            sim.ranks.fail = {rng.choice(sorted(sim.ranks.rows))}
        elif kind == 3:
            sim.scheduler.forget_prefixes()
        elif kind == 4:
            sim.ranks.spoilt = set(rng.sample(range(12), 6))
        elif kind == 5 and rng.random() < 0.2:
            sim.ranks.ends_tier = True

    def step(self) -> None:
        step, result = self.sim.begin_step()
        self.note_names()
        if result.lost is None:
            self.check_contents()  # blocks are sealed when a step is committed, and hold it now
        self.sim.end_step(step, result)
        self.sim.scheduler.check_invariants()
        self.note_names()
        self.check_windows()
        if result.lost is not None:
            self.check_contents()
        pool = self.pool
        assert pool.num_free + pool.num_used + pool.num_cached == pool.num_blocks

    def check_windows(self) -> None:
        """Assert that between two steps nobody holds what nobody reads."""
        blocks = self.sim.scheduler._blocks
        for seq_id in blocks.holders():
            sequence = self.sim.scheduler._roster.sequences[seq_id]
            assert blocks.num_let_go(sequence) == [
                min(kind.first_block(sequence.num_computed), len(table))
                for kind, table in zip(self.layout.kinds, blocks.tables(seq_id), strict=True)
            ], "a block that nobody reads is held"

    @property
    def pool(self) -> BlockPool:
        return self.sim.scheduler._blocks._pool

    def note_names(self) -> None:
        """Write down what names stand for: the histories of the tokens they were made of."""
        self.seen.update(self.sim.scheduler._roster.sequences)
        for (
            sequence
        ) in self.seen.values():  # ended ones too: with drafts, the last step seals as well
            names = [sequence.block_names, *sequence.more_names]
            for number, (kind, own) in enumerate(zip(self.layout.kinds, names, strict=False)):
                if own and own[-1] not in self.histories:
                    self.note_kind(sequence, number, kind.block_tokens, own)

    def note_kind(
        self, sequence: core_sequence.Sequence, number: int, size: int, names: list[bytes]
    ) -> None:
        history = first_history(sequence.group.request)
        tokens = sequence.tokens(0, len(names) * size)
        for index, name in enumerate(names):
            held = []
            for token in tokens[index * size : (index + 1) * size]:
                history = extend_history(history, token)
                held.append(content(history, number))
            known = self.histories.setdefault(name, tuple(held))
            assert known == tuple(held), "one name for two contents"

    def check_contents(self) -> None:
        """Assert that whatever can be found holds what its name says."""
        for name, block in self.pool._index.items():
            held = self.histories[name]
            assert tuple(self.sim.ranks.slots[block][: len(held)]) == held, (
                f"block {block} is found under the name of something else"
            )
        tier = self.sim.scheduler._blocks._tier
        if tier is None:
            return
        for name, slot in tier._pool._index.items():
            held = self.histories[name]
            assert tuple(self.sim.ranks.host[slot][: len(held)]) == held, (
                f"slot {slot} is found under the name of something else"
            )


def run_all(seeds: Sequence[int], *, windows: bool = False) -> list[Workload]:
    workloads = [Workload(seed, windows=windows) for seed in seeds]
    for workload in workloads:
        workload.run()
    return workloads


@pytest.mark.parametrize("count", [500, pytest.param(5000, marks=pytest.mark.slow)])
def test_every_block_holds_what_it_is_found_as_in_many_workloads(count: int) -> None:
    done = run_all(range(count))
    # It would prove little if nothing was reused, copied or preempted.
    assert sum(w.sim.num_hits for w in done) > 3 * count
    assert sum(w.sim.ranks.num_copies for w in done) > count / 5
    assert sum(w.sim.num_preempted for w in done) > count / 5
    assert sum(w.sim.num_swapped for w in done) > count / 20
    assert sum(w.sim.num_host_hits for w in done) > count / 20
    assert sum(w.sim.ranks.num_lost for w in done) > count / 50


@pytest.mark.parametrize("count", [250, pytest.param(5000, marks=pytest.mark.slow)])
def test_blocks_of_windows_hold_what_they_are_found_as_and_all_that_is_read(count: int) -> None:
    done = run_all(range(count), windows=True)
    assert sum(w.sim.num_hits for w in done) > count
    assert sum(w.sim.ranks.num_copies for w in done) > count / 5
    assert sum(w.sim.num_preempted for w in done) > count / 10
    assert sum(w.sim.num_swapped for w in done) > count / 20
    assert sum(w.sim.num_host_hits for w in done) > count / 40
    assert sum(w.sim.ranks.num_accepted for w in done) > count / 5


@pytest.mark.parametrize("fault", ["stale", "early", "parentless", "unheld"])
def test_a_wrong_reuse_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "stale":
        monkeypatch.setattr(BlockPool, "forget", lambda self: self._free.extend(self._cached))
    elif fault == "early":
        from pagemill.core.block_manager import BlockManager

        before = BlockManager.seal

        def seal(self: BlockManager, sequence: object, start: int, end: int) -> None:
            before(self, sequence, start, end + self.block_size)  # type: ignore[arg-type]

        monkeypatch.setattr(BlockManager, "seal", seal)
    elif fault == "parentless":
        monkeypatch.setattr(prefix_cache, "root_name", lambda keys: b"one root")
    else:
        claim = BlockPool.claim
        monkeypatch.setattr(
            BlockPool, "claim", lambda self, b: None if self.ref_count(b) else claim(self, b)
        )
    with pytest.raises((AssertionError, IndexError, KeyError)):
        run_all(range(150))
