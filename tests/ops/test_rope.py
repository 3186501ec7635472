"""The native norm and rotation of heads: against the reference, and each token on its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagemill import native
from pagemill.ops import reference
from pagemill.ops.base import HeadNorm, HeadShape, Rotation
from pagemill.ops.plain import PlainOps
from tests.ops.conftest import needs_extension

if native.extension() is not None:
    from pagemill.ops import cpu_layers as ops

pytestmark = needs_extension
DTYPES = [torch.float32, torch.bfloat16]
STYLES = ["neox", "interleaved"]
FEW = settings(
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def rotation(tokens: int, half: int, style: str, dtype: torch.dtype, seed: int = 5) -> Rotation:
    angles = draw(tokens, half, seed=seed) * 10
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype), style)


def part(turn: Rotation, start: int, stop: int) -> Rotation:
    return Rotation(turn.cos[start:stop], turn.sin[start:stop], turn.style)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("style", STYLES)
@FEW
@given(
    tokens=st.integers(0, 6), heads=st.integers(1, 5), dim=st.integers(1, 80), data=st.data(),
    seed=st.integers(0, 1 << 20),
)  # fmt: skip
def test_a_rotation_has_the_references_bits(
    isa: str, dtype: torch.dtype, style: str, tokens: int, heads: int, dim: int, data, seed: int
) -> None:
    half = data.draw(st.integers(0, dim // 2))
    turned = data.draw(st.integers(1, heads))
    x = draw(tokens, heads, dim, seed=seed, dtype=dtype)
    turn = rotation(tokens, half, style, dtype, seed)
    want = x.clone()
    want[:, :turned] = reference.rotate(x[:, :turned], turn.cos, turn.sin, style=style)
    got = ops.rotate_heads(x, turned, None, turn)
    assert got is x and torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@FEW
@given(dim=st.integers(1, 80), data=st.data(), seed=st.integers(0, 1 << 20))
def test_the_norm_comes_first_and_is_rms_norm_of_each_head(
    isa: str, dtype: torch.dtype, style: str, offset: float, dim: int, data, seed: int
) -> None:
    half = data.draw(st.integers(0, dim // 2))
    x, weight = draw(3, 5, dim, seed=seed, dtype=dtype), draw(4, dim, seed=1, dtype=dtype)
    norm, turn = HeadNorm(weight, 1e-5, offset), rotation(3, half, style, dtype, seed)
    want = x.clone()
    for head in range(4):
        normed = ops.rms_norm(x[:, head], weight[head], 1e-5, offset=offset)
        want[:, head] = reference.rotate(normed[:, None], turn.cos, turn.sin, style=style)[:, 0]
    assert torch.equal(ops.rotate_heads(x, 4, norm, turn), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("with_turn", [True, False])
def test_split_heads_is_the_plain_one_within_rounding(
    isa: str, dtype: torch.dtype, with_norm: bool, with_turn: bool
) -> None:
    shape = HeadShape(6, 2, 24)
    qkv = draw(7, 10 * 24, dtype=dtype)
    norm = HeadNorm(draw(8, 24, seed=1, dtype=dtype), 1e-6, 1.0) if with_norm else None
    turn = rotation(7, 8, "neox", dtype) if with_turn else None
    want = PlainOps().split_heads(qkv.clone(), shape, norm, turn)
    got = ops.NativeOps().split_heads(qkv.clone(), shape, norm, turn)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert torch.equal(got[2], want[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("style", STYLES)
def test_a_token_is_the_same_among_1_to_300_tokens_at_any_position(
    isa: str, dtype: torch.dtype, style: str
) -> None:
    module = native.required()
    x, turn = draw(300, 6, 40, dtype=dtype), rotation(300, 15, style, dtype)
    norm = HeadNorm(draw(4, 40, seed=1, dtype=dtype), 1e-6, 0.0)
    module.set_num_threads(1)
    alone = torch.cat(
        [ops.rotate_heads(x[i : i + 1].clone(), 4, norm, part(turn, i, i + 1)) for i in range(300)]
    )
    for threads in (1, 2):
        module.set_num_threads(threads)
        for m in range(1, 301):
            start = (m * 7919) % (301 - m)
            tokens = x[start : start + m].clone()
            got = ops.rotate_heads(tokens, 4, norm, part(turn, start, start + m))
            assert torch.equal(got, alone[start : start + m]), (threads, m)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_may_lie_apart_and_other_heads_are_left_alone(isa: str, dtype: torch.dtype) -> None:
    room = draw(5, 131, dtype=dtype)
    before, turn = room.clone(), rotation(5, 3, "neox", dtype)
    heads = room[:, 1:101].unflatten(1, (10, 10))
    ops.rotate_heads(heads, 7, None, turn)
    changed = reference.rotate(before[:, 1:71].unflatten(1, (7, 10)), turn.cos, turn.sin)
    assert torch.equal(room[:, 1:71], changed.flatten(1))
    assert torch.equal(room[:, :1], before[:, :1]) and torch.equal(room[:, 71:], before[:, 71:])


def test_nothing_to_do_changes_nothing(isa: str) -> None:
    x = draw(3, 4, 6)
    assert torch.equal(ops.rotate_heads(x.clone(), 3, None, None), x)


def test_numbers_that_make_no_sense_are_refused() -> None:
    module = native.required()
    with pytest.raises(ValueError, match="rotate_heads: half"):
        module.rotate_heads(64, 8, 1, 1, 8, 0, 0.0, 0.0, 64, 64, 5, False, 0)
    with pytest.raises(ValueError, match="rotate_heads: cos and sin"):
        module.rotate_heads(64, 8, 1, 1, 8, 0, 0.0, 0.0, 64, 0, 4, False, 0)
    with pytest.raises(ValueError, match="rotate_heads: token_stride"):
        module.rotate_heads(64, 4, 2, 1, 8, 0, 0.0, 0.0, 64, 64, 4, False, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@FEW
@given(
    count=st.integers(0, 50), half=st.integers(1, 70), seed=st.integers(0, 1 << 20),
    scaling=st.sampled_from([1.0, 1.19]),
)  # fmt: skip
def test_angles_agree_with_float64(
    isa: str, dtype: torch.dtype, count: int, half: int, seed: int, scaling: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, 200_000, (count,), generator=generator)
    inv_freq = 10000.0 ** (-torch.arange(half) / half)
    turns = (positions.float()[:, None] * inv_freq).double()  # the angle itself is float32
    for got, exact in zip(
        ops.angles(positions, inv_freq, scaling, dtype), (turns.cos(), turns.sin()), strict=True
    ):
        assert got.shape == (count, half) and got.dtype == dtype
        tolerance = 2.0**-8 if dtype == torch.bfloat16 else 3e-7
        torch.testing.assert_close(got.double(), scaling * exact, rtol=tolerance, atol=3e-7)


def test_the_angles_of_a_position_are_the_same_among_others(isa: str) -> None:
    module = native.required()
    positions, inv_freq = torch.arange(0, 60_000, 200), 10000.0 ** (-torch.arange(32) / 32)
    module.set_num_threads(2)
    cos, sin = ops.angles(positions, inv_freq, 1.0, torch.float32)
    module.set_num_threads(1)
    for i in (0, 1, 150, 299):
        alone = ops.angles(positions[i : i + 1], inv_freq, 1.0, torch.float32)
        assert torch.equal(alone[0][0], cos[i]) and torch.equal(alone[1][0], sin[i])
