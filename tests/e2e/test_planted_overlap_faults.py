"""Faults of steps that overlap: a plan, or a rank, that takes an outcome for known that is not, or for stale.

Each must make the property of `worlds` fail. The engine that a request is compared with plans no step ahead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagemill.batch.input_builder import InputBuilder
from pagemill.batch.tier_file import TierFile
from pagemill.core import scheduler, step_results
from pagemill.core.block_manager import HOLE, BlockManager
from pagemill.core.scheduler import Scheduler
from pagemill.core.sequence import Sequence
from pagemill.core.step_results import StepResults
from pagemill.core.stop_checker import TokenStop, check_tokens
from pagemill.sampling.row_math import SampleRow
from pagemill.worker.model_runner import ModelRunner
from tests.e2e.planting import CACHED, CHUNKED, CROWDED, SWAPPED, Fault, check_is_seen
from tests.e2e.worlds import Engines
from tests.ops.conftest import needs_extension

pytestmark = needs_extension
AHEAD: dict[str, Any] = {"async_scheduling": True}
# Every token fills a block, and there are too few of them.
FILLING = {**CACHED, **CROWDED, **AHEAD, "block_size": 1, "num_blocks": 64}


# ------------------------------------------------------------ the plan


def _stop_seen_late(patch: pytest.MonkeyPatch) -> None:
    """A token that ends a sequence is noticed with the next one, if that is being computed already."""
    before = StepResults._append
    late: dict[int, tuple[Sequence, TokenStop]] = {}

    def append(self: StepResults, sequence: Sequence, *rest: Any) -> Any:
        _, owed = late.pop(id(sequence), (None, None))

        def checked(run: Any, *what: Any) -> TokenStop:
            if owed is not None:
                return dataclasses.replace(owed, num_kept=len(run))
            stop = check_tokens(run, *what)
            if stop.finish_reason == "stop" and sequence.num_scheduled:
                late[id(sequence)] = (sequence, stop)
                return TokenStop(len(run))
            return stop

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(step_results, "check_tokens", checked)
            return before(self, sequence, *rest)

    patch.setattr(StepResults, "_append", append)


def _counted(patch: pytest.MonkeyPatch, act: Callable[[StepResults, Sequence, Any], None]) -> None:
    """Do something to each sequence that goes on with a token which nobody knows yet."""
    before = StepResults.count

    def count(self: StepResults, scheduled: Any) -> None:
        before(self, scheduled)
        for share in scheduled.scheduled:
            sequence = self._roster.sequences.get(share.seq_id)
            if sequence is not None and sequence.num_pending:
                act(self, sequence, share)

    patch.setattr(StepResults, "count", count)


def _named_unknown(patch: pytest.MonkeyPatch) -> None:
    """A block is named before the token is known that fills it."""

    def name(results: StepResults, sequence: Sequence, share: Any) -> None:
        pending, sequence.num_pending = sequence.num_pending, 0
        results._roster.blocks.name_blocks(sequence)
        sequence.num_pending = pending

    _counted(patch, name)


def _let_go_a_step_early(patch: pytest.MonkeyPatch) -> None:
    """A window moves on with a step that is being planned, and still reads what is let go."""

    def slide(self: BlockManager, sequence: Sequence, before: int) -> None:
        for kind, tables in self._sliding:
            table = tables[sequence.seq_id]
            for index in range(kind.first_block(before), kind.first_block(sequence.num_computed)):
                if table[index] != HOLE:
                    self._pool.release(table[index])
                    table[index] = HOLE

    def act(results: StepResults, sequence: Sequence, share: Any) -> None:
        sequence.num_computed += 1
        results._roster.blocks.slide(sequence, share.num_computed)
        sequence.num_computed -= 1

    patch.setattr(BlockManager, "slide", slide)
    _counted(patch, act)


def _taken_while_held_up(patch: pytest.MonkeyPatch) -> None:
    """Who waits for the result of the step in flight may have to give way in the next one."""
    before = scheduler.plan_step

    def plan_step(view: Any, *rest: Any) -> Any:
        roster = view.holders.__self__

        def holders() -> list[Sequence]:
            return [*view.holders(), *(s for s in roster.running if not s.num_remaining)]

        return before(dataclasses.replace(view, holders=holders), *rest)

    patch.setattr(scheduler, "plan_step", plan_step)


def _sealed_though_lost(patch: pytest.MonkeyPatch) -> None:
    """A block that a token fills gets its name though its sequence was preempted since."""

    def seal_late(self: StepResults, sequence: Sequence) -> None:
        self._roster.blocks.seal(sequence, sequence.num_tokens - 1, sequence.num_tokens)

    patch.setattr(StepResults, "_seal_late", seal_late)


def _planned_behind_moves(patch: pytest.MonkeyPatch) -> None:
    """A step is planned behind one that brings blocks back, some of which cannot be read."""
    read = TierFile.read
    patch.setattr(TierFile, "read", lambda self, slot, parts: slot % 3 and read(self, slot, parts))
    patch.setattr(
        Scheduler, "may_overlap", lambda self: self._overlaps and len(self._in_flight) == 1
    )


def _scores_of_the_next_chunk_lost(patch: pytest.MonkeyPatch) -> None:
    """All prompt logprobs count as delivered when the chunk behind the one in flight is planned."""
    before = StepResults.count

    def count(self: StepResults, scheduled: Any) -> None:
        before(self, scheduled)
        for share in scheduled.scheduled:
            sequence = self._roster.sequences.get(share.seq_id)
            if sequence is not None and sequence.counted_step == scheduled.step_id:
                sequence.next_prompt_score = sequence.num_prompt_tokens

    patch.setattr(StepResults, "count", count)


# ------------------------------------------------------------ the rank


def _watch_ahead(patch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Return a function that says whether the step that is computed now was planned ahead."""
    before = Scheduler.schedule
    is_ahead = False

    def schedule(self: Scheduler) -> Any:
        nonlocal is_ahead
        is_ahead = bool(self._in_flight)
        return before(self)  # the rank runs the step before the next one is planned

    patch.setattr(Scheduler, "schedule", schedule)
    return lambda: is_ahead


def _drawn_ahead(patch: pytest.MonkeyPatch, change: Callable[[SampleRow], SampleRow]) -> None:
    is_ahead = _watch_ahead(patch)
    before = ModelRunner._sample_row

    def sample_row(self: ModelRunner, *what: Any) -> SampleRow:
        drawn = before(self, *what)
        return change(drawn) if is_ahead() else drawn

    patch.setattr(ModelRunner, "_sample_row", sample_row)


def _draw_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    """A step that was planned ahead draws as of the position before."""

    def change(drawn: SampleRow) -> SampleRow:
        return dataclasses.replace(
            drawn,
            token_ids=np.ascontiguousarray(drawn.token_ids[1:]),
            num_prompt_tokens=drawn.num_prompt_tokens - 1,
        )

    _drawn_ahead(patch, change)


def _penalties_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    """Where a step was planned ahead, penalties do not see the token that was drawn meanwhile."""

    def change(drawn: SampleRow) -> SampleRow:
        token_ids = np.array(drawn.token_ids)
        token_ids[-1] = token_ids[-2:][0]
        return dataclasses.replace(drawn, token_ids=token_ids)

    _drawn_ahead(patch, change)


def _stale_token(patch: pytest.MonkeyPatch) -> None:
    """A step that was planned ahead computes the last token that was known when it was planned."""
    is_ahead = _watch_ahead(patch)
    before = InputBuilder.build

    def build(self: InputBuilder, scheduled: Any, *rest: Any) -> Any:
        batch = before(self, scheduled, *rest)
        if not is_ahead():
            return batch
        token_ids = batch.token_ids.clone()
        start = 0
        for part in scheduled:
            if part.num_samples and part.num_tokens == 1 and part.num_computed:
                known = self._table.known_tokens(self._table.row(part.seq_id))
                token_ids[start] = int(known[part.num_computed - 1])
            start += part.num_tokens
        return dataclasses.replace(batch, token_ids=token_ids)

    patch.setattr(InputBuilder, "build", build)


FAULTS = {
    "stop-seen-late": Fault(_stop_seen_late, AHEAD),
    "unknown-token-named": Fault(_named_unknown, FILLING),
    "window-let-go-a-step-early": Fault(
        _let_go_a_step_early, {**AHEAD, "family": "mistral", "block_size": 1}
    ),
    "taken-while-held-up": Fault(_taken_while_held_up, {**CROWDED, **AHEAD}),
    "sealed-though-lost": Fault(_sealed_though_lost, FILLING),
    "planned-behind-moves": Fault(_planned_behind_moves, {**SWAPPED, **AHEAD}),
    "scores-of-the-next-chunk-lost": Fault(_scores_of_the_next_chunk_lost, {**CHUNKED, **AHEAD}),
    "draw-of-the-step-before": Fault(_draw_of_the_step_before, AHEAD),
    "penalties-of-the-step-before": Fault(_penalties_of_the_step_before, AHEAD),
    "stale-token": Fault(_stale_token, AHEAD),
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("name", FAULTS)
def test_the_property_sees_a_planted_overlap_fault(name: str, engines: Engines) -> None:
    check_is_seen(name, FAULTS[name], engines)
