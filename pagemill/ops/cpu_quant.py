"""Products with packed weights on the native kernels: checks, outputs, and one call into `pagemill._C`.

`NativeProduct` has the meaning of `ops.packed.ReferenceProduct` and differs from it by rounding alone: sums
are float32 in one fixed order and rounded once, and with bfloat16 activations the kernel may round
products of pairs together. A row of a result depends on that row of the input alone, to the bit. Called by
`quant.packed` where the extension is built; the layout is explained in csrc/qlinear/qlinear.h.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill import native
from pagemill.ops.kept_results import new_result
from pagemill.ops.packed import CODECS, OFFSETS, PackedMatrix

# torch is imported above, so that the extension finds its OpenMP library in the process.
_C = native.required()

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_CODECS = {name: number for number, name in enumerate(CODECS)}
_EPILOGUES = {None: 0, "silu": 1, "swish": 1, "gelu_pytorch_tanh": 2}


class NativeProduct:
    """A packed matrix in memory that stays where it is, and its products."""

    def __init__(self, matrix: PackedMatrix) -> None:
        """Hold the matrix; its tensors must be filled in place from now on, never replaced."""
        self.matrix = matrix
        form, offsets = matrix.format, matrix.offsets
        for name, tensor in matrix.tensors().items():
            assert tensor.is_contiguous() and tensor.device.type == "cpu", name
        self._features = matrix.out_features // matrix.parts
        self._handle = _C.QMatrix(
            _CODECS[form.codec], form.group, self._features, matrix.in_features, matrix.parts,
            matrix.codes.data_ptr(), matrix.scales.data_ptr(),
            0 if offsets is None else offsets.data_ptr(), OFFSETS.index(form.offset),
            matrix.multipliers.data_ptr(), form.table,
        )  # fmt: skip

    def apply(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        gate: str | None = None,
        out: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Multiply; see `ops.packed.Product`."""
        rows, in_features = x.shape
        assert in_features == self.matrix.in_features
        if x.stride(1) != 1:
            x = x.contiguous()
        if residual is not None:
            out = residual
        elif out is None:
            out = new_result(rows, self._features, x.dtype, out_dtype)
        assert out.shape == (rows, self._features) and out.stride(1) == 1
        bias_address = 0
        if bias is not None:
            assert bias.dtype == x.dtype and bias.is_contiguous()
            bias_address = bias.data_ptr()
        address, stride = out.data_ptr(), out.stride(0)
        _C.qlinear(
            self._handle, x.data_ptr(), x.stride(0), rows, _DTYPES[x.dtype], bias_address,
            address if residual is not None else 0, stride, address, stride, _DTYPES[out.dtype],
            _EPILOGUES[gate],
        )  # fmt: skip
        return out

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Look rows up; see `ops.packed.Product`."""
        ids = ids.contiguous()  # held until the kernel has read them
        out = torch.empty(ids.shape[0], self.matrix.in_features, dtype=dtype)
        _C.qlinear_rows(self._handle, ids.data_ptr(), ids.shape[0], out.data_ptr(), _DTYPES[dtype])
        return out


def qlinear_scratch_bytes() -> int:
    """Return the most memory that products keep of their own."""
    return int(_C.qlinear_scratch_bytes())
