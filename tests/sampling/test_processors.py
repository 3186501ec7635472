"""Masks, biases, custom processors: what they do and in which order."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pagemill.errors import ConfigError
from pagemill.sampling.processors import load_logits_processors
from tests.sampling.rows import one, row, run

UP = [0.0, 1.0, 2.0, 3.0]  # greedy takes 3


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """Yield an importable module to put engine-level processors in."""
    made = types.ModuleType("processors_of_a_test")
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


def test_only_allowed_tokens_can_come() -> None:
    assert one(UP, row(allowed_token_ids=(0, 2))).tokens == (2,)
    many = one(UP, row(allowed_token_ids=(0, 2), temperature=5.0, samples=200))
    assert set(many.tokens) == {0, 2}


@pytest.mark.parametrize(
    ("output", "banned"),
    [((), False), ((1,), False), ((1, 2), True), ((0, 1, 2), True), ((2, 1), False)],
)
def test_last_token_of_a_bad_word_is_banned_when_the_earlier_ones_stand(
    output: tuple[int, ...], banned: bool
) -> None:
    result = one(UP, row((5,), output, bad_words=((1, 2, 3),)))
    assert result.tokens == ((2,) if banned else (3,))


def test_bad_word_of_one_token_is_always_banned() -> None:
    assert one(UP, row(bad_words=((3,), (2,)))).tokens == (1,)


def test_both_forms_of_a_bad_word_are_banned_whatever_their_lengths() -> None:
    words = ((3,), (1, 2))  # one token with a leading space, two without
    assert one(UP, row(output=(1,), bad_words=words)).tokens == (1,)
    assert one(UP, row(output=(0,), bad_words=words)).tokens == (2,)


def test_bad_word_begun_in_the_prompt_is_no_bad_word() -> None:
    assert one(UP, row((1,), (), bad_words=((1, 3),))).tokens == (3,)


def test_min_tokens_masks_every_stop_id_until_reached() -> None:
    fields = {"min_tokens": 2, "stop_token_ids": (3, 2)}
    assert one(UP, row((9,), (), **fields)).tokens == (1,)
    assert one(UP, row((9,), (0,), **fields)).tokens == (1,)
    assert one(UP, row((9,), (0, 0), **fields)).tokens == (3,)


def test_bias_is_added_after_the_masks() -> None:
    assert one(UP, row(logit_bias=((0, 5.0),))).tokens == (0,)
    assert one(UP, row(logit_bias=((3, 100.0),), allowed_token_ids=(1, 2))).tokens == (2,)


def test_request_processors_see_the_output_and_the_biased_logits() -> None:
    seen: list[Any] = []

    def processor(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((output_ids, logits.tolist()))
        logits[1] = 50.0
        return logits

    result = one(UP, row((7, 8), (0,), logits_processors=(processor,), logit_bias=((0, 4.0),)))
    assert seen == [([0], [4.0, 1.0, 2.0, 3.0])]
    assert result.tokens == (1,)


class _Counting:
    """A processor that is an object, and takes the prompt."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        self.seen.append((prompt, output))
        return logits


def test_processor_with_three_parameters_sees_the_prompt_too(module: types.ModuleType) -> None:
    requests, engines = _Counting(), _Counting()
    module.counting = engines  # type: ignore[attr-defined]
    processors = ["processors_of_a_test:counting"]
    one(UP, row((7, 8), (0,), logits_processors=(requests,)), processors=processors)
    assert requests.seen == engines.seen == [([7, 8], [0])]


def test_parameter_with_a_default_is_no_place_for_the_prompt() -> None:
    seen: list[Any] = []

    def processor(output: list[int], logits: torch.Tensor, banned: int = 3) -> torch.Tensor:
        seen.append(output)
        logits[banned] = -torch.inf
        return logits

    assert one(UP, row((7, 8), (0,), logits_processors=(processor,))).tokens == (2,)
    assert seen == [[0]]


def test_processors_run_in_turn_then_the_engines_then_the_penalties(
    module: types.ModuleType,
) -> None:
    calls = []

    def first(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        calls.append("first")
        return logits * 2

    def second(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        calls.append("second")
        return logits + 1

    class Engine:
        def __call__(self, token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            calls.append("engine")
            assert logits.tolist() == [1.0, 3.0, 5.0, 7.0]  # penalties come later
            return logits

    module.Engine = Engine  # type: ignore[attr-defined]
    result = one(
        UP,
        row((3,), logits_processors=(first, second), repetition_penalty=4.0, logprobs=4),
        processors=["processors_of_a_test:Engine"],
        mode="processed_logits",
    )
    assert calls == ["first", "second", "engine"]
    assert dict(zip(result.scores[0].top_ids, result.scores[0].top_logprobs, strict=True)) == {
        2: 5.0,
        1: 3.0,
        3: 1.75,
        0: 1.0,
    }


def test_engine_processor_sees_every_row(module: types.ModuleType) -> None:
    def ban_three(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[3] = -torch.inf
        return logits

    module.ban_three = ban_three  # type: ignore[attr-defined]
    results = run([UP, UP], row(), row(logprobs=1), processors=["processors_of_a_test:ban_three"])
    assert [r.tokens for r in results] == [(2,), (2,)]
    assert results[1].scores[0].rank == 2  # raw: before the processor


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (lambda ids, logits: 1 / 0, "ZeroDivisionError"),
        (lambda ids, logits: None, "NoneType"),
        (lambda ids, logits: logits[:2], "shape (2,)"),
        (lambda ids, logits: logits[None], "shape (1, 4)"),
        (lambda ids, logits: logits.numpy(), "ndarray"),
        (lambda ids, logits: logits.tolist(), "list"),
        (lambda ids, logits: logits.to(torch.complex64), "dtype torch.complex64"),
        (lambda ids, logits: logits > 1, "dtype torch.bool"),
        (lambda ids, logits: logits.double(), "dtype torch.float64; it must be torch.float32"),
        (lambda ids, logits: logits.bfloat16(), "dtype torch.bfloat16"),
        (lambda ids, logits: logits.long(), "dtype torch.int64"),
        (lambda ids, logits: logits.to("meta"), "device meta; it must be cpu"),
        (lambda ids, logits: logits.to_sparse(), "layout torch.sparse_coo"),
        (lambda ids, logits: logits * float("nan"), "nan"),
    ],
)
def test_failing_processor_ends_its_own_row_only(bad: Any, words: str) -> None:
    results = run([UP, UP, UP], row(), row(logits_processors=(bad,)), row())
    assert words in (results[1].error or "")
    assert results[1].tokens == ()
    assert [r.tokens for r in (results[0], results[2])] == [(3,), (3,)]


@pytest.mark.parametrize(
    "name", ["nocolon", ":x", "math:", "no_such_module_here:x", "math:nothing", "math:pi"]
)
def test_engine_processor_that_cannot_be_loaded_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"logits_processors.*{name}"):
        load_logits_processors([name])
