"""The backends under test: plain torch, and the native kernels of every instruction set by name."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill import native
from pagemill.attention import BACKENDS
from pagemill.attention.base import AttentionBackend
from tests.ops.conftest import ALL_ISAS


def _param(isa: str) -> Any:
    extension = native.extension()
    known = [] if extension is None else extension.available_isas().split(", ")
    lacking = pytest.mark.skipif(isa not in known, reason=f"no native {isa} kernels here")
    return pytest.param(f"cpu {isa}", marks=lacking)


NATIVE = [_param(isa) for isa in ALL_ISAS]
KERNELS = ["torch", *NATIVE]


def make_backend(kernels: str) -> AttentionBackend:
    """Return the backend "torch", or "cpu <isa>" with that instruction set forced."""
    name, _, isa = kernels.partition(" ")
    if isa:
        native.use_isa(isa)
    return BACKENDS.load(name)()
