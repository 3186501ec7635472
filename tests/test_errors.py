"""The exception tree: parents that other programs catch, and the way across processes."""

from __future__ import annotations

import pickle

import pytest

from pagemill import errors

LEAVES = [
    errors.UnknownNameError,
    errors.NotSupportedError,
    errors.CacheTooSmallError,
    errors.CheckpointError,
    errors.OutOfMemoryError,
    errors.RequestError,
    errors.PromptTooLongError,
    errors.EngineDeadError,
]


@pytest.mark.parametrize("kind", LEAVES)
def test_every_error_is_one_of_ours_and_has_a_familiar_parent(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.PagemillError)
    assert issubclass(kind, (ValueError, MemoryError, RuntimeError))


@pytest.mark.parametrize("kind", LEAVES)
def test_every_error_crosses_a_process_with_its_words(kind: type[Exception]) -> None:
    back = pickle.loads(pickle.dumps(kind("what happened")))
    assert type(back) is kind
    assert str(back) == "what happened"


def test_the_named_field_crosses_too() -> None:
    back = pickle.loads(pickle.dumps(errors.PromptTooLongError("too long", param="prompt")))
    assert (back.param, str(back)) == ("prompt", "too long")


def test_the_docstring_draws_every_error() -> None:
    for kind in [errors.PagemillError, errors.ConfigError, *LEAVES]:
        assert kind.__name__ in (errors.__doc__ or "")
