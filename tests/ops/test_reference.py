"""Plain-torch operations against transformers' own modules and against closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as glm_rotary
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as neox_rotary
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotary

from pagemill.errors import CheckpointError
from pagemill.ops import reference as ops

DTYPES = [torch.float32, torch.bfloat16]


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_bit_equal_to_llama(dtype: torch.dtype) -> None:
    module = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    module.weight.data = _random(48, dtype=dtype, seed=1)
    x = _random(7, 48, dtype=dtype)
    assert torch.equal(ops.rms_norm(x, module.weight.data, 1e-5), module(x).detach())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_with_offset_one_is_bit_equal_to_gemma(dtype: torch.dtype) -> None:
    module = Gemma3RMSNorm(48, eps=1e-6).to(dtype)
    module.weight.data = _random(48, dtype=dtype, seed=1)
    x = _random(7, 3, 48, dtype=dtype)
    got = ops.rms_norm(x, module.weight.data, 1e-6, offset=1.0)
    assert torch.equal(got, module(x).detach())


def test_rms_norm_of_large_bfloat16_values_does_not_overflow() -> None:
    x = torch.full((1, 8), 3e38, dtype=torch.bfloat16)
    small = torch.full((1, 8), 300.0, dtype=torch.bfloat16)
    weight = torch.ones(8, dtype=torch.bfloat16)
    assert torch.equal(ops.rms_norm(small, weight, 1e-6), torch.ones_like(small))
    assert not ops.rms_norm(x, weight, 1e-6).isnan().any()


def test_norms_leave_their_input_alone() -> None:
    x = _random(3, 8)
    before = x.clone()
    ops.rms_norm(x, torch.ones(8), 1e-6)
    ops.rms_norm(x, torch.ones(8), 1e-6, offset=1.0)
    ops.layer_norm(x, None, None, 1e-5)
    ops.soft_cap(x, 2.0)
    assert torch.equal(x, before)


def test_layer_norm_has_mean_bias_and_deviation_weight() -> None:
    y = ops.layer_norm(_random(5, 64), torch.full((64,), 3.0), torch.full((64,), 2.0), 1e-5)
    assert torch.allclose(y.mean(-1), torch.full((5,), 2.0), atol=1e-5)
    assert torch.allclose(y.std(-1, correction=0), torch.full((5,), 3.0), atol=1e-3)


def test_soft_cap_bounds_values_and_keeps_small_ones() -> None:
    x = torch.tensor([-1e6, -0.01, 0.0, 0.01, 1e6])
    y = ops.soft_cap(x, 30.0)
    assert torch.allclose(y, 30.0 * torch.tanh(x / 30.0))
    assert y.abs().max() <= 30.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(ops.ACTIVATIONS))
def test_activation_is_bit_equal_to_the_one_of_that_name(name: str, dtype: torch.dtype) -> None:
    x = _random(9, 33, dtype=dtype)
    assert torch.equal(ops.activation(name)(x), ACT2FN[name](x))


def test_unknown_activation_lists_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match=r"'mish'; known: gelu, .*silu"):
        ops.activation("mish")


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_is_the_first_half(dtype: torch.dtype) -> None:
    x = _random(4, 20, dtype=dtype)
    before = x.clone()
    gate, up = x[:, :10], x[:, 10:]
    assert torch.equal(ops.silu_and_mul(x), torch.nn.functional.silu(gate) * up)
    assert torch.equal(ops.gelu_and_mul(x), torch.nn.functional.gelu(gate) * up)
    tanh = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert torch.equal(ops.gelu_and_mul(x, approximate="tanh"), tanh)
    assert torch.equal(ops.act_and_mul(x, torch.relu), torch.relu(gate) * up)
    assert torch.equal(x, before)


def test_linear_adds_its_bias() -> None:
    x, weight, bias = _random(3, 8), _random(5, 8, seed=1), _random(5, seed=2)
    assert torch.allclose(ops.linear(x, weight, bias), x @ weight.T + bias, atol=1e-5)


def _angles(tokens: int, half: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    freqs = torch.arange(tokens)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    return freqs.cos().to(dtype), freqs.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [16, 6])
def test_neox_rotation_is_bit_equal_to_transformers(rotary_dim: int, dtype: torch.dtype) -> None:
    q, k = _random(11, 6, 16, dtype=dtype), _random(11, 2, 16, dtype=dtype, seed=1)
    cos, sin = _angles(11, rotary_dim // 2, dtype)
    twice = (torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    oracle = llama_rotary if rotary_dim == 16 else neox_rotary
    want_q, want_k = oracle(q, k, *twice, unsqueeze_dim=1)
    got_q, got_k = ops.rotary_embed(q, k, cos, sin)
    assert torch.equal(got_q, want_q)
    assert torch.equal(got_k, want_k)


def test_interleaved_rotation_equals_transformers() -> None:
    q, k = _random(11, 6, 16), _random(11, 2, 16, seed=1)
    cos, sin = _angles(11, 4, torch.float32)
    twice = (torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    want_q, want_k = glm_rotary(q, k, *twice, unsqueeze_dim=1)
    got_q, got_k = ops.rotary_embed(q, k, cos, sin, style="interleaved")
    assert torch.allclose(got_q, want_q, atol=1e-6)
    assert torch.allclose(got_k, want_k, atol=1e-6)


def test_rotation_of_a_slice_of_a_wider_tensor_equals_that_of_a_copy() -> None:
    qkv = _random(5, 8, 16)
    cos, sin = _angles(5, 8, torch.float32)
    before = qkv.clone()
    got = ops.rotate(qkv[:, 2:6], cos, sin)
    assert torch.equal(got, ops.rotate(qkv[:, 2:6].contiguous(), cos, sin))
    assert got.is_contiguous()
    assert torch.equal(qkv, before)


def test_rotation_at_position_zero_changes_nothing_and_keeps_length_elsewhere() -> None:
    x = _random(4, 2, 8)
    cos, sin = _angles(4, 4, torch.float32)
    y = ops.rotate(x, cos, sin)
    assert torch.equal(y[0], x[0])
    assert not torch.allclose(y[1], x[1])
    assert torch.allclose(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-5)


def test_unknown_rotary_style_is_refused() -> None:
    with pytest.raises(ValueError, match="'neox' or 'interleaved'"):
        ops.rotate(_random(1, 1, 4), torch.ones(1, 2), torch.ones(1, 2), style="gptj")


def test_gelu_new_is_the_tanh_formula() -> None:
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    want = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert torch.allclose(ops.gelu_new(x), want, atol=1e-12)
