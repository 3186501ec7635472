"""int8 linear layers: against exact sums, and each row the same whatever travels with it.

The AMX path also runs where there is no AMX, in software, as in test_linear.py.
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
from pagemill.ops import reference
from pagemill.ops.reference import PER_ROW, Int8Rounding
from tests.ops.amx.build import SOFTWARE, AmxLibraries
from tests.ops.conftest import needs_extension, use_path

if native.extension() is not None:
    from pagemill.ops import cpu_int8 as ops

pytestmark = needs_extension
# Every set of kernels there is; avx512_bf16 uses those of avx512_vnni.
PATHS = ["amx", "avx512_vnni", "avx512", "avx2_vnni", "avx2", "portable", *SOFTWARE]
every_isa = pytest.mark.parametrize("isa", PATHS, indirect=True)
DTYPES = [torch.float32, torch.bfloat16]
ROUNDINGS = [
    PER_ROW,
    Int8Rounding(scale=0.03),
    Int8Rounding(scale=0.02, zero_point=-17),
    Int8Rounding(row_zero_points=True),
]
FEW = settings(
    deadline=None,
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SIZES = st.integers(1, 200)


@pytest.fixture
def isa(request: pytest.FixtureRequest, amx_libraries: AmxLibraries) -> Iterator[str]:
    """Force one path, in software too."""
    yield from use_path(request.param, amx_libraries, ops)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def draw_codes(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


def room(n: int, k: int, copies: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes, scales and sums, full of what must not be taken for weights."""
    shape = ops.packed_shape(n, k)
    codes = torch.full((copies * shape[0], *shape[1:]), 99, dtype=torch.uint8)
    count = len(codes) * 16
    return codes, torch.full((count,), 7.0), torch.full((count,), 9, dtype=torch.int32)


def packed(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    made = room(*codes.shape)
    ops.pack(codes, scales, *made)
    return made


def gated(gate: Tensor, up: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    made = room(*gate.shape, copies=2)
    ops.pack(gate, scales[: len(gate)].contiguous(), *made, tile_first=0, tile_step=2)
    ops.pack(up, scales[len(gate) :].contiguous(), *made, tile_first=1, tile_step=2)
    return made


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@FEW
@given(
    m=st.integers(0, 40),
    n=SIZES,
    k=SIZES,
    seed=st.integers(0, 1 << 20),
    how=st.sampled_from(ROUNDINGS),
    bias=st.booleans(),
)
def test_it_is_the_reference_bit_for_bit(
    isa: str, dtype: torch.dtype, m: int, n: int, k: int, seed: int, how: Int8Rounding, bias: bool
) -> None:
    x, codes = draw(m, k, seed=seed, dtype=dtype), draw_codes(n, k, seed=seed + 1)
    scales = draw(n, seed=seed + 2).abs()
    b = draw(n, seed=seed + 3, dtype=dtype) if bias else None
    weights, packed_scales, sums = packed(codes, scales)
    want = reference.linear_int8(x, codes, scales, b, how)
    for out_dtype in DTYPES:
        got = ops.linear_int8(
            x, weights, packed_scales, n, b, sums=sums, how=how, out_dtype=out_dtype
        )
        assert got.dtype == out_dtype and got.shape == (m, n)
        assert torch.equal(got, want.to(out_dtype))


@FEW
@given(
    m=st.integers(1, 9),
    n=SIZES,
    k=st.integers(1, 3000),
    seed=st.integers(0, 1 << 20),
    how=st.sampled_from(ROUNDINGS),
)
def test_the_reference_is_the_product_of_what_the_codes_stand_for(
    m: int, n: int, k: int, seed: int, how: Int8Rounding
) -> None:
    x, codes, scales = draw(m, k, seed=seed), draw_codes(n, k, seed=seed), draw(n, seed=seed)
    rounded, row_scales, zeros = reference.int8_codes(x, how)
    meant = (rounded.double() - zeros.double()) * row_scales.double()
    got = reference.linear_int8(x, codes, scales, None, how).double()
    exact = meant @ (codes.double() * scales.double().unsqueeze(1)).t()
    torch.testing.assert_close(got, exact, rtol=3e-7, atol=1e-30)
    if how.scale is None:  # the codes are near what they stand for: half a step
        step = row_scales.double()
        assert bool(
            ((meant - x.double()).abs() <= 0.501 * step + (step if zeros.any() else 0)).all()
        )


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_is_added_before_rounding_and_in_place(isa: str, dtype: torch.dtype) -> None:
    for m, n, k in ((1, 7, 64), (5, 40, 131), (20, 33, 70)):
        x, codes, scales = draw(m, k, dtype=dtype), draw_codes(n, k), draw(n).abs() / 99
        stream = draw(m, n, seed=2, dtype=dtype)
        want = stream.float() + reference.linear_int8(x, codes, scales)
        weights, packed_scales, _ = packed(codes, scales)
        assert ops.linear_int8(x, weights, packed_scales, n, residual=stream) is stream
        assert torch.equal(stream, want.to(dtype))


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
@FEW
@given(m=st.integers(1, 20), n=SIZES, k=st.integers(1, 80), seed=st.integers(0, 1 << 20))
def test_a_gate_is_applied_before_rounding(
    isa: str, dtype: torch.dtype, name: str, m: int, n: int, k: int, seed: int
) -> None:
    act = F.silu if name == "silu" else lambda t: F.gelu(t, approximate="tanh")
    x, b = draw(m, k, seed=seed, dtype=dtype), draw(2 * n, seed=seed + 3, dtype=dtype)
    gate, up = (draw_codes(n, k, seed=seed + i) for i in (1, 2))
    scales = draw(2 * n, seed=seed).abs() / 100
    weights, packed_scales, _ = gated(gate, up, scales)
    g, u = reference.linear_int8(x, torch.cat((gate, up)), scales, b).double().chunk(2, -1)
    got = ops.linear_int8(x, weights, packed_scales, n, b, gate=name)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), act(g) * u, rtol=tolerance, atol=4e-5)


@every_isa
@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("k", [130, 8300])  # in one block along k, and in two
def test_a_row_is_the_same_among_1_to_300_rows_at_any_position(
    isa: str, gate: str | None, k: int
) -> None:
    n, most = (84, 300) if k < 1000 else (20, 40)
    if isa in SOFTWARE:
        n = 20  # two tiles, and one emulated product takes microseconds
    module = ops._C
    few = [*range(1, 18), 31, 32, 33, 47, 64, 65, most]  # around whole tiles and groups of them
    x, bias = draw(most, k), draw(n * (2 if gate else 1), seed=9)
    codes, scales = draw_codes(2 * n, k), draw(2 * n, seed=1).abs()
    if gate:
        weights, packed_scales, _ = gated(codes[:n], codes[n:], scales)
    else:
        weights, packed_scales, _ = packed(codes[:n], scales[:n])

    def run(rows: Tensor) -> Tensor:
        return ops.linear_int8(rows, weights, packed_scales, n, bias, gate=gate)

    module.set_num_threads(1)
    alone = torch.cat([run(x[i : i + 1]) for i in range(most)])
    for threads in (1, 2):
        module.set_num_threads(threads)
        counts = few if isa in SOFTWARE else range(1, most + 1, 2 * threads - 1)
        for m in counts:
            if m > most:
                continue
            start = (m * 7919) % (most + 1 - m)
            assert torch.equal(run(x[start : start + m]), alone[start : start + m]), (threads, m)


@every_isa
def test_a_row_is_the_same_in_chunks_of_a_long_prompt(isa: str) -> None:
    ops._C.set_num_threads(2)
    x, (weights, scales, _) = draw(2048, 577), packed(draw_codes(48, 577), draw(48).abs())
    whole = ops.linear_int8(x, weights, scales, 48)
    for start, stop in ((0, 1), (0, 767), (1000, 1769), (2047, 2048)):
        assert torch.equal(ops.linear_int8(x[start:stop], weights, scales, 48), whole[start:stop])


@every_isa
def test_the_most_inputs_there_may_be_do_not_overflow(isa: str) -> None:
    k = ops.MAX_IN_FEATURES
    codes = torch.full((3, k), -128, dtype=torch.int8)
    codes[1] = 127
    weights, scales, sums = packed(codes, torch.ones(3))
    for sign in (1.0, -1.0):
        x = torch.full((2, k), sign)
        for how in (PER_ROW, Int8Rounding(scale=0.001, zero_point=127 if sign < 0 else -128)):
            got = ops.linear_int8(x, weights, scales, 3, sums=sums, how=how)
            assert torch.equal(got, reference.linear_int8(x, codes, torch.ones(3), None, how))


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_apart_and_off_cache_lines(isa: str, dtype: torch.dtype) -> None:
    space = draw(9, 131, dtype=dtype)
    x, (weights, scales, _) = space[:, 1:98], packed(draw_codes(33, 97), draw(33).abs())
    stream = torch.zeros(9, 40, dtype=dtype)
    got = ops.linear_int8(x, weights, scales, 33, residual=stream[:, 3:36])
    assert torch.equal(got, ops.linear_int8(x.contiguous(), weights, scales, 33))
    assert not bool(stream[:, :3].any()) and not bool(stream[:, 36:].any())
    turned = draw(97, 9, seed=2, dtype=dtype).t()
    assert torch.equal(
        ops.linear_int8(turned, weights, scales, 33),
        ops.linear_int8(turned.contiguous(), weights, scales, 33),
    )


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ROUNDINGS, ids=str)
def test_extreme_rows_stay_among_themselves(
    isa: str, dtype: torch.dtype, how: Int8Rounding
) -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor(
        [[nan, 1.0], [inf, 1.0], [3e34, -3e34], [0.0, 0.0], [1e-44, 0.0], [-0.5, 2.0], [-inf, nan]]
    ).to(dtype)
    codes = torch.tensor([[1, 1], [100, 3], [-128, 127]], dtype=torch.int8)
    weights, scales, sums = packed(codes, torch.ones(3))
    got = ops.linear_int8(x, weights, scales, 3, sums=sums, how=how, out_dtype=torch.float32)
    want = reference.linear_int8(x, codes, torch.ones(3), None, how)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert bool(got[0].isnan().all()) and bool(got[6].isnan().all())
    assert bool(got[3].eq(0).all()) and bool(got[2:6].isfinite().all())
    # Infinity is cut where the scale is fixed, and spoils its own row elsewhere.
    assert bool(got[1].isfinite().all() if how.scale else got[1].isnan().all())


@every_isa
@FEW
@given(n=SIZES, k=SIZES, seed=st.integers(0, 1 << 20))
def test_packed_rows_come_back_as_codes_times_scales(isa: str, n: int, k: int, seed: int) -> None:
    codes, scales = draw_codes(n, k, seed=seed), draw(n, seed=seed)
    ids = torch.randint(0, n, (23,), generator=torch.Generator().manual_seed(seed))
    weights, packed_scales, _ = packed(codes, scales)
    want = codes[ids].float() * scales[ids].unsqueeze(1)
    for dtype in DTYPES:
        got = ops.linear_int8_rows(ids, weights, packed_scales, (n, k), dtype)
        assert torch.equal(got, want.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@FEW
@given(n=SIZES, k=SIZES, seed=st.integers(0, 1 << 20))
def test_weights_are_rounded_to_the_reference_codes(
    dtype: torch.dtype, n: int, k: int, seed: int
) -> None:
    weight = draw(n, k, seed=seed, dtype=dtype)
    weight[0] = 0
    codes, scales, _ = reference.int8_codes(weight)
    want, got = packed(codes, scales.squeeze(1).contiguous()), room(n, k)
    ops.quantize(weight, got[0], got[1])
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_weights_that_are_not_finite_are_refused() -> None:
    for bad in (float("nan"), float("inf")):
        weight = draw(5, 9)
        weight[3, 4] = bad
        with pytest.raises(ValueError, match="quantize_int8: weight must be finite"):
            ops.quantize(weight, *room(5, 9)[:2])


def test_a_row_outside_the_matrix_is_refused() -> None:
    weights, scales, _ = packed(draw_codes(5, 8), draw(5))
    for wrong in (-1, 5):
        with pytest.raises(ValueError, match="linear_int8_rows: ids must be rows"):
            ops.linear_int8_rows(torch.tensor([0, wrong]), weights, scales, (5, 8), torch.float32)


def test_numbers_that_make_no_sense_are_refused() -> None:
    call = native.required().linear_int8
    good = [64, 1, 1, 0, 0, 0.0, 0, 64, 64, 0, 1, 1, 0, 0, 0, 64, 1, 0, 0]
    for place, value, said in (
        (11, 0, "sizes"), (11, 65537, "k must be at most 65536"), (7, 8, "packed must lie on 64"),
        (8, 0, "scales"), (4, 3, "rounding"), (6, 128, "zero"), (18, 3, "epilogue"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"linear_int8: {said}"):
            call(*good[:place], value, *good[place + 1 :])
    with pytest.raises(ValueError, match="linear_int8: scale must be positive"):
        call(*good[:4], 2, -1.0, *good[6:])
    with pytest.raises(ValueError, match="linear_int8: sums must be there"):
        call(*good[:4], 1, *good[5:])
    for made in ({"scale": 0.0}, {"scale": float("nan")}, {"zero_point": 128}):
        with pytest.raises(ValueError, match="of activations is"):
            Int8Rounding(**made)


@pytest.mark.parametrize("isa", ["avx512_bf16"], indirect=True)
def test_a_path_without_kernels_of_its_own_takes_those_before_it(isa: str) -> None:
    x, codes, scales = draw(5, 99), draw_codes(20, 99), draw(20).abs()
    weights, packed_scales, _ = packed(codes, scales)
    got = ops.linear_int8(x, weights, packed_scales, 20)
    assert torch.equal(got, reference.linear_int8(x, codes, scales))
