"""Layers with a sliding window: what is let go and when, what is found again, and what a request needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pagemill.cache_layout import CacheKind, CacheLayout
from pagemill.config import SchedulerConfig
from pagemill.core.block_manager import BlockManager
from pagemill.core.scheduler import Scheduler
from pagemill.core.sequence import Sequence
from pagemill.errors import CacheTooSmallError
from tests.core.fake_ranks import make_request
from tests.core.test_block_contents import run_all
from tests.core.test_simulation import Simulation

STEM = tuple(range(100, 600))
ALL = CacheLayout((CacheKind(block_tokens=4, window=8, chunk=8),))
# Five windowed layers to a full one, as a Gemma 3: a block is 4 tokens of five, or 20 of one.
MIXED = CacheLayout((CacheKind(block_tokens=20), CacheKind(block_tokens=4, window=8, chunk=8)))


def simulation(
    num_blocks: int, layout: CacheLayout, *, max_tokens: int = 256, max_model_len: int = 400,
    caches_prefixes: bool = False, **more: Any,
) -> Simulation:  # fmt: skip
    return Simulation(
        num_blocks, 4, max_model_len=max_model_len, max_tokens=max_tokens, max_seqs=16,
        caches_prefixes=caches_prefixes, layout=layout, **more,
    )  # fmt: skip


def num_used(sim: Simulation) -> int:
    return sim.scheduler._blocks._pool.num_used


def run_one(sim: Simulation, request_id: str, prompt: tuple[int, ...], **request: Any) -> int:
    """Run a request to its end; return how many tokens of its prompt were found."""
    before = sim.num_hits
    sim.add(make_request(request_id, prompt, **request))
    sim.run()
    return sim.num_hits - before


# ---------------------------------------------------------------- what is held


def test_a_long_sequence_stops_growing_where_all_layers_have_a_window() -> None:
    sim = simulation(200, ALL)
    sim.add(make_request("a", 60, max_tokens=300))
    used = []
    while sim.scheduler.has_unfinished():
        sim.step()
        used.append(num_used(sim))
    assert max(used[1:]) <= 3 == ALL.blocks_at_rest(360)
    assert sim.num_preempted == 0


def test_only_the_full_layers_of_a_mixed_model_go_on_growing() -> None:
    sim = simulation(200, MIXED)
    sim.add(make_request("a", 60, max_tokens=300))
    used = {}
    while sim.scheduler.has_unfinished():
        sim.step()
        (root,) = sim.scheduler._roster.sequences.values() or [None]
        if root is not None:
            used[root.num_computed] = num_used(sim)
    for num_computed, count in used.items():
        assert count <= -(-num_computed // 20) + 3
    assert used[300] - used[100] == 10


def test_a_prompt_in_chunks_takes_no_more_than_a_window_and_a_chunk() -> None:
    need = ALL.blocks_of_request(400)
    assert need == 5
    sim = simulation(need, ALL, max_tokens=64)
    run_one(sim, "a", STEM[:300], max_tokens=50)
    assert sim.num_preempted == 0


def test_a_prompt_takes_larger_steps_while_there_is_room() -> None:
    wide, tight = simulation(200, ALL), simulation(ALL.blocks_of_request(400), ALL)
    for sim in (wide, tight):
        run_one(sim, "a", STEM[:200], max_tokens=1)
    assert wide.num_steps < 4 < tight.num_steps


def test_as_many_requests_run_at_once_as_the_layout_promises() -> None:
    num_blocks = 120
    for layout, least in ((ALL, 38), (MIXED, 8)):
        promised = int(layout.requests_that_fit(num_blocks, 200))
        assert promised >= least > num_blocks * 4 // 200
        sim = Simulation(
            num_blocks, 4, max_model_len=200, max_tokens=256, max_seqs=64, layout=layout
        )
        for number in range(promised):
            sim.add(make_request(f"{number}", 100, max_tokens=100))
        most = 0
        while sim.scheduler.has_unfinished():
            most = max(most, len(sim.step().scheduled))
        assert most == promised and sim.num_preempted == 0
        sim.run()


def test_admission_counts_what_is_needed_at_once() -> None:
    sim = simulation(2 * ALL.blocks_of_request(400), ALL, max_tokens=16)
    sim.add(make_request("a", STEM[:390], max_tokens=4))
    sim.add(make_request("b", STEM[:100], max_tokens=4))
    sim.step()
    assert len(sim.scheduler._roster.running) == 2, "neither prompt would ever fit whole"
    sim.run()
    assert sim.num_preempted == 0


def test_what_can_never_run_is_told_at_the_start_with_what_would() -> None:
    config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4, policy="fcfs")

    def start(max_model_len: int) -> Scheduler:
        return Scheduler(
            config, block_size=4, num_blocks=12, max_model_len=max_model_len, layout=MIXED
        )

    with pytest.raises(CacheTooSmallError, match=r"Lower max_model_len to 140 or raise"):
        start(400)
    start(140)
    with pytest.raises(CacheTooSmallError):
        start(141)


# ---------------------------------------------------------------- what is found


def test_a_prefix_is_found_with_what_its_end_sees_of_the_windows() -> None:
    sim = simulation(60, MIXED, caches_prefixes=True)
    run_one(sim, "a", STEM[:130], max_tokens=1)
    sim.add(make_request("b", (*STEM[:130], 7), max_tokens=1))
    (share,) = sim.step().scheduled
    # 120: the last place at which blocks of both kinds end. Of the window's, the 7 tokens before it.
    assert share.num_computed == 120
    held = sim.scheduler._blocks._pool.num_used
    sim.run()
    assert held == 0  # it has ended
    assert sim.num_hits == 120


def test_a_prefix_is_found_although_most_blocks_of_its_windows_were_evicted() -> None:
    sim = simulation(40, MIXED, caches_prefixes=True, max_model_len=200)
    sim.add(make_request("a", STEM[:160], max_tokens=1))
    names = next(iter(sim.scheduler._roster.waiting)).more_names[0]
    sim.run()
    # Those of the window's layers were let go first, and go first.
    run_one(sim, "b", tuple(range(900, 960)), max_tokens=1)
    assert sum(sim.scheduler._blocks.find(name) is not None for name in names) < len(names) / 2
    assert run_one(sim, "c", (*STEM[:160], 7), max_tokens=1) == 160


def test_a_prefix_whose_window_is_gone_is_found_as_far_as_another_is_there() -> None:
    sim = simulation(60, MIXED, caches_prefixes=True)
    run_one(sim, "a", STEM[:61], max_tokens=1)
    pool = sim.scheduler._blocks._pool
    root = next(iter(sim.scheduler._roster.sequences.values()), None)
    assert root is None
    named = {block: name for name, block in pool._index.items()}
    full = {sim.scheduler._blocks.find(name) for name in named.values()}
    assert len(full) == 3 + 15
    # Take the window's block before position 60 out: 40 is the next place that both kinds know.
    sim.add(make_request("b", (*STEM[:61], 7), max_tokens=1))
    waiting = next(iter(sim.scheduler._roster.waiting))
    last = pool.find(waiting.more_names[0][14])
    assert last is not None
    pool.unname(last)
    (share,) = sim.step().scheduled
    assert share.num_computed == 40


def test_a_step_shares_what_it_computes_itself() -> None:
    sim = simulation(200, MIXED, caches_prefixes=True)
    for number in range(3):
        sim.add(make_request(f"{number}", STEM[:64]))
    step = sim.step()
    assert [share.num_tokens for share in step.scheduled] == [64, 4, 4]
    sim.run()


def test_kinds_have_names_of_their_own() -> None:
    blocks = BlockManager(
        40,
        4,
        caches_prefixes=True,
        layout=CacheLayout((CacheKind(block_tokens=4), CacheKind(block_tokens=4, window=8))),
    )
    sim = simulation(40, MIXED, caches_prefixes=True)
    sim.add(make_request("a", 40))
    root = next(iter(sim.scheduler._roster.waiting))
    root.block_names.clear()
    root.more_names.clear()
    blocks.name_blocks(root)
    assert len(root.block_names) == len(root.more_names[0]) == 10
    assert not set(root.block_names) & set(root.more_names[0])


# ---------------------------------------------------------------- swap, forks, drafts


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("layout", [ALL, MIXED])
def test_the_preempted_come_back_and_go_on(layout: CacheLayout, mode: str) -> None:
    sim = Simulation(
        layout.blocks_of_request(100) + 4, 4, max_model_len=100, max_tokens=64, max_seqs=16,
        num_slots=100, mode=mode, layout=layout,
    )  # fmt: skip
    for number in range(4):
        sim.add(make_request(f"{number}", STEM[number : number + 12], max_tokens=60))
    sim.run()
    assert sim.num_preempted > 0
    assert (sim.num_swapped > 0) is (mode == "swap")


def test_a_swap_moves_only_what_is_still_held() -> None:
    sim = simulation(100, ALL, num_slots=100, mode="swap", max_tokens=64)
    sim.add(make_request("a", 200, max_tokens=8))
    for _ in range(6):
        sim.step()
    (root,) = sim.scheduler._roster.sequences.values()
    assert sim.scheduler._roster.preempt(root)
    swapped = sim.scheduler._blocks.swapped(root.seq_id)
    assert swapped is not None and swapped.num_tokens >= 200 and len(swapped.slots) <= 3
    moves = sim.scheduler.last_step()
    assert moves is not None and len(moves.block_moves.swap_out) == len(swapped.slots)
    sim.ranks.execute(moves)
    sim.run()
    assert sim.ranks.num_in == len(swapped.slots)


def test_forks_let_go_one_by_one_and_the_last_frees() -> None:
    sim = simulation(200, MIXED)
    sim.add(make_request("a", 50, num_samples=4, max_tokens=40))
    sim.run()
    assert sim.ranks.num_copies > 0


@pytest.mark.parametrize("layout", [ALL, MIXED])
def test_drafts_do_not_move_the_window(layout: CacheLayout) -> None:
    sim = simulation(200, layout, num_drafts=9, caches_prefixes=True)
    sim.add(make_request("a", 30, max_tokens=120))
    sim.run()
    assert 0 < sim.ranks.num_accepted < sim.ranks.num_drafted


# ---------------------------------------------------------------- planted faults


def _one_token_too_early(patch: pytest.MonkeyPatch) -> None:
    """A block is let go while its last token is still seen by one query."""
    before = CacheKind.first_block
    patch.setattr(
        CacheKind, "first_block", lambda self, position: before(self, position + (position > 0))
    )


def _with_drafts_that_do_not_stand(patch: pytest.MonkeyPatch) -> None:
    """What falls out of the window of the last draft is let go, whatever becomes of the draft."""
    before = BlockManager.extend

    def extend(self: BlockManager, seq_id: int, num_computed: int, num_tokens: int) -> Any:
        change = before(self, seq_id, num_computed, num_tokens)
        for kind, tables in self._sliding:
            table = tables[seq_id]
            for index in range(kind.first_block(num_computed), kind.first_block(num_tokens)):
                if index * kind.block_tokens < num_computed:
                    self._pool.release(table[index])
                    table[index] = -1
        return change

    patch.setattr(BlockManager, "extend", extend)


def _nothing_let_go(patch: pytest.MonkeyPatch) -> None:
    """Blocks behind the window are kept."""
    patch.setattr(BlockManager, "slide", lambda self, sequence, before: None)


def _window_found_short(patch: pytest.MonkeyPatch) -> None:
    """Names of the second kind are those of the first."""

    def names(self: BlockManager, sequence: Sequence) -> None:
        before(self, sequence)
        sequence.more_names = [list(sequence.block_names) for _ in sequence.more_names]

    before = BlockManager.name_blocks
    patch.setattr(BlockManager, "name_blocks", names)


@pytest.mark.parametrize(
    "plant",
    [
        _one_token_too_early,
        _with_drafts_that_do_not_stand,
        _nothing_let_go,
        _window_found_short,
    ],
)
def test_a_fault_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, IndexError, KeyError)):
        run_all(range(60), windows=True)
