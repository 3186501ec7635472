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
from pagemill.core.stop_checker import check_tokens
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
            sequence.num_computed += sequence.num_scheduled
            sequence.num_scheduled = 0
            if self._lets_go and not share.num_drafts:
                self._roster.blocks.slide(sequence, share.num_computed)
            if share.prompt_logprobs_from is not None:
                sequence.next_prompt_score = sequence.num_computed + 1
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
        if self._lets_go:
            blocks.slide(sequence, share.num_computed)
        blocks.trim(sequence.seq_id, sequence.num_tokens)

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
        stop = check_tokens(run, len(sequence.output_token_ids), request, self._max_model_len)
        kept = run[: stop.num_kept]
        sequence.append(kept, now)
        self._roster.blocks.name_blocks(sequence)
        if share.num_drafts:
            self._settle_drafts(sequence, share, len(run) - 1)
        scores = output.scores[index][: stop.num_kept] if output.scores else ()
        prompt_scores = output.prompt_scores if index == 0 else ()
        if stop.finish_reason is None:
            return news(sequence, token_ids=kept, scores=scores, prompt_scores=prompt_scores)
        return self._roster.end(
            sequence,
            stop.finish_reason,
            stop.stop_reason,
            token_ids=kept,
            scores=scores,
            prompt_scores=prompt_scores,
        )
