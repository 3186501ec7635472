"""The second half of a step: what the ranks computed becomes tokens, forks and ends.

A request whose result cannot be taken in, whatever was raised, ends alone, with finish_reason "error". Called by
the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable

from pagemill.core.beam_results import BeamResults, TextOf
from pagemill.core.draft_lengths import DraftLengths
from pagemill.core.roster import Roster, news
from pagemill.core.sequence import Sequence, SequenceStatus
from pagemill.core.stop_checker import check_tokens, output_limit
from pagemill.log import get_logger
from pagemill.messages import (
    ScheduledSequence,
    SchedulerOutput,
    SequenceOutput,
    SequenceUpdate,
    StepOutput,
)

logger = get_logger(__name__)


class StepResults:
    """Takes results into one roster. `clock` gives seconds of `time.monotonic`."""

    def __init__(
        self,
        roster: Roster,
        max_model_len: int,
        clock: Callable[[], float],
        drafts: DraftLengths | None,
        text_of: TextOf,
    ) -> None:
        self._roster = roster
        self._drafts = drafts
        self._max_model_len = max_model_len
        self._clock = clock
        self._lets_go = roster.blocks.layout.lets_go
        self._beams = BeamResults(roster, max_model_len, text_of)

    def count(self, scheduled: SchedulerOutput) -> None:
        """Count what the step in flight computes as computed, so that the next one can be planned.

        A sequence that draws one token, and is not sure to end with it, goes on with that token as if it
        were known. All others (those that fork, search beams, or reach their last token) are left as they are,
        with nothing remaining: they wait for the result.
        """
        for share in scheduled.scheduled:
            sequence = self._roster.sequences.get(share.seq_id)
            if sequence is None or not self._goes_on(sequence, share):
                continue
            self._count(sequence, share)
            sequence.counted_step = scheduled.step_id
            if share.num_samples:
                sequence.expect()

    def _goes_on(self, sequence: Sequence, share: ScheduledSequence) -> bool:
        request = sequence.group.request
        if share.num_samples == 0:
            return share.num_computed + share.num_tokens < sequence.num_tokens
        if share.num_samples > 1 or share.num_drafts or request.beams is not None:
            return False
        limit = output_limit(request, self._max_model_len)
        return len(sequence.output_token_ids) + 1 < limit

    def _count(self, sequence: Sequence, share: ScheduledSequence) -> None:
        sequence.num_computed += sequence.num_scheduled
        sequence.num_scheduled = 0
        if share.prompt_logprobs_from is not None:
            sequence.next_prompt_score = sequence.num_computed + 1

    def take(self, scheduled: SchedulerOutput, result: StepOutput) -> list[SequenceUpdate]:
        """Take a step's results in; return what is new, for the output processor.

        Results of sequences that ended since `schedule` are dropped.
        """
        now = self._clock()
        if self._drafts is not None:
            self._drafts.learn_costs(scheduled, result)
        updates: list[SequenceUpdate] = []
        redone: set[int] = set()
        if result.lost is not None:
            redone = self._roster.lose(result.lost, [s.seq_id for s in scheduled.scheduled])
        self._roster.blocks.landed()
        for group, error in self._roster.policy.take_broken():
            updates += self._roster.break_off(group, error)
        for share, output in zip(scheduled.scheduled, result.sequences, strict=True):
            assert share.seq_id == output.seq_id, "results are not in the order of the step"
            sequence = self._roster.sequences.get(share.seq_id)
            if sequence is None or share.seq_id in redone:
                continue
            if sequence.counted_step < scheduled.step_id:
                self._count(sequence, share)
            if self._lets_go and not share.num_drafts:
                self._roster.blocks.slide(sequence, share.num_computed)
            try:
                updates += self._take_one(sequence, share, output, now)
            except Exception as error:
                logger.exception("request %s ends", sequence.group.request_id)
                updates += self._roster.break_off(sequence.group, error)
        return updates

    def _take_one(
        self, sequence: Sequence, share: ScheduledSequence, output: SequenceOutput, now: float
    ) -> list[SequenceUpdate]:
        """Take one sequence's result in."""
        group = sequence.group
        if output.error is not None:
            # No sample can go on without the prompt, no search without one of its beams.
            if not group.is_forked or group.request.beams is not None:
                return self._roster.end_group(group, "error", error=output.error)
            return [self._roster.end(sequence, "error", error=output.error)]
        assert len(output.tokens) == share.num_samples, "not one run of tokens a sample"
        if group.request.beams is not None:
            return self._beams.take(sequence, output, now)
        if share.num_samples == 0:
            if sequence.num_computed == sequence.num_tokens:  # max_tokens is 0
                return self._roster.end_group(group, "length", prompt_scores=output.prompt_scores)
            if output.prompt_scores:
                return [news(sequence, prompt_scores=output.prompt_scores)]
            return []
        if group.is_forked:  # nearly every decode
            return [self._append(sequence, share, output, 0, now)]
        forks = self._roster.fork(sequence)
        group.is_forked = True
        updates = [
            self._append(sample, share, output, index, now)
            for index, sample in enumerate((sequence, *forks))
        ]
        for fork in forks:
            if fork.status is SequenceStatus.WAITING:
                self._roster.seat_fork(fork)
        return updates

    def _settle_drafts(
        self, sequence: Sequence, share: ScheduledSequence, num_accepted: int
    ) -> None:
        """Count the accepted drafts as computed, let their blocks be found, and drop the others' slots.

        A token that ends the sequence may have cut the run: what was computed behind it is nobody's.
        """
        blocks = self._roster.blocks
        sequence.num_computed = min(sequence.num_computed + num_accepted, sequence.num_tokens)
        blocks.seal(sequence, share.num_computed, sequence.num_computed)
        before = share.num_computed + share.num_tokens
        if sequence.num_computed > before:
            self._roster.note_computed(sequence, before, sequence.num_computed)
        if self._lets_go:
            blocks.slide(sequence, share.num_computed)
        blocks.trim(sequence.seq_id, sequence.num_tokens)

    def _seal_late(self, sequence: Sequence) -> None:
        """Let the block be found that a token fills whose id was not known when it was planned.

        The step in flight computes it, unless the sequence was preempted since.
        """
        end = sequence.num_tokens
        if sequence.num_computed + sequence.num_scheduled >= end:
            self._roster.blocks.seal(sequence, end - 1, end)
            if end % self._roster.blocks.block_size == 0:
                self._roster.note_computed(sequence, end - 1, end)

    def _append(
        self,
        sequence: Sequence,
        share: ScheduledSequence,
        output: SequenceOutput,
        index: int,
        now: float,
    ) -> SequenceUpdate:
        """Append run `index` of the output to a sequence, and end it where a token stops it."""
        run = output.tokens[index]
        assert run, "a sample without a token"
        if self._drafts is not None:
            self._drafts.learn(sequence, output.num_drafted, len(run) - 1)
        request = sequence.group.request
        was_expected = sequence.num_pending > 0
        stop = check_tokens(run, sequence.num_output, request, self._max_model_len)
        kept = run[: stop.num_kept]
        sequence.append(kept, now)
        self._roster.blocks.name_blocks(sequence)
        if share.num_drafts:
            self._settle_drafts(sequence, share, len(run) - 1)
        scores = output.scores[index][: stop.num_kept] if output.scores else ()
        prompt_scores = output.prompt_scores if index == 0 else ()
        if stop.finish_reason is None:
            if was_expected:
                self._seal_late(sequence)
            return news(sequence, token_ids=kept, scores=scores, prompt_scores=prompt_scores)
        return self._roster.end(
            sequence,
            stop.finish_reason,
            stop.stop_reason,
            token_ids=kept,
            scores=scores,
            prompt_scores=prompt_scores,
        )
