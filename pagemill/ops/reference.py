"""The operations of a decoder in plain torch: what layers call, and the oracle of any faster kernel.

Each function keeps the order of casts and roundings of the published model code in Hugging Face's
`transformers` (eager), so that float32 tokens agree. Inputs are never changed. Dimension 0 is the
token; "..." stands for any leading dimensions. Called by `layers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pagemill.errors import CheckpointError


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias; x [..., in], weight [out, in], bias [out], one dtype."""
    return F.linear(x, weight, bias)


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
