"""The operations of a decoder in plain torch: what layers call, and the oracle of any faster kernel.

Each function keeps the order of casts and roundings of the published model code in Hugging Face's
`transformers` (eager), so that float32 tokens agree. Inputs are never changed. Dimension 0 is the
token; "..." stands for any leading dimensions. Called by `layers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pagemill.errors import CheckpointError


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias; x [..., in], weight [out, in], bias [out], one dtype."""
    return F.linear(x, weight, bias)


@dataclass(frozen=True, slots=True)
class Int8Rounding:
    """How a row of activations becomes int8 codes: round(x / scale) + zero point, cut to int8."""

    scale: float | None = None  # fixed; None: each row its own, by its largest absolute value
    zero_point: int = 0  # of a fixed scale
    row_zero_points: bool = False  # scales of rows span lowest to highest, with a zero point each

    def __post_init__(self) -> None:
        """Check what a checkpoint may have brought; ValueError names it."""
        if self.scale is not None and not 0.0 < self.scale < 3.4e38:
            raise ValueError(f"the scale of activations is {self.scale}; it must be positive")
        if not -128 <= self.zero_point <= 127:
            raise ValueError(
                f"the zero point of activations is {self.zero_point}; it must be from -128 to 127"
            )

    @property
    def has_zero_points(self) -> bool:
        """Return whether some zero point may not be 0: weights then need the sums of their codes."""
        return self.zero_point != 0 if self.scale is not None else self.row_zero_points


PER_ROW = Int8Rounding()


def int8_codes(x: Tensor, how: Int8Rounding = PER_ROW) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes int8 of x [rows, in], and float32 scales and zero points [rows, 1].

    A row with NaN, or with its own scale infinity, gets the scale NaN and codes 0. Ties go to even.
    """
    x = x.to(torch.float32)
    largest = x.abs().amax(-1, keepdim=True) if x.numel() else x.new_zeros(len(x), 1)
    zero, low = torch.full_like(largest, float(how.zero_point)), -128
    if how.scale is not None:
        scale, bad = torch.full_like(largest, how.scale), largest.isnan()
    elif how.row_zero_points:
        bad = ~largest.isfinite()
        lowest, highest = (
            x.amin(-1, keepdim=True).clamp_max(0),
            x.amax(-1, keepdim=True).clamp_min(0),
        )
        scale = highest / 255.0 - lowest / 255.0
        zero = (-128.0 - lowest / scale).round().clamp(-128, 127)
    else:
        scale, zero, bad, low = largest / 127.0, zero.zero_(), ~largest.isfinite(), -127
    scale = torch.where(bad, torch.nan, scale)
    empty = ~(scale > 0)
    codes = ((x / scale).clamp(-1024, 1024).round() + zero).clamp(low, 127)
    codes = torch.where(empty, 0.0, codes).to(torch.int8)
    return codes, scale, torch.where(empty, 0.0, zero)


# Products of codes of this many inputs are whole numbers that float32 adds without rounding.
_EXACT_INPUTS = 1024
# Weights that are widened at a time, in outputs.
_INT8_OUTPUTS = 4096


def linear_int8(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    how: Int8Rounding = PER_ROW,
) -> Tensor:
    """Return x @ (codes * scales).T + bias in float32, x [rows, in] rounded to int8 codes first.

    codes [out, in] int8, scales [out] float32, bias [out]. Sums are exact whole numbers (in <= 65536),
    converted to float32, times the row's scale, times the output's.
    """
    rounded, row_scales, zeros = int8_codes(x, how)
    wide, parts = rounded.to(torch.float32), []
    for first in range(0, len(codes), _INT8_OUTPUTS):
        outputs = codes[first : first + _INT8_OUTPUTS]
        sums = torch.zeros(len(x), len(outputs), dtype=torch.float64)
        for start in range(0, codes.shape[1], _EXACT_INPUTS):
            part = outputs[:, start : start + _EXACT_INPUTS].to(torch.float32)
            sums += wide[:, start : start + _EXACT_INPUTS] @ part.t()
            if how.has_zero_points:
                sums -= zeros * part.sum(-1, dtype=torch.float64)
        parts.append(sums.to(torch.float32).mul_(row_scales))
    out = torch.cat(parts, dim=1).mul_(scales)
    return out if bias is None else out.add_(bias.to(torch.float32))


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """Return x / rms(x) * (offset + weight) over the last dimension, in x's dtype.

    Zhang & Sennrich 2019. The mean square is float32. With offset 0 the quotient is rounded to x's
    dtype before the weight (Llama); with another offset everything is float32 until the end (Gemma: 1).
    """
    wide = x.to(torch.float32)
    normed = wide * wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    if offset == 0.0:
        return normed.to(x.dtype) * weight
    return normed.mul_(weight.to(torch.float32) + offset).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return (x - mean) / std * weight + bias over the last dimension. Ba et al. 2016."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap): values stay within (-cap, cap). Gemma 2."""
    return (x / cap).tanh_().mul_(cap)


def gelu(x: Tensor) -> Tensor:
    """Return x * P(X <= x) of a standard normal X. Hendrycks & Gimpel 2016."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the tanh approximation of gelu, computed in one piece."""
    return F.gelu(x, approximate="tanh")


def gelu_new(x: Tensor) -> Tensor:
    """Return the tanh approximation of gelu, each step rounded to x's dtype (GPT-2)."""
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def gelu_fast(x: Tensor) -> Tensor:
    """Return the tanh approximation of gelu in its factored form."""
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def quick_gelu(x: Tensor) -> Tensor:
    """Return x * sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


def relu_squared(x: Tensor) -> Tensor:
    """Return relu(x) ** 2. So et al. 2021 (Primer)."""
    return F.relu(x).square()


# Names of `hidden_act` and `hidden_activation` in config.json.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_fast": gelu_fast,
    "gelu_new": gelu_new,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "relu2": relu_squared,
    "silu": F.silu,
    "swish": F.silu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the function that a checkpoint calls `name`; CheckpointError lists the known names."""
    function = ACTIVATIONS.get(name)
    if function is None:
        known = ", ".join(sorted(ACTIVATIONS))
        raise CheckpointError(f"unknown activation {name!r}; known: {known}")
    return function


# Temporaries of the activations that need more than their output, in outputs.
_ACTIVATION_OUTPUTS = {"gelu_fast": 4, "gelu_new": 4, "quick_gelu": 2, "relu2": 2}


def activation_outputs(name: str) -> int:
    """Return the temporary memory of an activation, its output included, in outputs."""
    return _ACTIVATION_OUTPUTS.get(name, 1)


def act_and_mul(gate_up: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    """Return act(gate) * up of gate_up [..., 2 * size]; the gate is the first half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return act(gate).mul_(up)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of gate_up [..., 2 * size]. Shazeer 2020 (SwiGLU)."""
    return act_and_mul(gate_up, F.silu)


def gelu_and_mul(gate_up: Tensor, *, approximate: str = "none") -> Tensor:
    """Return gelu(gate) * up of gate_up [..., 2 * size]; approximate is "none" or "tanh" (GeGLU)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate).mul_(up)


def angles(positions: Tensor, inv_freq: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return float32 cos and sin, each [num_tokens, half], of positions [num_tokens] * inv_freq [half]."""
    turns = positions.to(torch.float32).unsqueeze(1) * inv_freq
    cos, sin = turns.cos(), turns.sin_()
    if scaling != 1.0:
        cos.mul_(scaling)
        sin.mul_(scaling)
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, style: str = "neox") -> Tensor:
    """Return x with pairs of its first elements turned by an angle. Su et al. 2021 (RoPE).

    x [num_tokens, heads, head_dim]; cos, sin [num_tokens, rotary_dim / 2], cast to x's dtype. Elements
    past rotary_dim pass unchanged. A pair is (i, i + rotary_dim / 2) in style "neox" and (2i, 2i + 1)
    in style "interleaved". q and k that lie side by side may be turned in one call.
    """
    half = cos.shape[-1]
    cos, sin = cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1)
    out = x.clone(memory_format=torch.contiguous_format)
    if style == "neox":
        old_a, old_b = x[..., :half], x[..., half : 2 * half]
        new_a, new_b = out[..., :half], out[..., half : 2 * half]
    elif style == "interleaved":
        old_a, old_b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        new_a, new_b = out[..., 0 : 2 * half : 2], out[..., 1 : 2 * half : 2]
    else:
        raise ValueError(f"rotary style is {style!r}; it must be 'neox' or 'interleaved'")
    # Two roundings a product and sum, as in the model code: no fused multiply-add here.
    new_a.mul_(cos).sub_(old_b * sin)
    new_b.mul_(cos).add_(old_a * sin)
    return out


def rotary_embed(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, style: str = "neox"
) -> tuple[Tensor, Tensor]:
    """Return q and k turned by their positions' angles; shapes and styles as in `rotate`."""
    return rotate(q, cos, sin, style=style), rotate(k, cos, sin, style=style)
