"""The backends that the registry knows."""

from __future__ import annotations

import pytest

from pagemill.attention import BACKENDS
from pagemill.attention.torch_ref import TorchAttention
from pagemill.errors import UnknownNameError


def test_unknown_backend_lists_the_known_ones() -> None:
    assert BACKENDS.load("torch") is TorchAttention
    with pytest.raises(UnknownNameError, match="known: cpu, torch"):
        BACKENDS.load("flash")
