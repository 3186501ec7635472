"""What the tests of native operations share: the extension, and each path of this machine in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagemill import native

needs_extension = pytest.mark.skipif(
    native.extension() is None, reason="pagemill._C is not built: run `make build`"
)
ALL_ISAS = ("amx", "avx512_bf16", "avx512", "avx2", "portable")


@pytest.fixture(params=ALL_ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Force one instruction set; a path that the machine lacks is reported as a skip."""
    module = native.extension()
    if module is None:
        pytest.skip("pagemill._C is not built: run `make build`")
    available = module.available_isas().split(", ")
    if request.param not in available:
        pytest.skip(f"this machine or build has no {request.param}; it has {', '.join(available)}")
    before, threads = module.active_isa(), module.num_threads()
    native.use_isa(request.param)
    yield request.param
    native.use_isa(before)
    module.set_num_threads(threads)
