"""Where a sequence ends: token stops and string stops. Pure; no queues, no tokenizer.

`check_tokens` is called by the scheduler for each run of new tokens. `StopStringMatcher` is fed by
`engine.output_processor`, which has the text, one matcher a sequence.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pagemill.messages import EngineRequest

# ---------------------------------------------------------------- tokens


@dataclass(frozen=True, slots=True)
class TokenStop:
    """What is kept of a run of new tokens, and whether the sequence ends with it."""

    num_kept: int
    finish_reason: str | None = None  # "stop" | "length" | None
    stop_reason: int | None = None  # the stop token id of the caller that matched


_ONE_KEPT = TokenStop(1)  # what nearly every decode gets


def output_limit(request: EngineRequest, max_model_len: int) -> int:
    """Return how many output tokens a sequence of the request may have."""
    return min(request.max_tokens, max_model_len - len(request.prompt_token_ids))


def check_tokens(
    token_ids: Sequence[int], num_output: int, request: EngineRequest, max_model_len: int
) -> TokenStop:
    """Return where a run of new tokens ends the sequence, given `num_output` tokens before it.

    For each token in turn: an end token ("stop", no reason), then a stop token of the caller ("stop",
    its id), both only from the `min_tokens`-th output token on; then `max_tokens` and `max_model_len`
    ("length"), which hold whatever `min_tokens` says. The token that ends the sequence is kept.
    """
    limit = output_limit(request, max_model_len)
    num_new = len(token_ids)
    ends_nowhere = request.eos_token_ids.isdisjoint(token_ids)
    ends_nowhere = ends_nowhere and request.stop_token_ids.isdisjoint(token_ids)
    if ends_nowhere and num_output + num_new < limit:  # nearly every time
        return _ONE_KEPT if num_new == 1 else TokenStop(num_new)
    for num_kept, token_id in enumerate(token_ids, start=1):
        num_now = num_output + num_kept
        if num_now >= request.sampling.min_tokens:
            if token_id in request.eos_token_ids:
                return TokenStop(num_kept, "stop")
            if token_id in request.stop_token_ids:
                return TokenStop(num_kept, "stop", token_id)
        if num_now >= limit:
            return TokenStop(num_kept, "length")
    return TokenStop(num_new)


# ---------------------------------------------------------------- strings


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text that may be shown now, and the stop string that ended it."""

    emit: str
    stopped: str | None = None


class StopStringMatcher:
    """Finds the first stop string in a text that arrives in pieces, wherever the pieces are cut.

    The first is the one that is complete first, reading character by character; of several complete at
    the same character, the longest. So the result does not depend on the cuts. The text ends before
    the match, or after it with `include`; nothing that follows is looked at.

    Text that could still become a stop (the longest end of the text that begins some stop) is held
    back, and given out by the `push` after which it no longer can, or by `flush`.

    Each stop has the automaton of Knuth, Morris and Pratt (1977): its state is the length of the
    longest end of the text that begins the stop.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        assert all(self._stops), "a stop string is empty"
        self._include = include
        self._borders = [_borders(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._held: deque[tuple[str, bool]] = deque()  # (character, hidden)
        self._is_done = False

    def push(self, text: str, *, hidden: bool = False, may_stop: bool = True) -> StopResult:
        """Take the next piece of text and return what may be shown.

        `hidden`: the piece (a special token left out of the visible text) takes part in matching but is
        never emitted, not even as part of an included stop. `may_stop=False`: the piece comes too early
        (min_tokens); a stop must lie entirely in pieces that may stop.
        """
        assert not self._is_done, "text after the stop"
        if not text:  # most tokens in the middle of a character: nothing changes
            return StopResult("")
        if not may_stop:
            self._states = [0] * len(self._stops)
            return StopResult(self._release(0) + ("" if hidden else text))
        if not self._held and self._firsts.isdisjoint(text):
            return StopResult("" if hidden else text)
        for char in text:
            self._held.append((char, hidden))
            stop = self._step(char)
            if stop is not None:
                self._is_done = True
                return StopResult(self._release(0 if self._include else len(stop)), stop)
        return StopResult(self._release(max(self._states, default=0)))

    def flush(self) -> str:
        """Return the held text: no more is coming, so it cannot become a stop."""
        self._states = [0] * len(self._stops)
        return self._release(0)

    def copy(self) -> StopStringMatcher:
        """Return another matcher that has read the same text."""
        other = copy.copy(self)
        other._states = list(self._states)
        other._held = deque(self._held)
        return other

    def _step(self, char: str) -> str | None:
        """Move all automata by one character; return the longest stop that it completes."""
        found = ""
        for index, stop in enumerate(self._stops):
            borders = self._borders[index]
            state = self._states[index]
            while state and stop[state] != char:
                state = borders[state - 1]
            state += stop[state] == char
            self._states[index] = state
            if state == len(stop) > len(found):
                found = stop
        return found or None

    def _release(self, num_kept: int) -> str:
        """Take all but the last `num_kept` held characters; return the visible ones."""
        taken = [self._held.popleft() for _ in range(len(self._held) - num_kept)]
        return "".join(char for char, hidden in taken if not hidden)


def _borders(stop: str) -> list[int]:
    """Return, for each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        length += stop[index] == stop[length]
        borders[index] = length
    return borders
