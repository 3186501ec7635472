"""The text of one sample as its tokens come: decoding, stop strings, and the held-back tail.

Owned by `engine.output_processor`, one object a sample, and by the beams of a search with stop strings (as the
`BeamText` of `core.beam_search`). What `push` returns is the stop string that has
now matched; the text is cut before it (or after it, when it is to be kept).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from pagemill.core.stop_checker import StopStringMatcher
from pagemill.sampling_params import SamplingParams
from pagemill.tokenizer.base import IncrementalDecoder, TextPiece, Tokenizer


class SampleText:
    """Text so far; characters that could still become a stop string are not in it yet."""

    __slots__ = ("_decoder", "_matcher", "_min_tokens", "_vocab_size", "text")

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.text = ""
        self._min_tokens = params.min_tokens
        self._decoder: IncrementalDecoder | None = None
        self._matcher: StopStringMatcher | None = None
        self._vocab_size = 0
        if tokenizer is None or not params.detokenize:
            return
        self._vocab_size = tokenizer.vocab_size
        self._decoder = tokenizer.decoder(
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        if params.stop_strings:
            self._matcher = StopStringMatcher(
                params.stop_strings, params.include_stop_str_in_output
            )

    def push(self, token_id: int, num_tokens: int) -> str | None:
        """Add the `num_tokens`-th output token; return the stop string it completed, if any."""
        # Models pad their vocabulary: rows behind the tokenizer's last id stand for no text.
        if self._decoder is None or token_id >= self._vocab_size:
            return None
        return self._add(self._decoder.push(token_id), num_tokens)

    def finish(self, num_tokens: int) -> str | None:
        """Add all that was held back; return the stop string that this completed, if any."""
        if self._decoder is None:
            return None
        stopped = self._add(self._decoder.flush(), num_tokens)
        if stopped is None and self._matcher is not None:
            self.text += self._matcher.flush()
        return stopped

    def copy(self) -> SampleText:
        """Return another text that is the same so far."""
        other = copy.copy(self)
        if self._decoder is not None:
            other._decoder = self._decoder.copy()
        if self._matcher is not None:
            other._matcher = self._matcher.copy()
        return other

    def _add(self, pieces: Sequence[TextPiece], num_tokens: int) -> str | None:
        matcher = self._matcher
        if matcher is None:
            for piece in pieces:
                if not piece.hidden:
                    self.text += piece.text
            return None
        may_stop = num_tokens > self._min_tokens
        for piece in pieces:
            result = matcher.push(piece.text, hidden=piece.hidden, may_stop=may_stop)
            self.text += result.emit
            if result.stopped is not None:
                return result.stopped
        return None


def text_with_stops(params: SamplingParams, tokenizer: Tokenizer | None) -> SampleText | None:
    """Return an empty text, or None where no stop string can end it."""
    return SampleText(params, tokenizer) if params.stop_strings else None
