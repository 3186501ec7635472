"""Prompt lookup: what followed the last tokens when they came before, in the same text.

A. Saxena, "Prompt Lookup Decoding", 2023. The longest n-gram of `prompt_lookup_min` to `prompt_lookup_max`
tokens that ends the text is looked for in all of the sequence, prompt and output; of several places the
last one counts. Nothing is kept from step to step: a scan of a few thousand tokens takes microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from pagemill.batch.request_table import RequestTable
from pagemill.config import EngineConfig
from pagemill.errors import ConfigError
from pagemill.messages import ScheduledSequence, SchedulerOutput
from pagemill.speculation.base import Draft, Option, Proposer, RankParts
from pagemill.speculation.matching import Tokens, copy_from, earlier_matches

NOTHING: Draft = np.empty(0, np.int32)


class NGramProposer:
    """A `Proposer` without memory."""

    options: ClassVar[Mapping[str, Option]] = {
        "prompt_lookup_min": Option(5, 1, 64, "prompt_lookup_max"),
        "prompt_lookup_max": Option(5, 1, 64, "prompt_lookup_min"),
    }
    default_length: ClassVar[int] = 8
    needs_model: ClassVar[bool] = False

    def __init__(self, smallest: int, largest: int) -> None:
        self._smallest, self._largest = smallest, largest

    @classmethod
    def check(cls, options: Mapping[str, int | float]) -> None:
        """Refuse a smallest n-gram that is larger than the largest."""
        smallest, largest = options["prompt_lookup_min"], options["prompt_lookup_max"]
        if smallest > largest:
            raise ConfigError(
                f"speculative_config has prompt_lookup_min {smallest} and prompt_lookup_max {largest}; "
                f"lower prompt_lookup_min to at most {largest}"
            )

    @classmethod
    def make(cls, config: EngineConfig, rank: RankParts) -> Proposer:
        """Read the sizes from the configuration."""
        assert config.speculative is not None
        options = config.speculative.options
        return cls(int(options["prompt_lookup_min"]), int(options["prompt_lookup_max"]))

    def end_rows(self, table: RequestTable, seq_ids: Sequence[int]) -> None:
        """Do nothing: the text of a sequence is all there is."""

    def begin_step(self, table: RequestTable, step: SchedulerOutput) -> None:
        """Do nothing."""

    def propose(self, table: RequestTable, parts: Sequence[ScheduledSequence]) -> list[Draft]:
        """Look each sequence up in itself."""
        return [
            self.look_up(table.known_tokens(int(row)), part.num_drafts)
            for row, part in zip(table.rows(parts), parts, strict=True)
        ]

    def look_up(self, tokens: Tokens, count: int) -> Draft:
        """Return the `count` tokens after the last earlier place of the longest n-gram, or none."""
        ends, size = earlier_matches(tokens, self._largest)
        if size < self._smallest or not len(ends):
            return NOTHING
        return copy_from(tokens, int(ends[-1]) + 1, count)
