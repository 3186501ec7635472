"""What a caller may ask of beam search; checked on construction.

Names follow vLLM's public API, meanings follow transformers' `generate(num_beams=...)`: the score of a beam is
the sum of its log probabilities over its number of generated tokens, the end token included, to the power of
`length_penalty`. A beam ends where a sample of `generate` would: its stops are looked for in what it generates.
The engine works on a checked copy.
"""

from __future__ import annotations

import copy
import numbers
from dataclasses import dataclass
from typing import Any

from pagemill.errors import RequestError
from pagemill.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    as_whole,
    is_whole_number,
    shown,
)

MAX_BEAMS = 256
MAX_LENGTH_PENALTY = 20.0  # the power of a length of millions is still a number


@dataclass
class BeamSearchParams:
    """Parameters of one beam search. Raises `RequestError` naming the parameter, value and range.

    early_stopping: True ends when `beam_width` beams are complete; False when no running beam is better than
    the worst of them at its length now; "never" when none can become better, whatever its length.
    n: how many of the best beams come back; None means all `beam_width` of them.
    stop, stop_token_ids: as in `SamplingParams`. The token that ends a beam counts in its score and length.
    logprobs: how many of the likeliest tokens are told at each position of a beam, beside its own; -1 means all
    of the vocabulary, None means 2 * `beam_width`.
    """

    beam_width: int
    max_tokens: int | None = 16  # None: up to the end of the context
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | str = False
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self.check()

    @property
    def num_returned(self) -> int:
        """Return how many beams come back."""
        return self.beam_width if self.n is None else self.n

    def as_sampling_params(self) -> SamplingParams:
        """Return what holds for the text of each beam; there is one answer, at the end."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            logprobs=0 if self.logprobs is None else self.logprobs,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def checked_copy(self) -> BeamSearchParams:
        """Return a copy, checked again: fields may have been set after construction."""
        own = copy.copy(self)
        own.check()
        return own

    def check(self) -> None:
        """Check every field that needs no vocabulary."""
        self.beam_width = _whole("beam_width", self.beam_width, 1, MAX_BEAMS)
        if self.max_tokens is not None:
            self.max_tokens = _whole("max_tokens", self.max_tokens, 1, None)
        if self.n is not None:
            self.n = _whole("n", self.n, 1, self.beam_width)
        penalty = self.length_penalty
        is_number = isinstance(penalty, numbers.Real) and not isinstance(penalty, bool)
        if not is_number or not -MAX_LENGTH_PENALTY <= penalty <= MAX_LENGTH_PENALTY:
            raise _bad(
                "length_penalty",
                penalty,
                f"a number from {-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}",
            )
        self.length_penalty = float(penalty)
        if self.temperature != 0:
            raise _bad(
                "temperature",
                self.temperature,
                "0: beam search compares the model's own log probabilities and draws nothing",
            )
        if (
            self.early_stopping not in (True, False, "never")
            or self.early_stopping in (0, 1)
            and (not isinstance(self.early_stopping, bool))
        ):
            raise _bad("early_stopping", self.early_stopping, "true, false or 'never'")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "true or false")
        self.as_sampling_params()  # checks stop, stop_token_ids and logprobs


def _whole(name: str, value: Any, low: int, high: int | None) -> int:
    value = as_whole(value)
    if not is_whole_number(value) or value < low or (high is not None and value > high):
        upper = "" if high is None else f" to {high}"
        raise _bad(name, value, f"a whole number from {low}{upper}")
    return int(value)


def _bad(name: str, value: Any, wanted: str) -> RequestError:
    return RequestError(f"{name} is {shown(value)}; it must be {wanted}", param=name)
