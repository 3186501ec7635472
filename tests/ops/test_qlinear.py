"""Products with packed weights: against float64, and each row the same whatever travels with it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagemill import native
from pagemill.ops.packed import (
    PackedMatrix,
    Product,
    ReferenceProduct,
    fill,
    pack,
    unfilled,
)
from tests.ops.conftest import needs_extension

if native.extension() is not None:
    from pagemill.ops.cpu_quant import NativeProduct

DTYPES = [torch.float32, torch.bfloat16]
CODECS = ["int4", "int8", "fp8"]
GROUPS = [16, 32, 64, 96, 128, 320, 4096]
FEW = settings(
    deadline=None,
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
# Not linear, not even: every code has a value of its own.
TABLE = (-127, -99, -80, -64, -50, -36, -24, -10, 1, 13, 25, 38, 53, 70, 90, 113)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


def plain(codec: str, n: int, k: int, seed: int) -> Tensor:
    """Return random codes of every kind, those that are no numbers left out."""
    if codec == "int4":
        return torch.randint(0, 16, (n, k), generator=generator(seed)).to(torch.uint8)
    codes = torch.randint(0, 256, (n, k), generator=generator(seed)).to(torch.uint8)
    if codec == "int8":
        return codes.view(torch.int8)
    return codes.masked_fill_((codes & 127) == 127, 3).view(torch.float8_e4m3fn)


def numbers(codec: str, codes: Tensor, table: tuple[int, ...] = TABLE) -> Tensor:
    if codec == "int4":
        return torch.tensor(table, dtype=torch.float64)[codes.int()]
    return codes.double()


def random_matrix(
    codec: str, group: int, offset: str, n: int, k: int, seed: int
) -> tuple[PackedMatrix, Tensor]:
    """Return a packed matrix and its weights, computed here in float64."""
    groups = -(-k // group)
    codes = plain(codec, n, k, seed)
    # Scales that float16 holds are kept as they are, and so the weights are exact.
    scales = (torch.rand(n, groups, generator=generator(seed + 1)) * 0.1 + 0.01).half()
    values = numbers(codec, codes)
    wide = scales.double().repeat_interleave(group, 1)[:, :k]
    if offset == "none":
        return pack(codes, scales, codec=codec, group=group, table=TABLE), values * wide
    zeros = torch.randint(-8, 16, (n, groups), generator=generator(seed + 2)).float()
    spread = zeros.double().repeat_interleave(group, 1)[:, :k]
    if offset == "zero":
        made = pack(codes, scales, codec=codec, group=group, zeros=zeros, table=TABLE)
        return made, (values - spread) * wide
    made = pack(codes, scales, codec=codec, group=group, mins=zeros / 8, table=TABLE)
    return made, values * wide + spread / 8


def slack(codec: str, x: Tensor, k: int, weights: Tensor) -> Tensor:
    """Return what float32 sums of these products may be off by.

    A zero is taken off the sum of a group's products, so the codes count before it.
    """
    most = 448 if codec == "fp8" else 152
    sizes = F.linear(x.double().abs(), weights.abs()) + most * 0.11 * x.double().abs().sum(
        1, keepdim=True
    )
    return 2.0 * (k + 8) * 2.0**-24 * sizes + 1e-30


def check(got: Tensor, exact: Tensor, bound: Tensor) -> None:
    if got.dtype == torch.bfloat16:
        bound = bound + 2.0**-8 * exact.abs()
    wrong = (got.double() - exact).abs() > bound
    assert not bool(wrong.any()), (got[wrong][:4], exact[wrong][:4], bound[wrong][:4])


formats = st.tuples(
    st.sampled_from(CODECS), st.sampled_from(GROUPS), st.sampled_from(["none", "min", "zero"])
)


# ------------------------------------------------------------ packing and the reference


@settings(deadline=None, max_examples=60)
@given(form=formats, n=st.integers(1, 70), k=st.integers(1, 200), seed=st.integers(0, 1 << 20))
def test_packed_weights_come_back(form: tuple[str, int, str], n: int, k: int, seed: int) -> None:
    matrix, weights = random_matrix(*form, n, k, seed)
    torch.testing.assert_close(matrix.dequantize().double(), weights, rtol=1e-6, atol=1e-6)
    ids = torch.randint(0, n, (9,), generator=generator(seed))
    got = ReferenceProduct(matrix).rows(ids, torch.float32)
    assert torch.equal(got, matrix.dequantize()[ids])


def test_scales_that_float16_cannot_hold_are_kept_relative_to_their_row() -> None:
    codes = plain("int4", 4, 128, 0)
    scales = torch.tensor([1e-30, 1e-6, 1.0, 1e30])[:, None] * torch.tensor([1.0, 0.5, 0.25, 0.7])
    weights = pack(codes, scales, codec="int4", group=32).dequantize().double()
    exact = numbers("int4", codes, tuple(range(-8, 8))) * scales.double().repeat_interleave(32, 1)
    torch.testing.assert_close(weights, exact, rtol=2.0**-11, atol=0)


def test_one_scale_a_row_is_exact_whatever_its_size() -> None:
    codes = plain("int8", 3, 40, 0)
    scales = torch.tensor([[1.2345678e-30], [0.1], [7.7e25]])
    weights = pack(codes, scales, codec="int8", group=40).dequantize()
    assert torch.equal(weights, codes.float() * scales)


def test_a_row_with_numbers_that_are_none_is_none() -> None:
    codes = plain("fp8", 3, 64, 0).view(torch.uint8)
    codes[1, 5] = 0x7F
    scales = torch.ones(3, 2)
    scales[2, 1] = torch.inf
    weights = pack(codes, scales, codec="fp8", group=32).dequantize()
    assert bool(weights[0].isfinite().all()) and bool(weights[1:].isnan().all())


def test_slices_of_rows_fill_the_same_matrix() -> None:
    whole, _ = random_matrix("int4", 32, "min", 70, 96, 5)
    codes = plain("int4", 70, 96, 5)
    scales = (torch.rand(70, 3, generator=generator(6)) * 0.1 + 0.01).half()
    mins = torch.randint(-8, 16, (70, 3), generator=generator(7)).float() / 8
    sliced = unfilled(whole.format, 70, 96, lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    for start, stop in ((48, 70), (0, 16), (16, 48)):
        part = slice(start, stop)
        fill(sliced, codes[part], scales[part], mins=mins[part], first_row=start)
    for one, two in zip(whole.tensors().values(), sliced.tensors().values(), strict=True):
        assert torch.equal(one, two)


def gated(
    codec: str, offset: str, n: int, k: int, seed: int
) -> tuple[PackedMatrix, Tensor, Tensor]:
    """Return gate and up in one matrix, and both in float64."""
    pieces = [random_matrix(codec, 32, offset, n, k, seed + 10 * i) for i in range(2)]
    both = unfilled(
        pieces[0][0].format, 2 * n, k,
        lambda shape, dtype: torch.zeros(shape, dtype=dtype), parts=2,
    )  # fmt: skip
    for part, (piece, _) in enumerate(pieces):
        for name, tensor in piece.tensors().items():
            both.tensors()[name][part::2] = tensor
    return both, pieces[0][1], pieces[1][1]


# ------------------------------------------------------------ products


def check_product(
    product: Product, weights: Tensor, dtype: torch.dtype, m: int, seed: int, bias: bool
) -> None:
    n, k = weights.shape
    x = draw(m, k, seed=seed + 3, dtype=dtype)
    b = draw(n, seed=seed + 4, dtype=dtype) if bias else None
    exact = F.linear(x.double(), weights) + (0 if b is None else b.double())
    bound = slack(product.matrix.format.codec, x, k, weights) + 2.0**-22 * exact.abs()
    if b is not None:
        bound += 2.0**-22 * b.double().abs()
    for out_dtype in DTYPES:
        got = product.apply(x, b, out_dtype=out_dtype)
        assert got.dtype == out_dtype and got.shape == (m, n)
        check(got, exact, bound)
    stream = draw(m, n, seed=seed + 5, dtype=dtype)
    added = exact + stream.double()
    assert product.apply(x, b, residual=stream) is stream
    check(stream, added, bound + 2.0**-22 * (added.abs() + exact.abs()))


@pytest.mark.parametrize("dtype", DTYPES)
@FEW
@given(
    form=formats, m=st.integers(0, 20), n=st.integers(1, 150), k=st.integers(1, 700),
    seed=st.integers(0, 1 << 20), bias=st.booleans(),
)  # fmt: skip
def test_it_agrees_with_float64(
    isa: str, dtype: torch.dtype, form: tuple[str, int, str], m: int, n: int, k: int, seed: int,
    bias: bool,
) -> None:  # fmt: skip
    matrix, weights = random_matrix(*form, n, k, seed)
    check_product(NativeProduct(matrix), weights, dtype, m, seed, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=12)
@given(
    form=formats, m=st.integers(0, 9), n=st.integers(1, 60), k=st.integers(1, 300),
    seed=st.integers(0, 1 << 20), bias=st.booleans(),
)  # fmt: skip
def test_the_reference_agrees_with_float64(
    dtype: torch.dtype, form: tuple[str, int, str], m: int, n: int, k: int, seed: int, bias: bool
) -> None:
    matrix, weights = random_matrix(*form, n, k, seed)
    check_product(ReferenceProduct(matrix), weights, dtype, m, seed, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
@FEW
@given(
    codec=st.sampled_from(CODECS), offset=st.sampled_from(["none", "min", "zero"]),
    m=st.integers(1, 20), n=st.integers(1, 70), seed=st.integers(0, 1 << 20),
)  # fmt: skip
def test_a_gate_is_applied_before_rounding(
    isa: str, dtype: torch.dtype, name: str, codec: str, offset: str, m: int, n: int, seed: int
) -> None:
    act = F.silu if name == "silu" else lambda t: F.gelu(t, approximate="tanh")
    k = 70
    matrix, gate, up = gated(codec, offset, n, k, seed)
    scale = 0.02 if codec == "fp8" else 0.1
    x, b = draw(m, k, seed=seed, dtype=dtype) * scale, draw(2 * n, seed=seed + 3, dtype=dtype)
    g = F.linear(x.double(), gate, b[:n].double())
    u = F.linear(x.double(), up, b[n:].double())
    exact = act(g) * u
    # The gate's slope is at most 1.13.
    bound = 1.2 * slack(codec, x, k, gate) * u.abs() + g.abs() * slack(codec, x, k, up)
    bound = 2 * bound + 1e-5 * exact.abs() + 1e-6
    check(NativeProduct(matrix).apply(x, b, gate=name), exact, bound)
    check(ReferenceProduct(matrix).apply(x, b, gate=name), exact, bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("codec", "group", "offset"),
    [("int4", 32, "none"), ("int4", 64, "zero"), ("int8", 16, "min"), ("fp8", 320, "zero")],
)
def test_a_row_is_the_same_among_1_to_300_rows_at_any_position(
    isa: str, dtype: torch.dtype, codec: str, group: int, offset: str
) -> None:
    n, k = 44, 650  # several blocks along k, odd edges
    module = native.required()
    matrix, _ = random_matrix(codec, group, offset, n, k, 1)
    product, x, bias = NativeProduct(matrix), draw(300, k, dtype=dtype), draw(n, dtype=dtype)
    module.set_num_threads(1)
    alone = torch.cat([product.apply(x[i : i + 1], bias) for i in range(300)])
    for threads in (1, 2):
        module.set_num_threads(threads)
        for m in [*range(1, 26), *range(26, 300, 31), 300]:
            start = (m * 7919) % (301 - m)
            got = product.apply(x[start : start + m], bias)
            assert torch.equal(got, alone[start : start + m]), (threads, m)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gated_row_is_the_same_among_others(isa: str, dtype: torch.dtype) -> None:
    module = native.required()
    matrix, _, _ = gated("int4", "zero", 44, 330, 1)
    product, x = NativeProduct(matrix), draw(60, 330, dtype=dtype)
    module.set_num_threads(1)
    alone = torch.cat([product.apply(x[i : i + 1], gate="silu") for i in range(60)])
    for threads in (1, 2):
        module.set_num_threads(threads)
        for m in range(1, 61, 3):
            start = (m * 7919) % (61 - m)
            got = product.apply(x[start : start + m], gate="silu")
            assert torch.equal(got, alone[start : start + m]), (threads, m)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_in_chunks_of_a_long_prompt(isa: str, dtype: torch.dtype) -> None:
    module = native.required()
    matrix, _ = random_matrix("int4", 32, "min", 48, 577, 1)
    product, x = NativeProduct(matrix), draw(2048, 577, dtype=dtype)
    module.set_num_threads(2)
    whole = product.apply(x)
    for start, stop in ((0, 1), (0, 767), (1000, 1769), (2047, 2048)):
        assert torch.equal(product.apply(x[start:stop]), whole[start:stop])


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_apart_and_off_cache_lines(isa: str, dtype: torch.dtype) -> None:
    matrix, _ = random_matrix("int4", 32, "none", 33, 97, 1)
    product = NativeProduct(matrix)
    x, stream = draw(9, 131, dtype=dtype)[:, 1:98], torch.zeros(9, 40, dtype=dtype)
    expected = product.apply(x.contiguous())
    assert product.apply(x, out=stream[:, 3:36]).data_ptr() == stream[:, 3:36].data_ptr()
    assert torch.equal(stream[:, 3:36], expected)
    assert not bool(stream[:, :3].any()) and not bool(stream[:, 36:].any())
    turned = draw(97, 9, seed=2, dtype=dtype).t()
    assert torch.equal(product.apply(turned), product.apply(turned.contiguous()))
    before = draw(9, 40, seed=4, dtype=dtype)
    filled = before.clone()
    ReferenceProduct(matrix).apply(x, residual=filled[:, 3:36])
    assert torch.equal(filled[:, :3], before[:, :3]) and not torch.equal(filled, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
def test_extreme_values_stay_what_they_are(isa: str, dtype: torch.dtype, codec: str) -> None:
    one = torch.tensor([[1.0, 1.0]])
    codes = one.to(torch.float8_e4m3fn) if codec == "fp8" else one.to(torch.int8)
    codes = (codes.to(torch.uint8) + 8) if codec == "int4" else codes
    product = NativeProduct(pack(codes, torch.ones(1, 1), codec=codec, group=32))
    x = torch.tensor(
        [[float("nan"), 1.0], [float("inf"), 1.0], [3e38, 3e38], [0.0, 2.0], [1e-20, 0.0]]
    ).to(dtype)
    got = product.apply(x).flatten().float()
    assert bool(got[0].isnan())
    assert got[1] == got[2] == float("inf")
    assert got[3] == 2.0 and got[4] == x[4, 0]


@FEW
@given(form=formats, n=st.integers(1, 70), k=st.integers(1, 200), seed=st.integers(0, 1 << 20))
def test_rows_that_are_looked_up_are_the_references(
    isa: str, form: tuple[str, int, str], n: int, k: int, seed: int
) -> None:
    matrix, _ = random_matrix(*form, n, k, seed)
    ids = torch.randint(0, n, (23,), generator=generator(seed))
    for dtype in DTYPES:
        got = NativeProduct(matrix).rows(ids, dtype)
        assert torch.equal(got, ReferenceProduct(matrix).rows(ids, dtype))


def test_every_path_quantizes_to_the_same_bits(isa: str) -> None:
    weight = draw(40, 200, seed=3) * 0.1
    found = []
    for path in (isa, "portable"):
        native.use_isa(path)
        codes, scales = torch.empty(40, 200, dtype=torch.uint8), torch.empty(40, 7)
        native.required().qlinear_quantize(
            weight.data_ptr(), 40, 200, 200, 0, TABLE, codes.data_ptr(), scales.data_ptr()
        )
        found.append((codes, scales))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@needs_extension
def test_a_row_outside_the_matrix_is_refused() -> None:
    matrix, _ = random_matrix("int4", 32, "none", 5, 8, 1)
    for wrong in (-1, 5):
        with pytest.raises(ValueError, match="qlinear_rows: ids must be rows"):
            NativeProduct(matrix).rows(torch.tensor([0, wrong]), torch.float32)


@needs_extension
def test_numbers_that_make_no_sense_are_refused() -> None:
    module = native.required()
    made = (0, 32, 16, 32, 1, 64, 64, 0, 0, 64)
    with pytest.raises(ValueError, match="QMatrix: table must have 16 numbers"):
        module.QMatrix(*made, [1, 2])
    with pytest.raises(ValueError, match="QMatrix: group must be 16, a multiple of 32, or k"):
        module.QMatrix(0, 20, *made[2:], range(16))
    with pytest.raises(ValueError, match="QMatrix: codes must lie on 64 bytes"):
        module.QMatrix(*made[:5], 8, *made[6:], range(16))
    matrix = module.QMatrix(*made, range(16))
    with pytest.raises(ValueError, match="qlinear: epilogue must be a gated one"):
        module.qlinear(matrix, 64, 32, 1, 0, 0, 0, 0, 64, 16, 0, 1)
