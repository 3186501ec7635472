"""A batch that was moved on is the batch that would have been built."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.attention.base import AttentionBatch
from pagemill.batch.input_builder import InputBuilder
from pagemill.batch.model_input import ModelInput, build_model_input
from pagemill.batch.request_table import RequestTable
from pagemill.messages import NewSequence, SamplingSpec, ScheduledSequence

CPU = torch.device("cpu")


class Sequences:
    """Sequences that decode, with the blocks that a scheduler would give them."""

    def __init__(self, block_size: int, more_sizes: tuple[int, ...] = ()) -> None:
        """`more_sizes` are the tokens a block of further kinds of layers; kind i counts i + 1 places."""
        self.table = RequestTable(range(1, len(more_sizes) + 2))
        self.builder = InputBuilder(self.table, block_size, CPU, more_sizes)
        self.block_size = block_size
        self.more_sizes = more_sizes
        self.more: dict[int, list[list[int]]] = {}
        self.tokens: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}
        self.next_block = 50

    def add(self, seq_id: int, num_tokens: int) -> None:
        """Begin a sequence whose last token is yet to be computed."""
        token_ids = tuple(range(1000 * seq_id, 1000 * seq_id + num_tokens))
        self.table.add([NewSequence(seq_id, "r", token_ids, num_tokens, 0, SamplingSpec())])
        self.tokens[seq_id] = num_tokens
        self.blocks[seq_id] = []
        self.more[seq_id] = [[] for _ in self.more_sizes]

    def remove(self, seq_id: int) -> None:
        self.table.remove([seq_id])
        del self.tokens[seq_id], self.blocks[seq_id], self.more[seq_id]

    def part(self, seq_id: int) -> ScheduledSequence:
        """Return the share that computes a sequence's last token, and give it the blocks for it."""
        end = self.tokens[seq_id]
        start, block_ids = self.lengthen(self.blocks[seq_id], self.block_size, end)
        more = tuple(
            self.lengthen(held, size, end)
            for held, size in zip(self.more[seq_id], self.more_sizes, strict=True)
        )
        return ScheduledSequence(seq_id, end - 1, 1, start, block_ids, 1, more_blocks=more)

    def lengthen(self, held: list[int], size: int, end: int) -> tuple[int, tuple[int, ...]]:
        start = len(held)
        while len(held) * size < end:
            held.append(self.next_block)
            self.next_block += 1
        return start, tuple(held[start:])

    def step(self, parts: list[ScheduledSequence]) -> None:
        """Build one step in both ways and compare; then append what was sampled."""
        self.table.set_blocks(parts)
        got = self.builder.build(parts)
        built = build_model_input(
            self.table, parts, self.block_size, CPU, more_sizes=self.more_sizes
        )
        check(got, built, parts)
        for part in parts:
            self.table.append(part.seq_id, [7 * self.tokens[part.seq_id] + part.seq_id])
            self.tokens[part.seq_id] += 1


def check(got: ModelInput, built: ModelInput, parts: list[ScheduledSequence]) -> None:
    assert torch.equal(got.token_ids, built.token_ids)
    assert torch.equal(got.positions, built.positions)
    assert got.rows.tolist() == built.rows.tolist()
    assert got.sampled.tolist() == built.sampled.tolist()
    assert torch.equal(got.sample_rows, built.sample_rows)
    for ours, theirs in zip(
        (got.attention, *got.more_attention), (built.attention, *built.more_attention), strict=True
    ):
        check_kind(ours, theirs)


def check_kind(ours: AttentionBatch, theirs: AttentionBatch) -> None:
    assert (ours.kind, ours.block_size) == (theirs.kind, theirs.block_size)
    assert ours.query_starts == theirs.query_starts and ours.num_computed == theirs.num_computed
    assert torch.equal(ours.slot_mapping, theirs.slot_mapping)
    width = theirs.block_tables.shape[1]
    assert torch.equal(ours.block_tables[:, :width], theirs.block_tables)
    assert not ours.block_tables[:, width:].any()


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4, 16]), st.sampled_from([(), (3,), (1, 10)]))
def test_moved_on_batches_equal_built_ones(
    seed: int, block_size: int, more_sizes: tuple[int, ...]
) -> None:
    rng = random.Random(seed)
    sequences = Sequences(block_size, more_sizes)
    for seq_id in range(rng.randint(1, 5)):
        sequences.add(seq_id, rng.randint(1, 20))
    order = list(sequences.tokens)
    for _ in range(30):
        event = rng.random()
        if event < 0.05:
            sequences.add(len(order) + 100 + rng.randint(0, 10**6), rng.randint(1, 20))
            order = list(sequences.tokens)
        elif event < 0.1 and len(order) > 1:
            sequences.remove(order[0])
            order = list(sequences.tokens)
        elif event < 0.15:
            rng.shuffle(order)
        elif event < 0.2:  # preempted and resumed: another row, other blocks, all from column 0 on
            length = sequences.tokens[order[0]]
            sequences.remove(order[0])
            sequences.add(order[0], length)
        some = order if rng.random() < 0.9 else order[:1]
        sequences.step([sequences.part(seq_id) for seq_id in some])


def test_a_decode_step_keeps_the_tensors_of_the_step_before() -> None:
    sequences = Sequences(16)
    sequences.add(0, 3)
    sequences.step([sequences.part(0)])
    addresses = set()
    for _ in range(40):
        part = sequences.part(0)
        sequences.table.set_blocks([part])
        batch = sequences.builder.build([part])
        addresses.add((batch.token_ids.data_ptr(), batch.attention.slot_mapping.data_ptr()))
        sequences.table.append(0, [1])
        sequences.tokens[0] += 1
    assert len(addresses) == 1


def test_a_copied_block_takes_the_place_of_the_shared_one() -> None:
    sequences = Sequences(4)
    sequences.add(0, 6)
    sequences.step([sequences.part(0)])
    sequences.blocks[0][1] = 900
    sequences.step([ScheduledSequence(0, 6, 1, 1, (900,), 1)])
    sequences.step([sequences.part(0)])
