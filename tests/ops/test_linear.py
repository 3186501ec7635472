"""The native linear layer: against float64, and each row the same whatever travels with it.

Every path of the machine is forced in turn. The AMX path also runs where there is no AMX: over emulated
tiles, and as it is compiled for such a machine with its tile instructions trapped.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagemill import native
from pagemill.errors import ConfigError
from tests.ops.amx.build import SOFTWARE, AmxLibraries
from tests.ops.conftest import ALL_ISAS, needs_extension, use_path

if native.extension() is not None:
    from pagemill.ops import cpu as ops

pytestmark = needs_extension
DTYPES = [torch.float32, torch.bfloat16]
FEW = settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SIZES = st.integers(1, 200)


@pytest.fixture(params=[*ALL_ISAS, *SOFTWARE])
def isa(request: pytest.FixtureRequest, amx_libraries: AmxLibraries) -> Iterator[str]:
    """Force one path, in software too."""
    yield from use_path(request.param, amx_libraries, ops)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def packed(weight: Tensor) -> Tensor:
    made = torch.full(
        ops.packed_shape(weight.shape[0], weight.shape[1], weight.dtype), -7.0, dtype=weight.dtype
    )
    ops.pack_linear(weight, made)
    return made


def gated(gate: Tensor, up: Tensor) -> Tensor:
    shape = ops.packed_shape(gate.shape[0], gate.shape[1], gate.dtype)
    made = torch.full((2 * shape[0], *shape[1:]), -7.0, dtype=gate.dtype)
    ops.pack_linear(gate, made, tile_first=0, tile_step=2)
    ops.pack_linear(up, made, tile_first=1, tile_step=2)
    return made


def check(got: Tensor, exact: Tensor, sizes: Tensor, k: int) -> None:
    """Hold `got` against float64: sums of k float32 products whose sizes add up to `sizes`."""
    bound = 2.0 * (k + 4) * 2.0**-24 * sizes + 1e-36
    if got.dtype == torch.bfloat16:
        bound = bound + 2.0**-8 * exact.abs()
    wrong = (got.double() - exact).abs() > bound
    assert not bool(wrong.any()), (got[wrong][:4], exact[wrong][:4])


@pytest.mark.parametrize("dtype", DTYPES)
@FEW
@given(m=st.integers(0, 40), n=SIZES, k=SIZES, seed=st.integers(0, 1 << 20), bias=st.booleans())
def test_it_agrees_with_float64(
    isa: str, dtype: torch.dtype, m: int, n: int, k: int, seed: int, bias: bool
) -> None:
    x, w = draw(m, k, seed=seed, dtype=dtype), draw(n, k, seed=seed + 1, dtype=dtype)
    b = draw(n, seed=seed + 2, dtype=dtype) if bias else None
    add = torch.zeros(n).double() if b is None else b.double()
    exact, sizes = (
        F.linear(x.double(), w.double()) + add,
        F.linear(x.double().abs(), w.double().abs()),
    )
    for out_dtype in DTYPES:
        got = ops.linear(x, packed(w), n, b, out_dtype=out_dtype)
        assert got.dtype == out_dtype and got.shape == (m, n)
        check(got, exact, sizes + add.abs(), k)


@pytest.mark.parametrize("dtype", DTYPES)
@FEW
@given(m=st.integers(1, 20), n=SIZES, k=SIZES, seed=st.integers(0, 1 << 20))
def test_a_residual_is_added_before_rounding_and_in_place(
    isa: str, dtype: torch.dtype, m: int, n: int, k: int, seed: int
) -> None:
    x, w = draw(m, k, seed=seed, dtype=dtype), draw(n, k, seed=seed + 1, dtype=dtype)
    stream = draw(m, n, seed=seed + 2, dtype=dtype)
    exact = F.linear(x.double(), w.double()) + stream.double()
    sizes = F.linear(x.double().abs(), w.double().abs()) + stream.double().abs()
    got = ops.linear(x, packed(w), n, residual=stream)
    assert got is stream
    check(got, exact, sizes, k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
@FEW
@given(m=st.integers(1, 20), n=SIZES, k=st.integers(1, 80), seed=st.integers(0, 1 << 20))
def test_a_gate_is_applied_before_rounding(
    isa: str, dtype: torch.dtype, name: str, m: int, n: int, k: int, seed: int
) -> None:
    act = F.silu if name == "silu" else lambda t: F.gelu(t, approximate="tanh")
    x, b = draw(m, k, seed=seed, dtype=dtype), draw(2 * n, seed=seed + 3, dtype=dtype)
    gate, up = (draw(n, k, seed=seed + i, dtype=dtype) for i in (1, 2))
    g = F.linear(x.double(), gate.double(), b[:n].double())
    u = F.linear(x.double(), up.double(), b[n:].double())
    got = ops.linear(x, gated(gate, up), n, b, gate=name)
    sizes = [
        F.linear(x.double().abs(), w.double().abs(), part.double().abs())
        for w, part in ((gate, b[:n]), (up, b[n:]))
    ]
    # Sums are off by a little of their terms' sizes; the slopes of both functions are below 1.2.
    off = 2.0 * (k + 4) * 2.0**-24 * (1.2 * sizes[0] * u.abs() + sizes[1] * act(g).abs())
    bound = off + (2.0**-8 if dtype == torch.bfloat16 else 1e-5) * (act(g) * u).abs() + 1e-6
    wrong = (got.double() - act(g) * u).abs() > bound
    assert not bool(wrong.any()), (got[wrong][:4], (act(g) * u)[wrong][:4])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", [None, "silu"])
def test_a_row_is_the_same_among_1_to_300_rows_at_any_position(
    isa: str, dtype: torch.dtype, gate: str | None
) -> None:
    # Several blocks along k, several column groups, odd edges; fewer of all in software.
    n, k = (20, 530) if isa in SOFTWARE else (84, 650)
    x, bias = draw(300, k, dtype=dtype), draw(n * (2 if gate else 1), seed=9, dtype=dtype)
    w, up = draw(n, k, seed=1, dtype=dtype), draw(n, k, seed=2, dtype=dtype)
    weights = gated(w, up) if gate else packed(w)
    ops._C.set_num_threads(1)
    alone = torch.cat([ops.linear(x[i : i + 1], weights, n, bias, gate=gate) for i in range(300)])
    few = [*range(1, 66), *range(66, 301, 17)]
    for threads, counts in ((1, few if isa == "amx_trapped" else range(1, 301)), (2, few[::4])):
        ops._C.set_num_threads(threads)
        for m in counts:
            start = (m * 7919) % (301 - m)
            got = ops.linear(x[start : start + m], weights, n, bias, gate=gate)
            assert torch.equal(got, alone[start : start + m]), (threads, m)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", [None, "silu", "gelu_pytorch_tanh"])
def test_an_output_is_the_same_among_any_number_of_outputs(
    isa: str, dtype: torch.dtype, gate: str | None
) -> None:
    """The last ones of a matrix do not fill a vector."""
    m, n, k = 5, 37, 65
    x, w, up = (draw(rows, k, seed=i, dtype=dtype) for i, rows in enumerate((m, n, n)))
    bias = draw(2 * n, seed=9, dtype=dtype)
    ops._C.set_num_threads(1)

    def run(count: int) -> Tensor:
        if gate is None:
            return ops.linear(x, packed(w[:count]), count, bias[:count].clone())
        both = torch.cat([bias[:count], bias[n : n + count]])
        return ops.linear(x, gated(w[:count], up[:count]), count, both, gate=gate)

    whole = run(n)
    for count in (1, 15, 16, 17, 31, 33):
        assert torch.equal(run(count), whole[:, :count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_in_chunks_of_a_long_prompt(isa: str, dtype: torch.dtype) -> None:
    n, k = 48, 577
    x, weights = draw(2048, k, dtype=dtype), packed(draw(n, k, seed=1, dtype=dtype))
    ops._C.set_num_threads(2)
    whole = ops.linear(x, weights, n)
    for start, stop in ((0, 1), (0, 767), (1000, 1769), (2047, 2048)):
        assert torch.equal(ops.linear(x[start:stop], weights, n), whole[start:stop])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_where_k_is_too_long_for_the_caches(isa: str, dtype: torch.dtype) -> None:
    n, k = 40, 5000
    x, weights = draw(257, k, dtype=dtype), packed(draw(n, k, seed=1, dtype=dtype))
    ops._C.set_num_threads(2)
    whole = ops.linear(x, weights, n)
    ops._C.set_num_threads(1)
    for start, stop in ((0, 1), (100, 117), (1, 256), (256, 257)):
        assert torch.equal(ops.linear(x[start:stop], weights, n), whole[start:stop])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_apart_and_off_cache_lines(isa: str, dtype: torch.dtype) -> None:
    room = draw(9, 131, dtype=dtype)
    x, w = room[:, 1:98], draw(33, 97, seed=1, dtype=dtype)
    stream = torch.zeros(9, 40, dtype=dtype)
    got = ops.linear(x, packed(w), 33, residual=stream[:, 3:36])
    assert torch.equal(got, ops.linear(x.contiguous(), packed(w), 33))
    assert not bool(stream[:, :3].any()) and not bool(stream[:, 36:].any())
    turned = draw(97, 9, seed=2, dtype=dtype).t()
    assert torch.equal(
        ops.linear(turned, packed(w), 33), ops.linear(turned.contiguous(), packed(w), 33)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_values_stay_what_they_are(isa: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[float("nan"), 1.0], [float("inf"), 1.0], [3e38, 3e38], [0.0, 2.0]]).to(dtype)
    got = ops.linear(x, packed(torch.ones(3, 2, dtype=dtype)), 3)
    assert bool(got[0].isnan().all())
    assert got[1].tolist() == got[2].tolist() == [float("inf")] * 3
    assert got[3].tolist() == [2.0] * 3
    big = torch.tensor([[-1e4], [-100.0], [1e4], [float("nan")]]).to(dtype)
    one = torch.ones(1, 1, dtype=dtype)
    silu = ops.linear(big, gated(one, one), 1, gate="silu").flatten()
    assert float(silu[0].abs()) < 1e-20 and float(silu[1].abs()) < 1e-30
    assert float(silu[2]) == float(big[2, 0] * big[2, 0]) and bool(silu[3].isnan())


@pytest.mark.parametrize("dtype", DTYPES)
@FEW
@given(n=SIZES, k=SIZES, seed=st.integers(0, 1 << 20))
def test_packed_rows_come_back_bit_for_bit(
    isa: str, dtype: torch.dtype, n: int, k: int, seed: int
) -> None:
    weight = draw(n, k, seed=seed, dtype=dtype)
    ids = torch.randint(0, n, (23,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(ops.linear_rows(ids, packed(weight), n, k), weight[ids])


def test_trapped_code_runs_tile_instructions(amx_libraries: AmxLibraries) -> None:
    library = amx_libraries.of("trapped")
    x, w = draw(33, 64, dtype=torch.bfloat16), packed(draw(32, 64, seed=1, dtype=torch.bfloat16))
    out = torch.empty(33, 32)
    library.install_traps()
    before = library.count_traps()
    library.linear(x.data_ptr(), 64, 33, w.data_ptr(), 32, 64, 1, 0, 0, 0, out.data_ptr(), 32, 0, 0)
    count = library.count_traps() - before
    library.remove_traps()
    # Three tiles of rows, in groups of one and two, and two of outputs make six tiles of sums: zero,
    # store. For each of two tiles of k: six products, and loads of 1 + 2 and of 2 + 2 tiles. And
    # configure, release.
    assert count == 6 + 6 + 2 * (6 + 7) + 2


@pytest.mark.parametrize(("peak", "depth"), [("peak_flops", 32), ("peak_int8_ops", 64)])
@pytest.mark.parametrize("kind", SOFTWARE.values())
def test_the_peak_of_tiles_counts_what_is_done(
    kind: str, peak: str, depth: int, amx_libraries: AmxLibraries
) -> None:
    library = amx_libraries.of(kind)
    library.set_num_threads(1)
    measure = getattr(library, peak)
    if not library.trapped:
        assert measure(3) == 3 * 4 * 2 * 16 * 16 * depth
        return
    library.install_traps()
    before = library.count_traps()
    done, count = measure(3), library.count_traps() - before
    library.remove_traps()
    assert done == 3 * 4 * 2 * 16 * 16 * depth
    assert count == 1 + 8 + 3 * 4 + 1  # configure, zero, multiply, release


@pytest.mark.parametrize("kind", SOFTWARE.values())
def test_the_path_of_tiles_reads_memory_and_pieces_of_it(
    kind: str, amx_libraries: AmxLibraries
) -> None:
    library = amx_libraries.of(kind)
    memory = torch.arange(8 * 40)
    order = torch.tensor([3, 0, 39, 7])
    assert library.read_memory(memory.data_ptr(), 8 * 320) == int(memory.sum())
    found = library.read_pieces(memory.data_ptr(), 64, order.data_ptr(), 4)
    assert found == int(memory.view(40, 8)[order].sum())


def test_a_row_outside_the_matrix_is_refused() -> None:
    weight = packed(draw(5, 8))
    for wrong in (-1, 5):
        with pytest.raises(ValueError, match="linear_rows: ids must be rows"):
            ops.linear_rows(torch.tensor([0, wrong]), weight, 5, 8)


def test_a_path_that_the_machine_lacks_is_named_with_those_it_has() -> None:
    with pytest.raises(ConfigError, match=r"PAGEMILL_CPU_ISA.*'mmx'.*available: .*portable"):
        native.use_isa("mmx")


def test_numbers_that_make_no_sense_are_refused() -> None:
    module = native.required()
    with pytest.raises(ValueError, match="linear: sizes"):
        module.linear(64, 1, 1, 64, 0, 1, 0, 0, 0, 0, 64, 1, 0, 0)
    with pytest.raises(ValueError, match="linear: packed must lie on 64 bytes"):
        module.linear(64, 1, 1, 8, 1, 1, 0, 0, 0, 0, 64, 1, 0, 0)
