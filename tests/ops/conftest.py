"""What the tests of native operations share: the extension, and each path of this machine in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagemill import native

needs_extension = pytest.mark.skipif(
    native.extension() is None, reason="pagemill._C is not built: run `make build`"
)
ALL_ISAS = ("amx", "avx512_bf16", "avx512", "avx2", "portable")


def use_isa(name: str) -> Iterator[str]:
    """Force one instruction set, and the former one afterwards; skip, saying so, where it is not."""
    module = native.extension()
    if module is None:
        pytest.skip("pagemill._C is not built: run `make build`")
    available = module.available_isas().split(", ")
    if name not in available:
        pytest.skip(f"this machine or build has no {name}; it has {', '.join(available)}")
    before, threads = module.active_isa(), module.num_threads()
    native.use_isa(name)
    yield name
    native.use_isa(before)
    module.set_num_threads(threads)


@pytest.fixture(params=ALL_ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Force one instruction set; a path that the machine lacks is reported as a skip."""
    yield from use_isa(request.param)
