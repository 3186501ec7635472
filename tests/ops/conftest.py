"""What the tests of native operations share: the extension, and each path of this machine in turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pagemill import native
from tests.ops.amx.build import SOFTWARE, AmxLibraries

needs_extension = pytest.mark.skipif(
    native.extension() is None, reason="pagemill._C is not built: run `make build`"
)
ALL_ISAS = (
    "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2", "portable",
)  # fmt: skip


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


@pytest.fixture(scope="session")
def amx_libraries(tmp_path_factory: pytest.TempPathFactory) -> AmxLibraries:
    """Return what is built of the AMX paths in software."""
    return AmxLibraries(tmp_path_factory.mktemp("amx"))


def use_path(name: str, libraries: AmxLibraries, module: Any) -> Iterator[str]:
    """Force one instruction set, or put AMX in software in place of the extension that `module` calls."""
    kind = SOFTWARE.get(name)
    if kind is None:
        yield from use_isa(name)
        return
    library = libraries.of(kind)
    library.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_C", library)
        if not library.trapped:
            yield name
            return
        library.install_traps()
        yield name
        library.remove_traps()
