"""A panic of the library becomes an error; everything else passes as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagemill.errors import CheckpointError
from pagemill.tokenizer.library_panics import panics_as_errors


class PanicException(BaseException):
    """What pyo3 raises, by its name."""


def test_a_panic_names_the_file_and_the_cause() -> None:
    with (
        pytest.raises(CheckpointError, match=r"a/tokenizer\.json .* index out of bounds"),
        panics_as_errors(Path("a/tokenizer.json")),
    ):
        raise PanicException("index out of bounds")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError, CheckpointError])
def test_other_exceptions_pass(kind: type[BaseException]) -> None:
    with pytest.raises(kind, match="^as it is$"), panics_as_errors(Path("a")):
        raise kind("as it is")
