"""Faults are planted, one at a time, and the property of `worlds` must see each of them.

Those of steps that overlap are in `test_planted_overlap_faults`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
import torch

from pagemill.batch import input_builder
from pagemill.batch.block_mover import BlockMover
from pagemill.batch.kv_store import KVStore
from pagemill.batch.request_table import RequestTable
from pagemill.batch.tier_file import TierFile
from pagemill.cache_layout import CacheKind
from pagemill.core import block_manager
from pagemill.core.beam_search import BeamSearch
from pagemill.core.block_manager import BlockManager
from pagemill.core.block_pool import BlockPool
from pagemill.core.roster import Roster
from pagemill.core.sequence import Sequence, SequenceStatus
from pagemill.messages import SwapIn
from pagemill.sampling.sampler import Sampler
from pagemill.worker import model_runner
from pagemill.worker.model_runner import ModelRunner
from tests.e2e.planting import CACHED, CHUNKED, CROWDED, DRAFTED, SWAPPED, Fault, check_is_seen
from tests.e2e.worlds import Engines
from tests.ops.conftest import needs_extension

pytestmark = needs_extension


def _swapped_block(patch: pytest.MonkeyPatch) -> None:
    """The first two blocks of a found prefix change places."""
    before = RequestTable.set_blocks

    def set_blocks(self: RequestTable, scheduled: Any) -> None:
        before(self, scheduled)
        for part in scheduled:
            if part.block_start == 0 and part.num_computed and len(part.block_ids) > 1:
                row = self._row_of[part.seq_id]
                self.block_tables[row, :2] = self.block_tables[row, 1::-1]

    patch.setattr(RequestTable, "set_blocks", set_blocks)


def _skipped_copy(patch: pytest.MonkeyPatch) -> None:
    """The last copy of a step is not done."""
    before = KVStore.copy_blocks
    patch.setattr(KVStore, "copy_blocks", lambda self, copies: before(self, copies[:-1]))


def _copy_backwards(patch: pytest.MonkeyPatch) -> None:
    """Copies of a step with several go from the new block to the shared one."""
    before = KVStore.copy_blocks

    def copy_blocks(self: KVStore, copies: Any) -> None:
        before(self, [(b, a) for a, b in copies] if len(copies) > 1 else copies)

    patch.setattr(KVStore, "copy_blocks", copy_blocks)


def _no_copy_on_write(patch: pytest.MonkeyPatch) -> None:
    """With few blocks free, a shared block is written into as if it were the writer's own."""
    before = BlockManager.extend

    def extend(self: BlockManager, *range_: int) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            if self.num_free < 12:
                inner.setattr(BlockPool, "ref_count", lambda *_: 1)
            return before(self, *range_)

    patch.setattr(BlockManager, "extend", extend)


def _changed_input(patch: pytest.MonkeyPatch, change: Callable[[Any, Any], Any]) -> None:
    before = input_builder.build_model_input

    def build(table: Any, scheduled: Any, *rest: Any) -> Any:
        return change(before(table, scheduled, *rest), scheduled)

    patch.setattr(input_builder, "build_model_input", build)


def _later_chunks(scheduled: Iterable[Any]) -> Iterable[slice]:
    """Return the rows of shares that go on with a prompt."""
    start = 0
    for part in scheduled:
        end = start + part.num_tokens
        if part.num_computed and part.num_tokens > 1:
            yield slice(start, end)
        start = end


def _position_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Chunks of a prompt after the first are one position late."""

    def change(batch: Any, scheduled: Any) -> Any:
        positions = batch.positions.clone()
        for rows in _later_chunks(scheduled):
            positions[rows] += 1
        return dataclasses.replace(batch, positions=positions)

    _changed_input(patch, change)


def _slot_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """The first two keys of a later chunk are written to each other's places."""

    def change(batch: Any, scheduled: Any) -> Any:
        slots = batch.attention.slot_mapping.clone()
        for rows in _later_chunks(scheduled):
            first = rows.start
            slots[first : first + 2] = slots[first : first + 2].flip(0)
        attention = dataclasses.replace(batch.attention, slot_mapping=slots)
        return dataclasses.replace(batch, attention=attention)

    _changed_input(patch, change)


def _hash_without_parent(patch: pytest.MonkeyPatch) -> None:
    """A block is named by its own tokens alone."""

    def extend_names(sequence: Sequence, block_size: int, num_blocks: int) -> None:
        for index in range(len(sequence.block_names), num_blocks):
            own = sequence.tokens(index * block_size, (index + 1) * block_size)
            sequence.block_names.append(blake2b(repr(own).encode(), digest_size=16).digest())

    patch.setattr(block_manager, "extend_names", extend_names)


def _stale_hash(patch: pytest.MonkeyPatch) -> None:
    """A block that is taken for something else is still found under its old name."""
    before = BlockPool.allocate

    def allocate(self: BlockPool) -> Any:
        index = dict(self._index)
        taken = before(self)
        self._index.update(index)
        return taken

    patch.setattr(BlockPool, "allocate", allocate)


def _sealed_too_early(patch: pytest.MonkeyPatch) -> None:
    """All known blocks of a prompt can be found when its first chunk is computed."""
    before = BlockManager.seal

    def seal(self: BlockManager, sequence: Sequence, start: int, end: int) -> None:
        held = len(self.table(sequence.seq_id)) * self.block_size
        before(self, sequence, start, max(end, min(held, sequence.num_tokens)))

    patch.setattr(BlockManager, "seal", seal)


def _hit_not_held(patch: pytest.MonkeyPatch) -> None:
    """Who finds a block in use does not count as a holder."""
    before = BlockPool.claim

    def claim(self: BlockPool, block: int) -> None:
        if self.ref_count(block) == 0:
            before(self, block)

    patch.setattr(BlockPool, "claim", claim)


def _seed_position(patch: pytest.MonkeyPatch) -> None:
    """The draw at the end of a prompt in chunks is that of the position before."""
    before = ModelRunner._sample_row

    def sample_row(self: ModelRunner, part: Any, row: int) -> Any:
        drawn = before(self, part, row)
        if part.num_computed and part.num_tokens > 1:
            return dataclasses.replace(
                drawn,
                token_ids=np.ascontiguousarray(drawn.token_ids[1:]),
                num_prompt_tokens=drawn.num_prompt_tokens - 1,
            )
        return drawn

    patch.setattr(ModelRunner, "_sample_row", sample_row)


def _changed_return(patch: pytest.MonkeyPatch, **changes: Callable[[Sequence], Any]) -> None:
    """Who comes back after a preemption comes back changed."""
    before = Sequence.as_new

    def as_new(self: Sequence) -> Any:
        new = before(self)
        if not self.num_preemptions:
            return new
        return dataclasses.replace(new, **{name: change(self) for name, change in changes.items()})

    patch.setattr(Sequence, "as_new", as_new)


def _sample_index_lost(patch: pytest.MonkeyPatch) -> None:
    """After a preemption every sample draws as the first one."""
    _changed_return(patch, sample_index=lambda _: 0)


def _output_taken_for_prompt(patch: pytest.MonkeyPatch) -> None:
    """After a preemption penalties see no output."""
    _changed_return(patch, num_prompt_tokens=lambda sequence: sequence.num_tokens)


def _token_lost(patch: pytest.MonkeyPatch) -> None:
    """After a preemption the first token of the prompt is another one."""
    _changed_return(
        patch,
        token_ids=lambda s: (98, *s.tokens(1, s.num_tokens)),
    )


def _scores_taken_from_the_cache(patch: pytest.MonkeyPatch) -> None:
    """A prompt whose logprobs are wanted begins with a found prefix."""
    patch.setattr(Sequence, "most_cached", property(lambda self: self.num_tokens - 1))


def _sampled(patch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    before = Sampler.sample

    def sample(self: Sampler, logits: torch.Tensor, rows: Any) -> Any:
        return before(self, change(logits) if len(rows) > 2 else logits, rows)

    patch.setattr(Sampler, "sample", sample)


def _neighbours_row(patch: pytest.MonkeyPatch) -> None:
    """In a batch of three the first two get each other's logits."""
    _sampled(patch, lambda logits: logits[[1, 0, *range(2, len(logits))]])


def _last_bit(patch: pytest.MonkeyPatch) -> None:
    """In a batch of three the largest logits are one unit in the last place off."""
    _sampled(patch, lambda logits: torch.nextafter(logits, torch.full_like(logits, torch.inf)))


def _moved(patch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    before = BlockMover.move
    patch.setattr(BlockMover, "move", lambda self, moves: before(self, change(moves)))


def _swapped_slots(patch: pytest.MonkeyPatch) -> None:
    """The first two blocks that come back in a step go to each other's places."""

    def change(moves: Any) -> Any:
        if len(moves.swap_in) < 2:
            return moves
        one, two, *rest = moves.swap_in
        crossed = SwapIn(one.slot, two.block), SwapIn(two.slot, one.block), *rest
        return dataclasses.replace(moves, swap_in=crossed)

    _moved(patch, change)


def _skipped_swap_in(patch: pytest.MonkeyPatch) -> None:
    """The last block that comes back in a step does not."""
    _moved(patch, lambda moves: dataclasses.replace(moves, swap_in=moves.swap_in[:-1]))


def _damage_believed(patch: pytest.MonkeyPatch) -> None:
    """The last byte of what comes back is another one, and nobody looks at the checksum."""
    before = TierFile.read

    def read(self: TierFile, slot: int, parts: Any) -> bool:
        before(self, slot, parts)
        parts[-1][0] ^= 0x40
        parts[-1][-1] ^= 0x40
        return True

    patch.setattr(TierFile, "read", read)


def _old_record_believed(patch: pytest.MonkeyPatch) -> None:
    """A slot that is written a second time keeps what it had."""
    before = TierFile.write

    def write(self: TierFile, slot: int, *what: Any) -> None:
        if slot not in self._stamps:
            before(self, slot, *what)

    patch.setattr(TierFile, "write", write)


def _lost_block_kept(patch: pytest.MonkeyPatch) -> None:
    """Blocks that did not come back are used all the same."""
    read = TierFile.read
    patch.setattr(TierFile, "read", lambda self, slot, parts: slot % 3 and read(self, slot, parts))
    patch.setattr(BlockManager, "lose", lambda self, lost: (frozenset(), []))


def _one_draft_too_many(patch: pytest.MonkeyPatch) -> None:
    """The sample behind the first wrong draft stands, too."""
    before = model_runner.accept

    def accept(drafts: Any, sampled: Any) -> Any:
        run = before(drafts, sampled)
        length = len(run.tokens)
        if run.error is not None or length == len(sampled) or sampled[length].error is not None:
            return run
        more = sampled[length]
        return dataclasses.replace(
            run, tokens=run.tokens + more.tokens, scores=run.scores + more.scores
        )

    patch.setattr(model_runner, "accept", accept)


def _draft_position(patch: pytest.MonkeyPatch) -> None:
    """What is sampled behind drafts is drawn as one position before."""
    before = model_runner.scored_rows

    def scored_rows(*what: Any) -> Any:
        first, *rest = before(*what)
        return [first] + [
            dataclasses.replace(
                row, token_ids=row.token_ids[1:], num_prompt_tokens=row.num_prompt_tokens - 1
            )
            for row in rest
        ]

    patch.setattr(model_runner, "scored_rows", scored_rows)


def _trimmed_too_far(patch: pytest.MonkeyPatch) -> None:
    """Slots of rejected drafts are given back together with the last accepted one's."""
    before = BlockManager.trim
    patch.setattr(
        BlockManager, "trim", lambda self, seq_id, length: before(self, seq_id, length - 2)
    )


def _window_block_let_go_too_early(patch: pytest.MonkeyPatch) -> None:
    """A block is let go while the next token still sees the last one in it."""
    before = CacheKind.first_block
    patch.setattr(
        CacheKind, "first_block", lambda self, position: before(self, position + (position > 0))
    )


def _window_slides_with_drafts(patch: pytest.MonkeyPatch) -> None:
    """Rejected drafts move the window, too: what only they would not have seen is let go."""
    before = CacheKind.first_block
    patch.setattr(
        CacheKind,
        "first_block",
        lambda self, position: before(self, position + 4 * (position > 4)),
    )


def _beams_by_arrival(patch: pytest.MonkeyPatch) -> None:
    """What is computed for the beams of a round counts in the order in which it came."""

    def note(self: BeamSearch, index: int, scores: Any) -> None:
        self._results[len(self._results)] = scores

    patch.setattr(BeamSearch, "note", note)


def _mates_blocks(patch: pytest.MonkeyPatch) -> None:
    """With few blocks free, what continues a beam gets the blocks of another beam of the round."""
    before = Roster.enter_fork

    def enter_fork(self: Roster, parent: Sequence, child: Sequence) -> None:
        beams = [s for s in parent.group.sequences.values() if s.status is SequenceStatus.PAUSED]
        others = [s for s in beams if s is not parent and self.blocks.table(s.seq_id)]
        is_crowded = self.blocks.num_free < 12 and self.blocks.table(parent.seq_id)
        before(self, others[0] if is_crowded and others else parent, child)

    patch.setattr(Roster, "enter_fork", enter_fork)


FAULTS = {
    "window-block-let-go-too-early": Fault(
        _window_block_let_go_too_early, {**CROWDED, "family": "mistral", "num_blocks": 64}
    ),
    "window-slides-with-drafts": Fault(
        _window_slides_with_drafts, {**CROWDED, "family": "gemma3", "num_blocks": 64}
    ),
    "swapped-block": Fault(_swapped_block, CACHED),
    "skipped-copy": Fault(_skipped_copy, CROWDED),
    "copy-backwards": Fault(_copy_backwards, CROWDED),
    "no-copy-on-write": Fault(_no_copy_on_write, CROWDED),
    "position-off-by-one": Fault(_position_off_by_one, CHUNKED),
    "slot-off-by-one": Fault(_slot_off_by_one, CHUNKED),
    "hash-without-parent": Fault(_hash_without_parent, CACHED),
    "stale-hash": Fault(_stale_hash, {**CACHED, **CROWDED}),
    "sealed-too-early": Fault(_sealed_too_early, {**CACHED, **CHUNKED}),
    "hit-not-held": Fault(_hit_not_held, {**CACHED, "num_blocks": 17}),
    "wrong-seed-position": Fault(_seed_position, CHUNKED),
    "sample-index-lost": Fault(_sample_index_lost, CROWDED),
    "output-taken-for-prompt": Fault(_output_taken_for_prompt, CROWDED),
    "token-lost": Fault(_token_lost, CROWDED),
    "scores-from-the-cache": Fault(_scores_taken_from_the_cache, CACHED),
    "neighbours-row": Fault(_neighbours_row, {"max_num_seqs": 16}),
    "last-bit": Fault(_last_bit, {"max_num_seqs": 16}),
    "swapped-slots": Fault(_swapped_slots, SWAPPED),
    "skipped-swap-in": Fault(_skipped_swap_in, SWAPPED),
    "damage-believed": Fault(_damage_believed, SWAPPED),
    "old-record-believed": Fault(_old_record_believed, {**SWAPPED, "num_slots": 20}),
    "lost-block-kept": Fault(_lost_block_kept, SWAPPED),
    "one-draft-too-many": Fault(_one_draft_too_many, DRAFTED),
    "draft-position": Fault(_draft_position, {**DRAFTED, "speculation": "itself"}),
    "beams-by-arrival": Fault(_beams_by_arrival, CROWDED),
    "mates-blocks": Fault(_mates_blocks, CROWDED),
    "trimmed-too-far": Fault(_trimmed_too_far, {**DRAFTED, "block_size": 1}),
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("name", FAULTS)
def test_the_property_sees_a_planted(name: str, engines: Engines) -> None:
    check_is_seen(name, FAULTS[name], engines)
