"""Where the log goes."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from pagemill.log import get_logger, setup_logging


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the "pagemill" logger as a program begins with it."""
    logger = logging.getLogger("pagemill")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logger, "level", logging.NOTSET)


def test_the_log_follows_a_standard_error_that_is_replaced(
    unset: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    setup_logging()
    get_logger("pagemill.here").warning("one")
    monkeypatch.setattr(sys, "stderr", second)
    first.close()
    get_logger("pagemill.here").warning("two")
    assert second.getvalue().endswith("two\n")
    assert "Logging error" not in second.getvalue()


def test_a_stream_that_is_given_is_kept(unset: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given, other = io.StringIO(), io.StringIO()
    setup_logging(given)
    monkeypatch.setattr(sys, "stderr", other)
    get_logger("pagemill.here").warning("one")
    assert "one" in given.getvalue()
    assert not other.getvalue()
