"""Every test of the room runs on numpy's row arithmetic and on the native one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagemill import native
from tests.sampling.rows import Arithmetic


@pytest.fixture(params=["torch", "native"], autouse=True)
def arithmetic(request: pytest.FixtureRequest) -> Iterator[str]:
    """Choose the row arithmetic of `rows.sampler`."""
    if request.param == "native" and native.extension() is None:
        pytest.skip("pagemill._C is not built: run `make build`")
    Arithmetic.name = request.param
    yield request.param
    Arithmetic.name = "torch"
