"""What a step takes, by the number of tokens that it computes: measured, never assumed.

Kept at a few counts; between two of them a straight line. Times are noisy upwards, so a count is known
when it was measured twice, a faster step is believed sooner than a slower one, and what was measured long
ago is forgotten. Only how many drafts are made hangs on these, so no answer does. Owned by `draft_lengths`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

_FASTER, _SLOWER = 0.5, 0.1  # weight of a new measurement
_REMEMBERED = 256  # steps


@dataclass(slots=True)
class _Measured:
    seconds: float
    step: int  # when it was measured last
    times: int = 1


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds at some numbers of tokens, both rising."""

    counts: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, num_tokens: int) -> float:
        """Return seconds; what lies outside of all that was measured takes as long as the nearest."""
        if not self.counts:
            return 1.0
        index = bisect_left(self.counts, num_tokens)
        if index == 0 or index == len(self.counts):
            return self.seconds[max(0, index - 1)]
        low, high = self.counts[index - 1], self.counts[index]
        before, after = self.seconds[index - 1], self.seconds[index]
        return before + (num_tokens - low) / (high - low) * (after - before)


class StepCosts:
    """Measured seconds of steps, by their tokens."""

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}
        self._num_steps = 0

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Take one step in."""
        self._num_steps += 1
        known = self._measured.get(place(num_tokens))
        if known is None or self._is_old(known):
            self._measured[place(num_tokens)] = _Measured(seconds, self._num_steps)
            return
        if known.times == 1:
            known.seconds = min(known.seconds, seconds)
        else:
            weight = _FASTER if seconds < known.seconds else _SLOWER
            known.seconds += weight * (seconds - known.seconds)
        known.step = self._num_steps
        known.times += 1

    def is_known(self, num_tokens: int) -> bool:
        """Return whether steps of about so many tokens were measured not long ago."""
        return self._is_fresh(place(num_tokens))

    def curve(self) -> CostCurve:
        """Return what is known now."""
        counts = [count for count in sorted(self._measured) if self._is_fresh(count)]
        seconds: list[float] = []
        for count in reversed(counts):
            # A step that took longer than a larger one had bad luck.
            seconds.append(min([self._measured[count].seconds, *seconds[-1:]]))
        return CostCurve(tuple(counts), tuple(reversed(seconds)))

    def _is_fresh(self, count: int) -> bool:
        known = self._measured.get(count)
        return known is not None and known.times > 1 and not self._is_old(known)

    def _is_old(self, known: _Measured) -> bool:
        return self._num_steps - known.step > _REMEMBERED


def place(num_tokens: int) -> int:
    """Return the count that stands for `num_tokens`: exact up to 15, then eight an octave."""
    width = 1 << max(0, num_tokens.bit_length() - 4)
    return num_tokens // width * width
