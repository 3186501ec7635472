"""A proposer that was told what sequences will say, and is wrong now and then."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from pagemill.batch.request_table import RequestTable
from pagemill.config import EngineConfig
from pagemill.messages import ScheduledSequence, SchedulerOutput
from pagemill.speculation.base import Draft, Option, Proposer, RankParts

# (prompt, seed, sample index) -> output
Known = Mapping[tuple[tuple[int, ...], int, int], Sequence[int]]


class KnowingProposer:
    """Gives the right tokens, each replaced by another with the chance `wrong`."""

    options: ClassVar[Mapping[str, Option]] = {}
    default_length: ClassVar[int] = 4
    needs_model: ClassVar[bool] = False

    def __init__(self, known: Known, *, wrong: float, seed: int = 0) -> None:
        self._known = known
        self._wrong = wrong
        self._rng = random.Random(seed)

    @classmethod
    def check(cls, options: Mapping[str, int | float]) -> None:
        """Do nothing: there are no options."""

    @classmethod
    def make(cls, config: EngineConfig, rank: RankParts) -> Proposer:
        """Know nothing."""
        return cls({}, wrong=0.0)

    def end_rows(self, table: RequestTable, seq_ids: Sequence[int]) -> None:
        """Do nothing."""

    def begin_step(self, table: RequestTable, step: SchedulerOutput) -> None:
        """Do nothing."""

    def propose(self, table: RequestTable, parts: Sequence[ScheduledSequence]) -> list[Draft]:
        """Guess for each sequence what it was said to say."""
        return [
            self._guess(table, int(row), part.num_drafts)
            for row, part in zip(table.rows(parts), parts, strict=True)
        ]

    def _guess(self, table: RequestTable, row: int, count: int) -> Draft:
        tokens = table.known_tokens(row).tolist()
        num_prompt = table.num_prompt_tokens(row)
        key = (tuple(tokens[:num_prompt]), table.spec(row).seed, table.sample_index(row))
        done = len(tokens) - num_prompt
        rest = list(self._known.get(key, ()))[done : done + count]
        return np.array([self._spoiled(token) for token in rest], np.int32)

    def _spoiled(self, token: int) -> int:
        return token ^ 1 if self._rng.random() < self._wrong else token
