"""What a step's result does to a request that searches beams: wait for the others, then fork and free.

A running beam is a sequence. When its next continuations are known it gives up its seat and waits, with its
blocks, for its mates of the same round: they may run in other steps, or be preempted in between. With the
last of them the next round's sequences are forked from those that run on, each one token longer, and the old ones
end; blocks that several share are copied at the first write, as for any samples of one request. Nothing is
told to the caller before the search has ended: which beam is best is known then only.

Called by `core.step_results`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pagemill.core.beam_search import Beam, BeamSearch, BeamText
from pagemill.core.roster import Roster
from pagemill.core.sequence import Sequence, SequenceGroup
from pagemill.messages import EngineRequest, SequenceOutput, SequenceUpdate

TextOf = Callable[[EngineRequest], BeamText | None]  # None: the request has no stop strings


class BeamResults:
    """Moves the beam searches of one roster on. `text_of` begins the text of a request's beams."""

    def __init__(self, roster: Roster, max_model_len: int, text_of: TextOf) -> None:
        self._roster = roster
        self._max_model_len = max_model_len
        self._text_of = text_of

    def take(self, sequence: Sequence, output: SequenceOutput, now: float) -> list[SequenceUpdate]:
        """Take the result of one beam in."""
        group = sequence.group
        if not output.tokens:  # the prompt goes on
            return []
        search = self._search(group)
        search.note(sequence.sample_index, output.scores[0][0])
        self._roster.pause(sequence)
        if not search.has_all:
            return []
        round = {beam.sample_index: beam for beam in group.sequences.values()}
        going_on = search.advance()
        if not going_on:
            return self._finish(group, search.best())
        for index, step in enumerate(going_on):
            parent = round[step.parent]
            child = parent.continue_as(self._roster.seq_ids.take(), index)
            child.append(step.beam.token_ids[-1:], now)
            self._roster.enter_fork(parent, child)
        for parent in round.values():
            self._roster.end(parent, "stop")
        return []

    def _search(self, group: SequenceGroup) -> BeamSearch:
        if group.beams is None:
            request = group.request
            assert request.beams is not None
            limit = self._max_model_len - len(request.prompt_token_ids)
            group.beams = BeamSearch(
                request.beams,
                limit=min(request.max_tokens, limit),
                eos_token_ids=request.eos_token_ids,
                stop_ids=request.stop_token_ids,
                text=self._text_of(request),
            )
        return group.beams

    def _finish(self, group: SequenceGroup, best: list[Beam]) -> list[SequenceUpdate]:
        """End the request; the best beams are its samples."""
        updates = self._roster.end_group(group, "stop")
        return [
            replace(
                update,
                token_ids=beam.token_ids,
                scores=beam.scores,
                finish_reason=beam.finish_reason,
                stop_reason=beam.stop_reason,
            )
            for update, beam in zip(updates, best[: len(updates)], strict=True)
        ]
