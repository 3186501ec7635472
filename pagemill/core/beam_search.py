"""Beam search of one request: which beams go on and which are complete. Pure; knows no blocks, no queues.

The rules are those of transformers' `generate(num_beams=...)` without sampling. Of all continuations of the
running beams the `num_candidates` most likely are looked at. Those that do not end, `width` of them at most, run
on. Those that end are complete if they are among the first `width`; the best `width` complete ones
are kept, by log probability over generated length to the power of `length_penalty`.

A beam ends as a sample does: by an end token, a stop token of the caller, a stop string that its last token
completes, or its length. Its text is read for stop strings only.

A result arrives for each running beam when it happens to be computed; `advance` is called when all are there.
Owned by `core.beam_results`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from pagemill.messages import BeamSpec, TokenScores


class BeamText(Protocol):
    """The text of a beam, in which stop strings are looked for; whoever has a tokenizer makes one."""

    def copy(self) -> BeamText:
        """Return another text that is the same so far."""
        ...

    def push(self, token_id: int, num_tokens: int) -> str | None:
        """Add the `num_tokens`-th token; return the stop string that it completes, if any."""
        ...


@dataclass(frozen=True, slots=True)
class Beam:
    """One hypothesis: its tokens, their scores, and the sum of their log probabilities."""

    token_ids: tuple[int, ...] = ()
    scores: tuple[TokenScores, ...] = ()
    cumulative: float = 0.0
    finish_reason: str | None = None  # "stop" | "length", None while it runs
    stop_reason: int | str | None = None
    text: BeamText | None = None  # where there are stop strings


@dataclass(frozen=True, slots=True)
class Continuation:
    """A running beam after a step: which of the running beams before it continues."""

    parent: int  # index among those
    beam: Beam


class BeamSearch:
    """The search of one request.

    `limit`: most tokens that a beam may have. `text`: an empty one, if stop strings end a beam.
    """

    def __init__(
        self,
        spec: BeamSpec,
        *,
        limit: int,
        eos_token_ids: frozenset[int],
        stop_ids: frozenset[int],
        text: BeamText | None = None,
    ) -> None:
        self._spec = spec
        self._limit = limit
        self._eos = eos_token_ids
        self._stops = stop_ids
        self._running: list[Beam] = [Beam(text=text)]
        self._results: dict[int, TokenScores] = {}  # of this round, by index of the running beam
        self._complete: list[tuple[float, Beam]] = []  # best first, `width` at most

    @property
    def running(self) -> list[Beam]:
        """Return the running beams, best first."""
        return self._running

    @property
    def has_all(self) -> bool:
        """Return whether the results of all running beams are there."""
        return len(self._results) == len(self._running)

    def best(self) -> list[Beam]:
        """Return the complete beams, best first."""
        return [beam for _, beam in self._complete]

    def note(self, index: int, scores: TokenScores) -> None:
        """Take the most likely continuations of running beam `index`; again is fine, and the same."""
        self._results[index] = scores

    def advance(self) -> list[Continuation]:
        """Return what runs on, best first; nothing when the search has ended."""
        top = self._most_likely()
        self._results = {}
        length = len(top[0].beam.token_ids)
        self._take_complete(top[: self._spec.width], length)
        going_on = [c for c in top if c.beam.finish_reason is None][: self._spec.width]
        self._running = [c.beam for c in going_on]
        return going_on if going_on and self._may_improve(length) else []

    def _most_likely(self) -> list[Continuation]:
        most = self._spec.num_candidates
        found = [
            (beam.cumulative + logprob, parent, rank)
            for parent, beam in enumerate(self._running)
            for rank, logprob in enumerate(self._results[parent].top_logprobs[:most])
        ]
        # Equal sums: the better beam before, then the likelier token. Nothing depends on batch mates.
        found.sort(key=lambda c: (-c[0], c[1], c[2]))
        scores = [self._told(self._results[parent]) for parent in range(len(self._running))]
        return [
            Continuation(parent, self._extend(parent, rank, scores[parent]))
            for _, parent, rank in found[:most]
        ]

    def _told(self, result: TokenScores) -> TokenScores:
        """Return a result with as many alternatives as are told with each token of a beam."""
        most = self._spec.num_logprobs
        return replace(
            result, top_ids=result.top_ids[:most], top_logprobs=result.top_logprobs[:most]
        )

    def _extend(self, parent: int, rank: int, told: TokenScores) -> Beam:
        """Return a running beam with its continuation `rank` (from 0), ended where that ends it."""
        beam, result = self._running[parent], self._results[parent]
        token_id, logprob = result.top_ids[rank], result.top_logprobs[rank]
        scores = replace(told, token_id=token_id, logprob=logprob, rank=rank + 1)
        longer = Beam(
            (*beam.token_ids, token_id), (*beam.scores, scores), beam.cumulative + logprob
        )
        if token_id in self._eos:
            return replace(longer, finish_reason="stop")
        if token_id in self._stops:
            return replace(longer, finish_reason="stop", stop_reason=token_id)
        if beam.text is not None:
            text = beam.text.copy()
            stop = text.push(token_id, len(longer.token_ids))
            if stop is not None:
                return replace(longer, finish_reason="stop", stop_reason=stop)
            longer = replace(longer, text=text)
        if len(longer.token_ids) >= self._limit:
            return replace(longer, finish_reason="length", text=None)
        return longer

    def _take_complete(self, first: list[Continuation], length: int) -> None:
        if self._is_full and self._spec.early_stopping is True:
            return
        self._complete += [
            (self._score(c.beam.cumulative, length), c.beam)
            for c in first
            if c.beam.finish_reason is not None
        ]
        self._complete.sort(key=lambda entry: -entry[0])
        del self._complete[self._spec.width :]

    def _may_improve(self, length: int) -> bool:
        """Return whether a running beam could still take the place of a complete one."""
        if not self._is_full:
            return True
        if self._spec.early_stopping is True:
            return False
        if self._spec.early_stopping == "never" and self._spec.length_penalty > 0:
            length = self._limit
        return self._score(self._running[0].cumulative, length) > self._complete[-1][0]

    @property
    def _is_full(self) -> bool:
        return len(self._complete) == self._spec.width

    def _score(self, cumulative: float, length: int) -> float:
        score: float = cumulative / float(length) ** self._spec.length_penalty
        return score
