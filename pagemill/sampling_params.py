"""What a caller may ask of the sampler and of the stops; checked on construction.

`SamplingParams` is a plain, mutable dataclass as users of the field know it. The engine works on a
checked copy (`checked_copy`), so a caller who changes the object later changes nothing. What needs a
vocabulary (ids in range, bad words to ids) is checked by `engine.input_processor`.
"""

from __future__ import annotations

import copy
import enum
import math
import numbers
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pagemill.errors import NotSupportedError, RequestError

MAX_SAMPLES = 16384
MAX_LOGIT_BIAS = 100.0
MAX_TOKENS = 2**63 - 1  # lengths and their sums stay numbers that everything can hold
MAX_SHOWN = 100
GREEDY_BELOW = 1e-5  # temperatures under this are greedy

# (output ids, float32 logits [vocab]) -> logits [vocab], or (prompt ids, output ids, logits) -> logits
LogitsProcessor = Callable[..., Any]


class RequestOutputKind(enum.Enum):
    """How much of a request's output each `RequestOutput` carries."""

    CUMULATIVE = 0  # everything so far, each time
    DELTA = 1  # what is new since the last one
    FINAL_ONLY = 2  # one output, at the end


@dataclass
class SamplingParams:
    """Parameters of one request. Names, defaults and meanings follow vLLM's public API.

    Raises `RequestError` (a `ValueError`) naming the parameter, its value and its range.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logits_processors: list[LogitsProcessor] | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: Any = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.check()

    @property
    def is_greedy(self) -> bool:
        """Return whether tokens are taken by argmax."""
        return self.temperature < GREEDY_BELOW

    @property
    def num_samples(self) -> int:
        """Return how many sequences are sampled: `best_of`, or `n`."""
        return self.best_of if self.best_of is not None else self.n

    @property
    def stop_strings(self) -> list[str]:
        """Return `stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    def clone(self) -> SamplingParams:
        """Return a deep copy; logits processors are shared, being functions."""
        shared = self.logits_processors
        memo = {id(p): p for p in shared or []}
        return copy.deepcopy(self, memo)

    def checked_copy(self) -> SamplingParams:
        """Return a deep copy, checked again: fields may have been set after construction."""
        own = self.clone()
        own.check()
        return own

    def check(self) -> None:
        """Normalize and check every field that needs no vocabulary."""
        _int(self, "n", 1, MAX_SAMPLES)
        if self.best_of is not None:
            _int(self, "best_of", self.n, MAX_SAMPLES, f"{self.n} (n)")
        for name in ("presence_penalty", "frequency_penalty"):
            _number(self, name, -2.0, 2.0)
        _number(self, "repetition_penalty", 0.0, math.inf, open_low=True)
        _number(self, "temperature", 0.0, math.inf)
        _number(self, "top_p", 0.0, 1.0, open_low=True)
        _int(self, "top_k", -1, None)
        _number(self, "min_p", 0.0, 1.0)
        self._check_seed()
        self._check_stops()
        self._check_lengths()
        self._check_logprobs()
        self._check_masks()
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize"):
            _bool(self, name)
        for name in ("skip_special_tokens", "spaces_between_special_tokens"):
            _bool(self, name)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise _bad("output_kind", self.output_kind, "a RequestOutputKind")
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise _bad("extra_args", self.extra_args, "a dict or None")
        if self.extra_args:
            raise RequestError(
                f"extra_args has {sorted(self.extra_args)}; this version reads none of its keys, "
                "remove them",
                param="extra_args",
            )
        if self.structured_outputs is not None:
            raise NotSupportedError("structured_outputs: this version has no structured output")
        if self.is_greedy and self.num_samples > 1:
            name = "best_of" if self.n == 1 else "n"
            raise RequestError(
                f"{name} is {self.num_samples} with temperature {self.temperature} (greedy): every "
                "sample would be the same; set n to 1 or raise the temperature",
                param=name,
            )

    def _check_seed(self) -> None:
        if self.seed is None:
            return
        _int(self, "seed", -(2**63), 2**63 - 1)
        if self.seed == -1:
            self.seed = None

    def _check_stops(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop = _list(self, "stop", str, "strings")
        if any(not s for s in self.stop):
            raise _bad("stop", self.stop, "non-empty strings")
        if any("\ud800" <= c <= "\udfff" for s in self.stop for c in s):
            raise _bad("stop", self.stop, "strings without lone surrogates, which no text holds")
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop strings need the text: set detokenize=True or use stop_token_ids",
                param="stop",
            )
        self.stop_token_ids = _list(self, "stop_token_ids", int, "token ids")
        self.bad_words = _list(self, "bad_words", str, "strings")
        if any(not s for s in self.bad_words):
            raise _bad("bad_words", self.bad_words, "non-empty strings")

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            _int(self, "max_tokens", 0, MAX_TOKENS)
            if self.max_tokens == 0 and self.prompt_logprobs is None:
                raise RequestError(
                    "max_tokens is 0, which generates nothing: use at least 1, or ask for "
                    "prompt_logprobs",
                    param="max_tokens",
                )
        _int(self, "min_tokens", 0, self.max_tokens, high_text=f"{self.max_tokens} (max_tokens)")
        value = self.truncate_prompt_tokens
        if value is not None:
            _int(self, "truncate_prompt_tokens", -1, None)
            if value == 0:
                raise _bad("truncate_prompt_tokens", value, "-1 (the model's limit) or at least 1")

    def _check_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is True or value is False:
                raise _bad(name, value, "a whole number, or None")
            if value is not None:
                _int(self, name, -1, None)

    def _check_masks(self) -> None:
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise _bad("logit_bias", self.logit_bias, "a dict of token id to bias")
            self.logit_bias = _biases(self.logit_bias)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _list(self, "allowed_token_ids", int, "token ids")
            if not self.allowed_token_ids:
                raise _bad("allowed_token_ids", [], "at least one token id, or None")
        if self.logits_processors is not None:
            processors = self.logits_processors
            if not isinstance(processors, (list, tuple)) or not all(map(callable, processors)):
                raise _bad("logits_processors", processors, "a list of callables")


def is_whole_number(value: object) -> bool:
    """Return whether a value is an int, or a scalar such as numpy's that stands for one."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def as_whole(value: Any) -> Any:
    """Return a float without a fraction as an int, anything else as it is: JSON has one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def shown(value: object) -> str:
    """Return a value for a message, not longer than MAX_SHOWN characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more digits, or deeper nested, than Python writes
        text = f"{type(value).__name__} too large to show"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def _bad(name: str, value: object, wanted: str) -> RequestError:
    return RequestError(f"{name} is {shown(value)}; it must be {wanted}", param=name)


def _int(
    params: SamplingParams, name: str, low: int, high: int | None, low_text: str = "",
    high_text: str = "",
) -> None:  # fmt: skip
    value = getattr(params, name)
    low_text = low_text or str(low)
    wanted = f"a whole number of at least {low_text}"
    if high is not None:
        wanted = f"a whole number from {low_text} to {high_text or high}"
    value = as_whole(value)
    if not is_whole_number(value):
        raise _bad(name, value, wanted)
    value = int(value)
    if value < low or (high is not None and value > high):
        raise _bad(name, value, wanted)
    setattr(params, name, value)


def _number(
    params: SamplingParams, name: str, low: float, high: float, *, open_low: bool = False
) -> None:
    value = getattr(params, name)
    bracket = "(" if open_low else "["
    wanted = f"a number in {bracket}{low:g}, {high:g}]"
    if high == math.inf:
        wanted = f"a finite number {'above' if open_low else 'of at least'} {low:g}"
    if not _is_number(value):
        raise _bad(name, value, wanted)
    try:
        value = float(value)
    except OverflowError:
        raise _bad(name, value, wanted) from None
    if not math.isfinite(value) or value < low or value > high or (open_low and value == low):
        raise _bad(name, value, wanted)
    setattr(params, name, value)


def _bool(params: SamplingParams, name: str) -> None:
    if not isinstance(getattr(params, name), bool):
        raise _bad(name, getattr(params, name), "True or False")


def _list(params: SamplingParams, name: str, kind: type, what: str) -> list[Any]:
    value = getattr(params, name)
    if value is None:
        return []
    wanted = f"a list of {what}"
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise _bad(name, value, wanted)
    if kind is int:
        ids = [as_whole(v) for v in value]
        if not all(map(is_whole_number, ids)):
            raise _bad(name, value, wanted)
        return [int(v) for v in ids]
    if not all(isinstance(v, kind) for v in value):
        raise _bad(name, value, wanted)
    return list(value)


def _biases(given: dict[Any, Any]) -> dict[int, float]:
    """Return token id -> clamped bias; JSON's keys are strings."""
    biases: dict[int, float] = {}
    for key, value in given.items():
        token_id = _bias_id(key)
        if token_id in biases:
            raise RequestError(
                f"logit_bias names the token id {token_id} twice; give it one bias",
                param="logit_bias",
            )
        biases[token_id] = _bias(key, value)
    return biases


def _bias_id(key: Any) -> int:
    if is_whole_number(key):
        return int(key)
    # Digits alone: int() reads " 5", "1_0" and other scripts' digits too, which nobody means as an id.
    if not re.fullmatch(r"-?[0-9]{1,19}", str(key)):
        raise RequestError(
            f"logit_bias has the key {shown(key)}; keys must be token ids", param="logit_bias"
        )
    return int(str(key))


def _bias(key: object, value: Any) -> float:
    if not _is_number(value) or not (is_whole_number(value) or math.isfinite(value)):
        raise RequestError(
            f"logit_bias for token {shown(key)} is {shown(value)}; it must be a finite number",
            param="logit_bias",
        )
    return float(max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, value)))
