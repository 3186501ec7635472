"""The flat batch against a plain loop over tokens."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.batch.model_input import build_model_input
from pagemill.batch.request_table import RequestTable
from pagemill.messages import NewSequence, SamplingSpec, ScheduledSequence

CPU = torch.device("cpu")


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 39), st.integers(1, 40), st.integers(0, 40)),
        min_size=1,
        max_size=20,
    ),
    st.sampled_from([1, 2, 4, 16]),
)
def test_batch_equals_a_loop_over_tokens(
    shapes: list[tuple[int, int, int, int]], block_size: int
) -> None:
    table, scheduled = RequestTable(), []
    tokens, blocks, prompts = {}, {}, {}
    next_block = 100
    for seq_id, (known, computed, count, prompt) in enumerate(shapes):
        computed = min(computed, known - 1)
        count = min(count, known - computed)
        prompts[seq_id] = max(1, min(prompt, known))
        tokens[seq_id] = [1000 * seq_id + i for i in range(known)]
        num_blocks = -(-(computed + count) // block_size)
        blocks[seq_id] = list(range(next_block, next_block + num_blocks))
        next_block += num_blocks
        table.add(
            [NewSequence(seq_id, "r", tuple(tokens[seq_id]), prompts[seq_id], 0, SamplingSpec())]
        )
        samples = int(computed + count == known)
        owed = computed + 1 if seq_id % 2 else None
        scheduled.append(
            ScheduledSequence(seq_id, computed, count, 0, tuple(blocks[seq_id]), samples, owed)
        )
    table.set_blocks(scheduled)
    batch = build_model_input(table, scheduled, block_size, CPU)

    ids, positions, slots, sample_rows, scored = [], [], [], [], []
    for part in scheduled:
        for p in range(part.num_computed, part.num_computed + part.num_tokens):
            if part.prompt_logprobs_from is not None and p + 1 < prompts[part.seq_id]:
                scored.append((len(ids), tokens[part.seq_id][p + 1], part.seq_id))
            ids.append(tokens[part.seq_id][p])
            positions.append(p)
            slots.append(blocks[part.seq_id][p // block_size] * block_size + p % block_size)
        if part.num_samples:
            sample_rows.append(len(ids) - 1)
    assert batch.token_ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert batch.attention.slot_mapping.tolist() == slots
    assert batch.sample_rows.tolist() == sample_rows
    assert batch.attention.num_computed == tuple(s.num_computed for s in scheduled)
    for i, part in enumerate(scheduled):
        used = len(blocks[part.seq_id])
        row = batch.attention.block_tables[i].tolist()
        assert row[:used] == blocks[part.seq_id] and not any(row[used:])
    got = (
        []
        if batch.prompt is None
        else list(
            zip(
                batch.prompt.token_rows.tolist(),
                batch.prompt.target_ids.tolist(),
                batch.prompt.owner.tolist(),
                strict=True,
            )
        )
    )
    assert got == scored


def test_table_forgets_blocks_of_an_earlier_owner() -> None:
    table = RequestTable()
    table.add([NewSequence(1, "r", tuple(range(8)), 8, 0, SamplingSpec())])
    table.set_blocks([ScheduledSequence(1, 0, 8, 0, (5, 6, 7, 8), 1)])
    table.remove([1])
    table.add([NewSequence(2, "r", (1, 2), 2, 0, SamplingSpec())])
    table.add([NewSequence(3, "r", tuple(range(8)), 8, 0, SamplingSpec())])
    parts = [ScheduledSequence(2, 0, 2, 0, (9,), 1), ScheduledSequence(3, 0, 8, 0, (1, 2, 3, 4), 1)]
    table.set_blocks(parts)
    batch = build_model_input(table, parts, 2, CPU)
    assert batch.attention.block_tables.tolist() == [[9, 0, 0, 0], [1, 2, 3, 4]]


def test_building_changes_nothing_in_the_table() -> None:
    table = RequestTable()
    table.add([NewSequence(1, "r", (1, 2, 3), 3, 0, SamplingSpec())])
    parts = [ScheduledSequence(1, 0, 3, 0, (4, 2), 1)]
    table.set_blocks(parts)
    before = table.block_tables.copy(), table.token_ids.copy(), table.num_tokens.copy()
    batch = build_model_input(table, parts, 2, CPU)
    batch.token_ids.zero_()
    batch.attention.block_tables.zero_()
    after = table.block_tables, table.token_ids, table.num_tokens
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 5)), min_size=1, max_size=8),
    st.sampled_from([1, 4]),
)
def test_drafts_are_computed_behind_the_known_tokens_and_each_is_sampled_at(
    shapes: list[tuple[int, int]], block_size: int
) -> None:
    table, scheduled, drafts = RequestTable(), [], []
    for seq_id, (known, count) in enumerate(shapes):
        tokens = tuple(100 * seq_id + i for i in range(known))
        table.add([NewSequence(seq_id, "r", tokens, 1, 0, SamplingSpec())])
        blocks = tuple(range(50 * seq_id, 50 * seq_id + -(-(known + count) // block_size)))
        scheduled.append(
            ScheduledSequence(seq_id, known - 1, 1, 0, blocks, 1, None, num_drafts=count)
        )
        drafts.append([7000 + i for i in range(count)])
    table.set_blocks(scheduled)
    for row, draft in zip(table.rows(scheduled).tolist(), drafts, strict=True):
        table.put_drafts(row, draft)
    counts = np.array([len(draft) for draft in drafts])
    batch = build_model_input(table, scheduled, block_size, CPU, counts)

    ids, positions, slots = [], [], []
    for part, draft in zip(scheduled, drafts, strict=True):
        for p in range(part.num_computed, part.num_computed + 1 + len(draft)):
            is_known = p == part.num_computed
            ids.append(100 * part.seq_id + p if is_known else draft[p - part.num_computed - 1])
            positions.append(p)
            slots.append(part.block_ids[p // block_size] * block_size + p % block_size)
    assert batch.token_ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert batch.attention.slot_mapping.tolist() == slots
    assert batch.sample_rows.tolist() == list(range(len(ids)))
    assert [table.known_tokens(row).size for row in batch.rows.tolist()] == [n for n, _ in shapes]


def test_a_part_without_drafts_beside_one_with_some_samples_at_its_last_token() -> None:
    table = RequestTable()
    for seq_id in range(3):
        table.add([NewSequence(seq_id, "r", (1, 2, 3, 4), 4, 0, SamplingSpec())])
    scheduled = [
        ScheduledSequence(0, 0, 4, 0, (0, 1), 1),
        ScheduledSequence(1, 3, 1, 0, (2, 3), 1, None, num_drafts=2),
        ScheduledSequence(2, 0, 2, 0, (4,), 0),
    ]
    table.set_blocks(scheduled)
    table.put_drafts(int(table.rows(scheduled)[1]), [8, 9])
    batch = build_model_input(table, scheduled, 4, CPU, np.array([0, 2, 0]))
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 4, 8, 9, 1, 2]
    assert batch.sample_rows.tolist() == [3, 4, 5, 6]
    assert batch.sampled.tolist() == [0, 1]


def test_kinds_of_layers_have_slots_and_tables_of_their_own_counted_in_places() -> None:
    table = RequestTable((3, 5))
    table.add([NewSequence(0, "r", tuple(range(9)), 9, 0, SamplingSpec())])
    part = ScheduledSequence(0, 6, 3, 0, (7, 2), 1, more_blocks=((0, (0, 0, 0, 4, 1)),))
    table.set_blocks([part])
    batch = build_model_input(table, [part], 6, CPU, more_sizes=(2,))
    (more,) = batch.more_attention
    assert (batch.attention.kind, more.kind, more.block_size) == (0, 1, 2)
    assert batch.attention.block_tables.tolist() == [[21, 6]]
    assert batch.attention.slot_mapping.tolist() == [36, 37, 38]
    assert more.block_tables.tolist() == [[0, 0, 0, 20, 5]]
    assert more.slot_mapping.tolist() == [40, 41, 10]
    later = ScheduledSequence(0, 9, 1, 2, (), 1, more_blocks=((5, ()),))
    table.append(0, [9])
    table.set_blocks([later])
    moved = build_model_input(table, [later], 6, CPU, more_sizes=(2,))
    assert moved.more_attention[0].slot_mapping.tolist() == [11]
