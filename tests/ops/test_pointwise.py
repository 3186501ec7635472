"""Activations, sums and gathered columns on every path, against float64 and plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagemill import native
from pagemill.ops import reference
from tests.ops.conftest import needs_extension

if native.extension() is not None:
    from pagemill.ops import cpu_layers as ops

pytestmark = needs_extension
FEW = settings(
    deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
DTYPES = (torch.float32, torch.bfloat16)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@FEW
@given(
    name=st.sampled_from(sorted(reference.ACTIVATIONS)),
    count=st.integers(0, 70),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(DTYPES),
)
def test_activations_agree_with_float64(
    isa: str, name: str, count: int, seed: int, dtype: torch.dtype
) -> None:
    scales = torch.tensor([1e-6, 0.3, 1.0, 3.0, 30.0]).repeat(20)[:count]
    x = (draw(count, seed=seed) * scales).to(dtype)
    exact = reference.activation(name)(x.double())
    got = ops.activate(x, name)
    assert got is x
    rounding = 2e-6 if dtype == torch.float32 else 1 / 256
    torch.testing.assert_close(got.double(), exact, rtol=rounding, atol=6e-7)


def test_every_activation_of_the_reference_is_known() -> None:
    for name in reference.ACTIVATIONS:
        assert ops.activate(torch.zeros(3), name).tolist() == [0.0] * 3


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "silu", "quick_gelu", "relu", "relu2"])
def test_extreme_numbers_keep_their_sense(isa: str, name: str) -> None:
    got = ops.activate(torch.tensor([float("inf"), 1e30, -1e30, 0.0, float("nan")]), name)
    assert got[0] == float("inf") and got[1] >= 1e30
    assert abs(float(got[2])) < 1e-6 and got[3] == 0.0 and bool(got[4].isnan())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_has_its_bits_at_any_position_and_for_any_number_of_threads(
    isa: str, dtype: torch.dtype
) -> None:
    x, y = draw(50_003, dtype=dtype), draw(50_003, seed=1, dtype=dtype)
    module = native.required()
    module.set_num_threads(1)
    whole, total = ops.activate(x.clone(), "gelu"), ops.add(x.clone(), y)
    module.set_num_threads(2)
    assert torch.equal(ops.activate(x.clone(), "gelu"), whole)
    assert torch.equal(ops.add(x.clone(), y), total)
    for start, stop in ((0, 1), (7, 40), (30_001, 50_003)):
        assert torch.equal(ops.activate(x[start:stop].clone(), "gelu"), whole[start:stop])
        assert torch.equal(ops.add(x[start:stop].clone(), y[start:stop]), total[start:stop])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_torchs(isa: str, dtype: torch.dtype) -> None:
    x, y, table = (
        draw(5, 37, dtype=dtype),
        draw(5, 37, seed=1, dtype=dtype),
        draw(9, 37, dtype=dtype),
    )
    assert torch.equal(ops.add(x.clone(), y), x + y)
    ids = torch.tensor([6, 0, 3, 3, 1])
    assert torch.equal(ops.add_rows(x.clone(), ids, 2, table), x + table[ids + 2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_are_gathered_in_any_order(dtype: torch.dtype) -> None:
    x = draw(7, 90, dtype=dtype)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ops.gather_columns(x, order), x[:, order])
    assert torch.equal(
        ops.gather_columns(x[:, 10:50], order[:5] % 40), x[:, 10:50][:, order[:5] % 40]
    )


def test_numbers_that_make_no_sense_are_refused() -> None:
    module = native.required()
    with pytest.raises(ValueError, match="activate: activation must be known"):
        module.activate(64, 1, 6, 0)
    with pytest.raises(ValueError, match="add: dtype"):
        module.add(64, 64, 1, 2)
    x = torch.zeros(1, 4)
    for ids in (torch.tensor([2]), torch.tensor([-2])):
        with pytest.raises(ValueError, match="add_rows: ids must be rows of the table"):
            ops.add_rows(x, ids, 1, torch.zeros(3, 4))
    with pytest.raises(ValueError, match="gather_columns: order must be columns of x"):
        ops.gather_columns(x, torch.tensor([4]))
