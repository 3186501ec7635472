"""Texts of flags: sizes. What fields become is tested with the command line's arguments."""

from __future__ import annotations

import pytest

from pagemill.flags import parse_size


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("2k", 2000), ("2KiB", 2048), ("3MB", 3_000_000), ("1T", 10**12), ("0.5GiB", 2**29)],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "-1", "1.5", "2X", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no"):
        parse_size(text)
