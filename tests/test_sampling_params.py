"""Every parameter: its range, its default, and what out-of-range values are told."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.errors import NotSupportedError, RequestError
from pagemill.sampling_params import SamplingParams

NOT_A_NUMBER: list[Any] = ["hot", [1], None, True, {}, float("nan")]

# name -> (legal values, illegal values)
RANGES: dict[str, tuple[list[Any], list[Any]]] = {
    "n": ([1, 2, 16384, 2.0], [0, -1, 16385, 1.5, "2", True, None]),
    "presence_penalty": ([-2, 0, 2.0], [-2.1, 2.1, math.inf, *NOT_A_NUMBER]),
    "frequency_penalty": ([-2, 0, 2.0], [-2.1, 2.1, -math.inf, *NOT_A_NUMBER]),
    "repetition_penalty": ([0.01, 1, 50.0], [0, 0.0, -1, math.inf, 10**400, *NOT_A_NUMBER]),
    "temperature": ([0, 0.0, 1, 100.0], [-0.1, math.inf, 10**400, *NOT_A_NUMBER]),
    "top_p": ([0.001, 1, 1.0], [0, 0.0, -1, 1.001, *NOT_A_NUMBER]),
    "top_k": ([-1, 0, 1, 10**9, 10**400], [-2, 1.5, "5", None, True]),
    "min_p": ([0, 0.5, 1], [-0.1, 1.1, *NOT_A_NUMBER]),
    "seed": ([None, 0, -1, 2**63 - 1, -(2**63)], [2**63, -(2**63) - 1, 1.5, "1", True]),
    "stop": ([None, [], "a", ["a", "b"]], ["", [""], [1], 5, [None], {"a": 1}, "a\ud800"]),
    "stop_token_ids": ([None, [], [1, 2]], [[1.5], ["1"], "12", 7, [True], [None]]),
    "bad_words": ([None, [], ["a"]], [[""], [1], 7, "word"]),
    "max_tokens": ([None, 1, 10**9], [-1, 1.5, "5", True, 0, 2**63, 10**4299]),
    "min_tokens": ([0, 16], [-1, 17, 1.5, "2", None, True]),
    "logprobs": ([None, 0, 20, -1], [-2, 1.5, "3", True, False]),
    "prompt_logprobs": ([None, 0, 20, -1], [-2, 1.5, "3", True]),
    "truncate_prompt_tokens": ([None, -1, 1, 10**6], [0, -2, 1.5, "1", True]),
    "logit_bias": (
        [None, {}, {1: 2}, {"1": 2.5}, {1: 10**400}, {1: -(10**400)}],
        [
            *({"x": 1}, {1: "a"}, {1: math.nan}, {1: math.inf}, [1], 5, {True: 1}),
            *({" 5": 1}, {"1_0": 1}, {"+5": 1}, {"\u0663": 1}, {"": 1}, {"5": 1, 5: 2}),
            {"9" * 5000: 1},
        ],
    ),
    "allowed_token_ids": ([None, [1]], [[], ["1"], 5, [1.5]]),
    "logits_processors": ([None, [], [print]], [print, [5], "x"]),
    "ignore_eos": ([True, False], [1, "yes", None]),
    "detokenize": ([True, False], [0, None]),
    "skip_special_tokens": ([True, False], [1, None]),
    "spaces_between_special_tokens": ([True, False], [1, None]),
    "include_stop_str_in_output": ([True, False], [1, None]),
    "output_kind": ([], [1, "DELTA", None]),
    "extra_args": ([None, {}], [[], {"unknown": 1}]),
}
LEGAL = [(name, value) for name, (legal, _) in RANGES.items() for value in legal]
ILLEGAL = [(name, value) for name, (_, illegal) in RANGES.items() for value in illegal]


@pytest.mark.parametrize(("name", "value"), LEGAL)
def test_a_legal_value_is_taken(name: str, value: Any) -> None:
    SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), ILLEGAL)
def test_an_illegal_value_is_refused_naming_the_parameter(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, RequestError)
    assert caught.value.param == name


def test_the_message_gives_the_value_and_the_range() -> None:
    with pytest.raises(RequestError, match=r"top_p is 1\.5; it must be a number in \(0, 1\]"):
        SamplingParams(top_p=1.5)
    with pytest.raises(RequestError, match=r"min_tokens is 9; .* from 0 to 5 \(max_tokens\)"):
        SamplingParams(min_tokens=9, max_tokens=5)
    with pytest.raises(RequestError, match=r"best_of is 1; .* from 2 \(n\) to 16384"):
        SamplingParams(n=2, best_of=1)


def test_every_field_is_in_the_table_of_ranges() -> None:
    fields = set(SamplingParams.__dataclass_fields__)
    assert fields - set(RANGES) == {"best_of", "structured_outputs"}


def test_minus_one_as_a_seed_is_none() -> None:
    assert SamplingParams(seed=-1).seed is None


def test_biases_are_clamped_and_keys_are_numbers() -> None:
    params = SamplingParams(logit_bias={"5": 1000, 6: -1000.0, "7": 1})  # type: ignore[dict-item]
    assert params.logit_bias == {5: 100.0, 6: -100.0, 7: 1.0}


@pytest.mark.parametrize("name", ["n", "best_of"])
def test_more_than_one_greedy_sample_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} is 2 .*greedy") as caught:
        SamplingParams(temperature=1e-6, **{name: 2})
    assert caught.value.param == name


def test_nothing_generated_is_legal_with_prompt_logprobs() -> None:
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0


def test_stop_strings_need_the_text() -> None:
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop=["a"], detokenize=False)


def test_structured_output_is_refused_by_name() -> None:
    with pytest.raises(NotSupportedError, match="structured_outputs"):
        SamplingParams(structured_outputs={"json": {}})


def test_a_copy_shares_nothing_that_can_change() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 1.0}, logits_processors=[print])
    own = params.checked_copy()
    params.stop.append("b")  # type: ignore[union-attr]
    params.logit_bias[2] = 2.0  # type: ignore[index]
    assert (own.stop, own.logit_bias, own.logits_processors) == (["a"], {1: 1.0}, [print])


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("n", np.int64(2), 2),
        ("seed", np.uint32(7), 7),
        ("temperature", np.float32(0.5), 0.5),
        ("presence_penalty", np.int8(1), 1.0),
        ("stop_token_ids", list(np.array([1, 2])), [1, 2]),
        ("allowed_token_ids", (np.int32(3),), [3]),
        ("logit_bias", {np.int64(1): np.float32(0.5)}, {1: 0.5}),
    ],
)
def test_scalars_of_numpy_are_numbers(name: str, value: Any, wanted: Any) -> None:
    taken = getattr(SamplingParams(**{name: value}), name)
    assert repr(taken) == repr(wanted)


@given(st.floats())
def test_a_temperature_is_either_taken_as_it_is_or_refused(value: float) -> None:
    if math.isfinite(value) and value >= 0:
        assert SamplingParams(temperature=value).temperature == value
    else:
        with pytest.raises(RequestError):
            SamplingParams(temperature=value)


def test_a_bias_of_any_size_is_clamped() -> None:
    params = SamplingParams(logit_bias={"7": 10**400, "8": -(10**400), "9": 1e308})
    assert params.logit_bias == {7: 100.0, 8: -100.0, 9: 100.0}


def test_a_message_stays_short_whatever_the_value() -> None:
    for value in (10**5000, -(10**4000), "x" * 10**6):
        with pytest.raises(RequestError) as caught:
            SamplingParams(n=value)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 250
