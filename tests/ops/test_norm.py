"""The native norms and soft cap: against float64, and each row the same whatever travels with it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagemill import native
from pagemill.ops import reference
from tests.ops.conftest import needs_extension

if native.extension() is not None:
    from pagemill.ops import cpu_layers as ops

pytestmark = needs_extension
DTYPES = [torch.float32, torch.bfloat16]
FEW = settings(
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SIZES = st.integers(1, 300)
ROWS = st.integers(0, 9)
SEEDS = st.integers(0, 1 << 20)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def close(got: Tensor, exact: Tensor, roundings: int = 1) -> None:
    """Hold `got` against float64: `roundings` of its dtype, and float32 sums."""
    step = 2.0**-8 if got.dtype == torch.bfloat16 else 2.0**-21
    bound = roundings * step * exact.abs() + 1e-6
    wrong = (got.double() - exact).abs() > bound
    assert not bool(wrong.any()), (got[wrong][:4], exact[wrong][:4])


def exact_rms(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@FEW
@given(rows=ROWS, size=SIZES, seed=SEEDS)
def test_rms_norm_agrees_with_float64(
    isa: str, dtype: torch.dtype, offset: float, rows: int, size: int, seed: int
) -> None:
    x, weight = draw(rows, size, seed=seed, dtype=dtype), draw(size, seed=seed + 1, dtype=dtype)
    before = x.clone()
    got = ops.rms_norm(x, weight, 1e-5, offset=offset)
    assert got.shape == x.shape and got.dtype == dtype and torch.equal(x, before)
    close(got, exact_rms(x, weight, 1e-5, offset), roundings=2)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_rounds_where_the_reference_does(isa: str, offset: float) -> None:
    # Powers of two: sums and roots are exact in any order, what is left are the roundings.
    x = torch.full((3, 64), 2.0).to(torch.bfloat16)
    weight = draw(64, seed=1, dtype=torch.bfloat16)
    stream = draw(3, 64, seed=2, dtype=torch.bfloat16)
    normed = reference.rms_norm(x, weight, 0.0, offset=offset)
    assert torch.equal(ops.rms_norm(x, weight, 0.0, offset=offset), normed)
    added = ops.rms_norm(x, weight, 0.0, offset=offset, residual=stream.clone())
    assert torch.equal(added, stream + normed)


@pytest.mark.parametrize("dtype", DTYPES)
@FEW
@given(rows=ROWS, size=SIZES, seed=SEEDS)
def test_a_residual_gets_the_rounded_norm_in_place(
    isa: str, dtype: torch.dtype, rows: int, size: int, seed: int
) -> None:
    x, weight = draw(rows, size, seed=seed, dtype=dtype), draw(size, seed=seed + 1, dtype=dtype)
    stream = draw(rows, size, seed=seed + 2, dtype=dtype)
    want = stream + ops.rms_norm(x, weight, 1e-6, offset=1.0)
    got = ops.rms_norm(x, weight, 1e-6, offset=1.0, residual=stream)
    assert got is stream and torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("affine", [True, False])
@FEW
@given(rows=ROWS, size=SIZES, seed=SEEDS)
def test_layer_norm_agrees_with_float64(
    isa: str, dtype: torch.dtype, affine: bool, rows: int, size: int, seed: int
) -> None:
    x = draw(rows, size, seed=seed, dtype=dtype) + 0.5
    weight, bias = (draw(size, seed=seed + i, dtype=dtype) if affine else None for i in (1, 2))
    exact = F.layer_norm(
        x.double(), (size,), *(None if t is None else t.double() for t in (weight, bias)), 1e-2
    )
    close(ops.layer_norm(x, weight, bias, 1e-2), exact, roundings=4)


def test_rows_far_from_zero_keep_their_digits_in_layer_norm(isa: str) -> None:
    x = draw(4, 512) + 1000.0
    exact = F.layer_norm(x.double(), (512,))
    torch.testing.assert_close(
        ops.layer_norm(x, None, None, 1e-5).double(), exact, atol=1e-3, rtol=0
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [577, 1024])
def test_a_row_is_the_same_among_1_to_300_rows_at_any_position(
    isa: str, dtype: torch.dtype, size: int
) -> None:
    module = native.required()
    x, weight, bias = draw(300, size, dtype=dtype), *(draw(size, seed=i).to(dtype) for i in (1, 2))
    norms = [
        lambda rows: ops.rms_norm(rows, weight, 1e-6),
        lambda rows: ops.rms_norm(rows, weight, 1e-6, offset=1.0, residual=rows.clone()),
        lambda rows: ops.layer_norm(rows, weight, bias, 1e-6),
    ]
    module.set_num_threads(1)
    for norm in norms:
        alone = torch.cat([norm(x[i : i + 1]) for i in range(300)])
        for threads in (1, 2):
            module.set_num_threads(threads)
            for m in (*range(1, 20), 31, 32, 33, 64, 100, 257, 299, 300):
                start = (m * 7919) % (301 - m)
                assert torch.equal(norm(x[start : start + m]), alone[start : start + m])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_path_gives_the_same_bits(dtype: torch.dtype) -> None:
    module = native.required()
    before = module.active_isa()
    x, weight = draw(5, 333, dtype=dtype), draw(333, seed=1, dtype=dtype)
    logits = draw(3, 1001, seed=2) * 40
    seen = []
    for name in module.available_isas().split(", "):
        native.use_isa(name)
        seen.append(
            (
                ops.rms_norm(x, weight, 1e-6),
                ops.layer_norm(x, weight, weight, 1e-6),
                ops.soft_cap(logits.clone(), 30.0),
            )
        )
    native.use_isa(before)
    for results in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results, seen[0], strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_apart_and_off_cache_lines(isa: str, dtype: torch.dtype) -> None:
    x, weight = draw(9, 131, dtype=dtype)[:, 1:98], draw(97, seed=1, dtype=dtype)
    stream = torch.zeros(9, 140, dtype=dtype)
    ops.rms_norm(x, weight, 1e-6, residual=stream[:, 3:100])
    assert torch.equal(stream[:, 3:100], ops.rms_norm(x.contiguous(), weight, 1e-6))
    assert not bool(stream[:, :3].any()) and not bool(stream[:, 100:].any())
    turned = draw(97, 9, seed=2, dtype=dtype).t()
    assert torch.equal(
        ops.layer_norm(turned, weight, None, 1e-6),
        ops.layer_norm(turned.contiguous(), weight, None, 1e-6),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_values_stay_what_they_are(isa: str, dtype: torch.dtype) -> None:
    ones = torch.ones(4, dtype=dtype)
    x = torch.tensor([[0.0] * 4, [float("nan"), 1, 1, 1], [1e18] * 4, [-1e-30] * 4]).to(dtype)
    got = ops.rms_norm(x, ones, 1e-6)
    assert got[0].tolist() == [0.0] * 4 and bool(got[1].isnan().all())
    assert got[2].tolist() == [1.0] * 4 and bool((got[3].abs() < 1e-20).all())
    assert bool(ops.layer_norm(x, None, None, 1e-6)[1].isnan().all())


@FEW
@given(count=st.integers(0, 70), seed=SEEDS, cap=st.sampled_from([0.5, 30.0, 50.0]))
def test_soft_cap_agrees_with_float64(isa: str, count: int, seed: int, cap: float) -> None:
    x = draw(count, seed=seed) * torch.tensor([1e-6, 0.1, 1.0, 100.0]).repeat(20)[:count]
    exact = (x.double() / cap).tanh() * cap
    got = ops.soft_cap(x, cap)
    assert got is x
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-30)


def test_soft_cap_of_extremes_is_the_cap_and_nan_stays(isa: str) -> None:
    inf = float("inf")
    got = ops.soft_cap(torch.tensor([inf, -inf, 3e38, -3e38, 0.0, -0.0, float("nan")]), 30.0)
    assert got[:6].tolist() == [30.0, -30.0, 30.0, -30.0, 0.0, 0.0]
    assert bool(got[6].isnan()) and bool(got[5].signbit())


def test_soft_cap_is_the_same_at_any_position_and_for_any_number_of_threads(isa: str) -> None:
    x = draw(100_003) * 30
    module = native.required()
    module.set_num_threads(1)
    whole = ops.soft_cap(x.clone(), 30.0)
    module.set_num_threads(2)
    assert torch.equal(ops.soft_cap(x.clone(), 30.0), whole)
    for start, stop in ((0, 1), (7, 40), (50_001, 100_003)):
        assert torch.equal(ops.soft_cap(x[start:stop].clone(), 30.0), whole[start:stop])


def test_numbers_that_make_no_sense_are_refused() -> None:
    module = native.required()
    with pytest.raises(ValueError, match="rms_norm: sizes"):
        module.rms_norm(64, 1, 1, 0, 64, 1e-6, 0.0, 0, 0, 0, 64, 1)
    with pytest.raises(ValueError, match="rms_norm: weight must not be null"):
        module.rms_norm(64, 1, 1, 1, 0, 1e-6, 0.0, 0, 0, 0, 64, 1)
    with pytest.raises(ValueError, match="layer_norm: dtype"):
        module.layer_norm(64, 1, 1, 1, 0, 0, 1e-6, 7, 64, 1)
    with pytest.raises(ValueError, match="soft_cap: cap must be positive"):
        module.soft_cap(64, 1, 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@FEW
@given(rows=ROWS, size=SIZES, seed=SEEDS)
def test_scaling_has_torchs_bits(
    isa: str, dtype: torch.dtype, rows: int, size: int, seed: int
) -> None:
    x = draw(rows, size, seed=seed, dtype=dtype)
    want = x * 25.25
    got = ops.scale(x, 25.25)
    assert got is x and torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@FEW
@given(rows=st.integers(1, 40), size=SIZES, count=st.integers(0, 200), seed=SEEDS)
def test_rows_of_a_plain_matrix_are_copied(
    isa: str, dtype: torch.dtype, rows: int, size: int, count: int, seed: int
) -> None:
    table = draw(rows, size, seed=seed, dtype=dtype)
    ids = torch.randint(0, rows, (count,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(ops.embedding(ids, table), table[ids])
    with pytest.raises(ValueError, match="embedding: ids must be rows"):
        ops.embedding(torch.tensor([rows]), table)
