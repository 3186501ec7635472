"""How many draft tokens a sequence may have in the next step: as many as pay, down to none.

A draft token that is sampled saves a step of its sequence; every draft token makes the step longer. The
chance that the first j drafts of a sequence are all sampled is a^j, where a is how often its drafts were
right lately. The drafts of all sequences are put in the order of their chances, and as many are taken as
give the most tokens a second:

    (sequences + sum of chances) / seconds of a step with so many tokens

So many running sequences, whose step is slow already, leave no room for drafts; and a text that nobody can
guess gets none. A sequence without drafts is tried again now and then. All of it changes the speed alone.
Read by the planner, fed by `step_results`; owned by the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from pagemill.config import SpeculativeConfig
from pagemill.core.sequence import DraftRecord, Sequence
from pagemill.core.step_costs import CostCurve, StepCosts
from pagemill.messages import SchedulerOutput, StepOutput

_LEAST_CHANCE = 0.1  # below, a draft is not worth its row of logits on any machine
_FORGETTING = 0.85  # weight of what was, at each new draft of a sequence
_FORGETTING_ALL = 0.98
_PRIOR_WEIGHT = 2.0  # draft tokens that what is known of all sequences counts for
_FIRST_GUESS = 0.7  # of an engine that has seen no draft yet
_WORTH = 1.05  # times the plain rate, from which drafts are made: times and chances are estimates
_TRY_AGAIN = 32  # steps without a draft, after which there is one again
_TRIED = 2  # tokens of such a draft


class DraftLengths:
    """Chooses the lengths, and learns from results."""

    def __init__(self, config: SpeculativeConfig, max_model_len: int) -> None:
        self._longest = config.num_speculative_tokens
        self._most = config.max_drafts
        self._adapts = config.adaptive_length
        self._max_model_len = max_model_len
        self._all = DraftRecord(1.0, _FIRST_GUESS)
        self._costs = StepCosts()
        self._seconds_a_draft = 0.0  # of the proposer, for one more token of every sequence

    def choose(self, decodes: Many[Sequence], num_free: int) -> list[int]:
        """Return how many drafts each of the sequences that compute their last token may have.

        `num_free` tokens are left of the step's budget. Changes nothing.
        """
        limits = [min(self._longest, self._most_useful(sequence)) for sequence in decodes]
        room = min(num_free, self._most)
        if not self._adapts:
            return _one_by_one(limits, room)
        lengths = [0] * len(decodes)
        if room <= 0 or not self._costs.is_known(len(decodes)):
            return lengths  # what drafts are worth is measured against steps without any
        curve = self._costs.curve()
        if not _could_pay(curve, len(decodes), room):
            return lengths
        chances: list[tuple[float, int, int]] = []  # (-chance, length, index)
        for index, (sequence, limit) in enumerate(zip(decodes, limits, strict=True)):
            rate = self.rate(sequence)
            record = sequence.drafting
            is_idle = record is not None and record.num_idle >= _TRY_AGAIN
            for length in range(1, limit + 1):
                chance = rate**length
                if is_idle and length <= _TRIED:
                    chance = max(chance, _FIRST_GUESS**length)
                if chance < _LEAST_CHANCE:
                    break
                chances.append((-chance, length, index))
        chances.sort()
        for _, length, index in self._what_pays(curve, chances[:room], len(decodes)):
            lengths[index] = max(lengths[index], length)
        return lengths

    def _what_pays(
        self, curve: CostCurve, chances: list[tuple[float, int, int]], num_decodes: int
    ) -> list[tuple[float, int, int]]:
        """Return as many of the drafts, which are in the order of their worth, as are best."""
        longest, gained = 0, float(num_decodes)
        best, num_best = _WORTH * gained / curve.at(num_decodes), 0
        for number, (chance, length, _) in enumerate(chances, start=1):
            gained -= chance
            longest = max(longest, length)
            seconds = curve.at(num_decodes + number) + longest * self._seconds_a_draft
            if gained / seconds > best:
                best, num_best = gained / seconds, number
        return chances[:num_best]

    def _most_useful(self, sequence: Sequence) -> int:
        """Return how many drafts could all become output: the token behind them is one, too."""
        room = self._max_model_len - sequence.num_prompt_tokens
        wanted = min(sequence.group.request.max_tokens, room)
        return max(0, wanted - len(sequence.output_token_ids) - 1)

    def rate(self, sequence: Sequence) -> float:
        """Return how often a draft token of the sequence is right, 0..1."""
        everyone = self._all.num_right / self._all.num_compared
        record = sequence.drafting
        if record is None:
            return everyone
        right = record.num_right + _PRIOR_WEIGHT * everyone
        return right / (record.num_compared + _PRIOR_WEIGHT)

    def learn(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Take in what became of one sequence's draft, or that it had none."""
        record = sequence.drafting
        if record is None:
            record = sequence.drafting = DraftRecord()
        if num_drafted == 0:
            record.num_idle += 1
            return
        num_compared = min(num_accepted + 1, num_drafted)
        record.take(num_compared, num_accepted, _FORGETTING)
        self._all.take(num_compared, num_accepted, _FORGETTING_ALL)

    def learn_costs(self, scheduled: SchedulerOutput, result: StepOutput) -> None:
        """Take in how long a step took that had nothing but single tokens and drafts."""
        parts = scheduled.scheduled
        if not parts or any(part.num_tokens != 1 or part.num_samples != 1 for part in parts):
            return
        timings = result.timings_s
        drafting = timings.get("draft", 0.0)
        seconds = sum(s for name, s in timings.items() if not name.startswith("draft"))
        longest = max(output.num_drafted for output in result.sequences)
        num_drafted = sum(output.num_drafted for output in result.sequences)
        if seconds > 0.0:
            self._costs.learn(len(parts) + num_drafted, seconds)
        if longest:
            per_token = drafting / longest
            self._seconds_a_draft += 0.2 * (per_token - self._seconds_a_draft)


def _could_pay(curve: CostCurve, num_decodes: int, most: int) -> bool:
    """Return whether drafts that are always right would pay: with many sequences they may not."""
    best = num_decodes / curve.at(num_decodes)
    return any(
        count / curve.at(count) > best for count in range(num_decodes + 1, num_decodes + most + 1)
    )


def _one_by_one(limits: list[int], room: int) -> list[int]:
    """Return the limits, cut from the last on so that their sum fits the room."""
    lengths = []
    for limit in limits:
        lengths.append(min(limit, room))
        room -= lengths[-1]
    return lengths
