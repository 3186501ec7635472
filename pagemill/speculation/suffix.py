"""Suffix look-up: what followed the last tokens in all that was said before, and in the sequence itself.

G. Oliaro et al., "SuffixDecoding", 2024. The longest end of the text, of at most
`suffix_decoding_max_tree_depth` tokens, is looked for in past outputs and in the sequence; the draft is the
most frequent continuation, as far as its chance stays over `suffix_decoding_min_token_prob`, and no longer
than `suffix_decoding_max_spec_factor` times what matched. Of the two the one with the greater expected
number of right tokens is proposed. Past outputs take `suffix_max_cached_tokens` tokens; the oldest go first.

Outputs of all requests with one `cache_salt`, or with none, are remembered together, and apart from those of any
other. A draft shows in how fast a text comes and in nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from pagemill.batch.request_table import RequestTable
from pagemill.config import EngineConfig
from pagemill.messages import ScheduledSequence, SchedulerOutput
from pagemill.speculation.base import Draft, Option, Proposer, RankParts
from pagemill.speculation.matching import (
    Places,
    Tokens,
    earlier_matches,
    longest_of,
    most_frequent,
)
from pagemill.speculation.past_outputs import NOBODY, PastOutputs, owner_of

_MOST_PLACES = 64  # of a sequence in itself, the newest


class SuffixProposer:
    """A `Proposer` that remembers outputs. Rows that end are remembered, preempted ones as well."""

    options: ClassVar[Mapping[str, Option]] = {
        "suffix_decoding_max_tree_depth": Option(24, 2, 256),
        "suffix_decoding_max_spec_factor": Option(1.0, 0.1, 64.0),
        "suffix_decoding_min_token_prob": Option(0.1, 0.0, 1.0),
        "suffix_max_cached_tokens": Option(1 << 20, 1 << 8, 1 << 28),
    }
    default_length: ClassVar[int] = 24
    needs_model: ClassVar[bool] = False

    def __init__(self, capacity: int, *, depth: int, factor: float, least: float) -> None:
        self.past = PastOutputs(capacity)
        self._owners: dict[int, int] = {}  # of rows with a salt, by seq_id
        self._depth, self._factor, self._least = depth, factor, least

    @classmethod
    def check(cls, options: Mapping[str, int | float]) -> None:
        """Do nothing: each option stands alone."""

    @classmethod
    def make(cls, config: EngineConfig, rank: RankParts) -> Proposer:
        """Read the sizes from the configuration."""
        assert config.speculative is not None
        options = config.speculative.options
        return cls(
            int(options["suffix_max_cached_tokens"]),
            depth=int(options["suffix_decoding_max_tree_depth"]),
            factor=options["suffix_decoding_max_spec_factor"],
            least=options["suffix_decoding_min_token_prob"],
        )

    def end_rows(self, table: RequestTable, seq_ids: Sequence[int]) -> None:
        """Remember what was said, after as much of the prompt as finds its beginning again."""
        for seq_id in seq_ids:
            owner = self._owners.pop(seq_id, NOBODY)
            if seq_id not in table:
                continue
            row = table.row(seq_id)
            num_prompt = table.num_prompt_tokens(row)
            tokens = table.known_tokens(row)
            if len(tokens) > num_prompt:
                self.past.add(tokens[max(0, num_prompt - self._depth) :], owner)

    def begin_step(self, table: RequestTable, step: SchedulerOutput) -> None:
        """Note whose the new rows are."""
        for new in step.new_sequences:
            if new.cache_salt is not None:
                self._owners[new.seq_id] = owner_of(new.cache_salt)

    def propose(self, table: RequestTable, parts: Sequence[ScheduledSequence]) -> list[Draft]:
        """Look each sequence up."""
        return [
            self.look_up(
                table.known_tokens(int(row)),
                part.num_drafts,
                self._owners.get(part.seq_id, NOBODY),
            )
            for row, part in zip(table.rows(parts), parts, strict=True)
        ]

    def look_up(self, tokens: Tokens, count: int, owner: int = NOBODY) -> Draft:
        """Return the better of what the past and the sequence itself suggest."""
        suffix = tokens[-self._depth :]
        ends, size = earlier_matches(tokens, 2)
        ends, size = longest_of(tokens, ends[-_MOST_PLACES:], suffix, size, self._depth)
        own, score = self._continue(tokens, ends, size, len(tokens), count)
        ends = self.past.places_of(suffix, owner)
        ends, size = longest_of(self.past.tokens, ends, suffix, min(2, len(suffix)), self._depth)
        past, past_score = self._continue(self.past.tokens, ends, size, self.past.stop, count)
        return np.array(past if past_score > score else own, np.int32)

    def _continue(
        self, tokens: Tokens, ends: Places, size: int, stop: int, count: int
    ) -> tuple[list[int], float]:
        if not len(ends):
            return [], 0.0
        most = min(count, max(1, int(self._factor * size)))
        return most_frequent(tokens, ends, stop, most, self._least)
