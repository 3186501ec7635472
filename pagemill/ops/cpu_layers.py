"""The layers' small operations on the native kernels; csrc/norm, rope, softcap and pointwise say how.

Roundings stand where the reference has them, so results differ from it by the order of sums alone (and
`soft_cap` and `activate` by their tangents and exponentials; `activate` rounds once). A row depends on that row alone, to the bit. Called through `base.LayerOps`
where the extension is built.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill import native
from pagemill.ops.base import HeadNorm, HeadShape, Rotation

# torch is imported above, so that the extension finds its OpenMP library in the process.
_C = native.required()

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_STYLES = {"neox": False, "interleaved": True}
# Names of reference.ACTIVATIONS; three of them are one function, rounded in different places there.
_ACTIVATIONS = {
    "gelu": 0,
    "gelu_fast": 1,
    "gelu_new": 1,
    "gelu_pytorch_tanh": 1,
    "silu": 2,
    "swish": 2,
    "quick_gelu": 3,
    "relu": 4,
    "relu2": 5,
}


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Return rows `ids` [count] int64 of table [rows, size], [count, size]."""
    assert ids.dtype == torch.int64 and table.is_contiguous()
    rows, size = table.shape
    ids = ids.contiguous()  # held until the kernel has read them
    out = torch.empty(ids.shape[0], size, dtype=table.dtype)
    _C.embedding(
        ids.data_ptr(), ids.shape[0], table.data_ptr(), rows,
        size * table.element_size(), out.data_ptr(),
    )  # fmt: skip
    return out


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, residual: Tensor | None = None
) -> Tensor:
    """Return the norm of x [tokens, size], in a fresh tensor, or added to `residual` in place."""
    rows, size = x.shape
    assert weight.dtype == x.dtype and weight.numel() == size and weight.is_contiguous()
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(rows, size, dtype=x.dtype) if residual is None else residual
    assert out.shape == x.shape and out.dtype == x.dtype and (size == 1 or out.stride(1) == 1)
    address, stride = out.data_ptr(), out.stride(0)
    _C.rms_norm(
        x.data_ptr(), x.stride(0), rows, size, weight.data_ptr(), eps, offset, _DTYPES[x.dtype],
        0 if residual is None else address, stride, address, stride,
    )  # fmt: skip
    return out


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return the norm of x [tokens, size], rounded once."""
    rows, size = x.shape
    for factor in (weight, bias):
        assert factor is None or (factor.dtype == x.dtype and factor.shape == (size,))
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(rows, size, dtype=x.dtype)
    _C.layer_norm(
        x.data_ptr(), x.stride(0), rows, size,
        0 if weight is None else weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
        eps, _DTYPES[x.dtype], out.data_ptr(), size,
    )  # fmt: skip
    return out


def rotate_heads(
    heads: Tensor, num_heads: int, norm: HeadNorm | None, rotation: Rotation | None
) -> Tensor:
    """Norm and turn the first `num_heads` of heads [tokens, heads, head_dim] in place; return them all."""
    tokens, all_heads, head_dim = heads.shape
    assert heads.stride(2) == 1 and heads.stride(1) == head_dim and num_heads <= all_heads
    weight = cos = sin = half = 0
    eps, offset, interleaved = 0.0, 0.0, False
    if norm is not None:
        assert norm.weight.shape == (num_heads, head_dim) and norm.weight.dtype == heads.dtype
        weight, eps, offset = norm.weight.data_ptr(), norm.eps, norm.offset
    if rotation is not None:
        half = rotation.cos.shape[1]
        for angles in (rotation.cos, rotation.sin):
            assert angles.shape == (tokens, half) and angles.is_contiguous()
            assert angles.dtype == heads.dtype
        cos, sin = rotation.cos.data_ptr(), rotation.sin.data_ptr()
        interleaved = _STYLES[rotation.style]
    _C.rotate_heads(
        heads.data_ptr(), heads.stride(0), tokens, num_heads, head_dim, weight, eps, offset,
        cos, sin, half, interleaved, _DTYPES[heads.dtype],
    )  # fmt: skip
    return heads


def angles(
    positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [num_tokens, half] of int64 positions, float32 until they are rounded."""
    count, half = positions.shape[0], inv_freq.shape[0]
    assert positions.dtype == torch.int64 and inv_freq.dtype == torch.float32
    assert positions.is_contiguous() and inv_freq.is_contiguous()
    cos, sin = torch.empty(count, half, dtype=dtype), torch.empty(count, half, dtype=dtype)
    _C.rope_angles(
        positions.data_ptr(), count, inv_freq.data_ptr(), half, scaling, cos.data_ptr(),
        sin.data_ptr(), _DTYPES[dtype],
    )  # fmt: skip
    return cos, sin


def scale(x: Tensor, factor: float) -> Tensor:
    """Multiply x in place, and return it."""
    assert x.is_contiguous()
    _C.scale(x.data_ptr(), x.numel(), factor, _DTYPES[x.dtype])
    return x


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Cap float32 x in place, and return it."""
    assert x.dtype == torch.float32 and x.is_contiguous()
    _C.soft_cap(x.data_ptr(), x.numel(), cap)
    return x


def activate(x: Tensor, activation: str) -> Tensor:
    """Apply an activation of `reference.ACTIVATIONS` to x in place, rounding once, and return it."""
    assert x.is_contiguous()
    _C.activate(x.data_ptr(), x.numel(), _ACTIVATIONS[activation], _DTYPES[x.dtype])
    return x


def add(x: Tensor, y: Tensor) -> Tensor:
    """Add y to x in place, and return x."""
    assert x.is_contiguous() and y.is_contiguous() and x.shape == y.shape and x.dtype == y.dtype
    _C.add(x.data_ptr(), y.data_ptr(), x.numel(), _DTYPES[x.dtype])
    return x


def add_rows(x: Tensor, ids: Tensor, offset: int, table: Tensor) -> Tensor:
    """Add rows ids + offset of table [rows, size] to x [count, size] in place, and return x."""
    assert ids.dtype == torch.int64 and ids.is_contiguous() and table.is_contiguous()
    assert x.is_contiguous() and x.dtype == table.dtype
    assert x.shape == (ids.shape[0], table.shape[1])
    _C.add_rows(
        x.data_ptr(), x.shape[0], x.shape[1], ids.data_ptr(), offset, table.data_ptr(),
        table.shape[0], _DTYPES[x.dtype],
    )  # fmt: skip
    return x


def gather_columns(x: Tensor, order: Tensor) -> Tensor:
    """Return columns `order` [count] int64 of x [rows, size], [rows, count]."""
    assert order.dtype == torch.int64 and order.is_contiguous()
    rows, size = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(rows, order.shape[0], dtype=x.dtype)
    _C.gather_columns(
        x.data_ptr(), x.stride(0), rows, size, order.data_ptr(), order.shape[0], out.data_ptr(),
        _DTYPES[x.dtype],
    )  # fmt: skip
    return out


class NativeOps:
    """A `LayerOps`: these functions, for layers."""

    rms_norm = staticmethod(rms_norm)
    layer_norm = staticmethod(layer_norm)
    angles = staticmethod(angles)
    scale = staticmethod(scale)
    soft_cap = staticmethod(soft_cap)
    activate = staticmethod(activate)
    add = staticmethod(add)
    add_rows = staticmethod(add_rows)

    def split_heads(
        self, qkv: Tensor, shape: HeadShape, norm: HeadNorm | None, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Change q and k where they lie."""
        heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
        num_qk = shape.num_heads + shape.num_kv_heads
        rotate_heads(heads, num_qk, norm, rotation)
        return heads[:, : shape.num_heads], heads[:, shape.num_heads : num_qk], heads[:, num_qk:]

    def rms_norm_bytes(self, size: int, itemsize: int, offset: float) -> int:
        """Count the result alone."""
        return size * itemsize

    def split_heads_bytes(
        self, shape: HeadShape, itemsize: int, norm: HeadNorm | None, rotary_dim: int
    ) -> tuple[int, int]:
        """Return nothing: all happens in place."""
        return 0, 0

    def activation_outputs(self, activation: str) -> int:
        """Return nothing: it happens in place."""
        return 0
