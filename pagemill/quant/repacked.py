"""One layer whose matrices come quantized from a checkpoint: packed while loading, then used.

The files' tensors wait, large ones unread, until the layer is complete; then its codes are
packed, some rows at a time. Parts of a fused layer may differ: neighbours that agree share one packed
matrix (gate and up in alternate tiles, for the fused activation), the others write their outputs side
by side. Where the columns of a matrix lie in another order than the inputs (GPTQ's act-order), the
inputs are gathered before the product, once for all matrices with that order. Made by `quant.stored`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from pagemill import native
from pagemill.checkpoint.base import Stored
from pagemill.errors import CheckpointError
from pagemill.ops import reference as ops
from pagemill.ops.reference import Int8Rounding, activation_outputs
from pagemill.quant.base import (
    AnyTarget,
    LayerPart,
    LinearShape,
    QuantMethod,
    RandomWeights,
    RawTarget,
    Target,
)
from pagemill.quant.code_sources import (
    TILE,
    RandomCodes,
    RearrangedCodes,
    SizedCodes,
    rows_at_a_time,
)
from pagemill.quant.int8 import Int8Layers
from pagemill.quant.packed import (
    PackedFormat,
    PackedLayers,
    PackedMatrix,
    Product,
    fill,
    keep,
    parts_of,
    unfilled_for,
)
from pagemill.quant.stored import (
    FLOATS,
    CodeSource,
    MatrixFormat,
    RoundedFormat,
    RowCodes,
)


@dataclass(slots=True)
class Matrix:
    """One part of the layer."""

    part: LayerPart
    form: MatrixFormat | None  # None: not quantized
    waiting: dict[str, Stored] = field(default_factory=dict)
    dense: nn.Module | None = None  # what holds it where it is not quantized

    @property
    def name(self) -> str:
        """Return what checkpoints call it, without the family's prefix."""
        return self.part.name.plain

    @property
    def rows(self) -> int:
        """Return the number of output rows."""
        return self.part.stop - self.part.start


class _Method(Protocol):
    """The use of layers of one internal format."""

    def apply(
        self,
        layer: nn.Module,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor: ...

    def apply_gated(self, layer: nn.Module, x: Tensor) -> Tensor: ...

    def gated_outputs(self, gate: str) -> int: ...


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive outputs that one product computes."""

    start: int
    stop: int
    method: _Method
    holder: (
        nn.Module
    )  # with a shape, weights and bias of its own; the layer itself where it is alone
    order: Tensor | None = None  # [in] int64: which input each column multiplies


_Given = Sequence[tuple[Matrix, "CodeSource | None"]]


class Repacked:
    """The weight format of one layer; it belongs to that layer alone."""

    def __init__(self, matrices: Sequence[Matrix], dense: QuantMethod) -> None:
        self._matrices = list(matrices)
        self._dense = dense
        self._pieces: list[_Piece] = []

    def for_layer(self, shape: LinearShape, parts: Sequence[LayerPart]) -> QuantMethod:
        """Return itself."""
        return self

    def create_weights(
        self, layer: nn.Module, shape: LinearShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Make the bias, and the matrices that are not quantized; the others are made when packed."""
        self._dtype, self._device = dtype, device
        layer.register_parameter("weight", None)
        bias = None
        if shape.bias:
            empty = torch.empty(shape.out_features, dtype=dtype, device=device)
            bias = nn.Parameter(empty, requires_grad=False)
        layer.register_parameter("bias", bias)
        for index, matrix in enumerate(self._matrices):
            if matrix.form is None:
                matrix.dense = nn.Module()
                own = LinearShape(shape.in_features, matrix.rows, bias=False)
                vars(matrix.dense)["shape"] = own
                self._dense.create_weights(matrix.dense, own, dtype, device)
                layer.add_module(f"piece_{index}", matrix.dense)

    def targets(self, layer: nn.Module, start: int, stop: int) -> Mapping[str, AnyTarget]:
        """Return where the files' tensors of one part wait, and where its bias goes."""
        (matrix,) = (m for m in self._matrices if (m.part.start, m.part.stop) == (start, stop))
        found: dict[str, AnyTarget] = {}
        if matrix.dense is not None:
            found.update(self._dense.targets(matrix.dense, 0, matrix.rows))
        if matrix.form is not None:
            for word, wanted in matrix.form.wanted().items():
                found[word] = RawTarget(
                    word, matrix.waiting, wanted.shapes, wanted.dtypes, wanted.optional
                )
        bias = _bias(layer)
        if bias is not None:
            found["bias"] = Target.of(bias[start:stop])
        else:  # some writers give every layer one, of zeros
            shape = (matrix.rows,)
            found["bias"] = RawTarget("bias", matrix.waiting, (shape,), FLOATS, optional=True)
        return found

    def randomize(self, layer: nn.Module, weights: RandomWeights) -> None:
        """Pack made-up codes in the place of the files'."""
        for matrix in self._matrices:
            if matrix.dense is not None:
                self._dense.randomize(matrix.dense, weights)
        bias = _bias(layer)
        if bias is not None:
            bias.zero_()
        columns = _shape(layer).in_features
        sources = [
            None if m.form is None else RandomCodes(m.form.packed, columns, weights)
            for m in self._matrices
        ]
        self._pack(layer, sources)

    def finish(self, layer: nn.Module) -> None:
        """Pack the codes of the files and let go of them."""
        if self._pieces:  # made-up ones are packed already
            return
        sources: list[CodeSource | None] = []
        for matrix in self._matrices:
            if matrix.form is None:
                sources.append(None)
            elif self._device.type == "meta":
                order = torch.arange(_shape(layer).in_features) if matrix.form.reorders else None
                sources.append(SizedCodes(order))
            else:
                sources.append(self._open(matrix))
        self._pack(layer, sources)
        for matrix in self._matrices:
            matrix.waiting.clear()

    def finish_lookup(self, layer: nn.Module) -> None:
        """Pack: rows are read from the packed form."""
        self.finish(layer)

    def _open(self, matrix: Matrix) -> CodeSource:
        name = matrix.name
        bias = matrix.waiting.pop("bias", None)
        if isinstance(bias, Tensor) and bias.any():
            raise CheckpointError(
                f"{name}.bias holds numbers other than 0, but by config.json the layer has no bias; "
                "check attention_bias and mlp_bias in config.json"
            )
        assert matrix.form is not None
        source = matrix.form.open(matrix.waiting, name)
        order = matrix.part.row_order
        return source if order is None else RearrangedCodes(source, order)

    # ------------------------------------------------------------ packing

    def _pack(self, layer: nn.Module, sources: Sequence[CodeSource | None]) -> None:
        """Make the pieces: as few products as the parts' formats and column orders allow."""
        runs = self._runs(sources, alternating=parts_of(_shape(layer)) == 2)
        for index, run in enumerate(runs):
            first, last = self._matrices[run[0]], self._matrices[run[-1]]
            start, stop = first.part.start, last.part.stop
            holder = layer
            if len(runs) > 1:
                holder = self._holder(layer, first.dense, start, stop, f"piece_{index}")
            if first.form is None:
                self._dense.finish(holder)
                self._pieces.append(_Piece(start, stop, self._dense, holder))
                continue
            given = [(self._matrices[i], sources[i]) for i in run]
            method = self._keep(holder, first.form.packed, given, start)
            order = self._keep_order(holder, sources[run[0]])
            self._pieces.append(_Piece(start, stop, method, holder, order))
        if len(runs) > 1:
            layer.register_parameter("bias", None)  # each piece has its part

    def _holder(
        self, layer: nn.Module, dense: nn.Module | None, start: int, stop: int, name: str
    ) -> nn.Module:
        """Return the module of one piece among several, with its part of the bias."""
        holder = dense
        if holder is None:
            holder = nn.Module()
            vars(holder)["shape"] = LinearShape(_shape(layer).in_features, stop - start, bias=False)
            layer.add_module(name, holder)
        bias = _bias(layer)
        if bias is not None:
            bias = nn.Parameter(bias[start:stop], requires_grad=False)
        holder.register_parameter("bias", bias)
        return holder

    def _keep(
        self, holder: nn.Module, form: PackedFormat | RoundedFormat, given: _Given, start: int
    ) -> _Method:
        """Put the matrices of one run on a module, and return how they are used."""
        shape, on_meta = _shape(holder), self._device.type == "meta"
        if isinstance(form, RoundedFormat):
            return _keep_rounded(holder, form, given, on_meta)
        packed = unfilled_for(
            form, shape.out_features, shape.in_features, self._device, parts=parts_of(shape)
        )
        if not on_meta:
            self._fill(packed, given, start)
        keep(holder, packed, self._dtype)
        return PackedLayers()

    def _keep_order(self, holder: nn.Module, source: CodeSource | None) -> Tensor | None:
        """Keep a column order as a parameter; an equal one of an earlier piece is the same tensor."""
        order = None if source is None else source.column_order
        if order is None:
            return None
        for piece in self._pieces:
            if piece.order is not None and (piece.order.is_meta or torch.equal(piece.order, order)):
                return piece.order
        kept = nn.Parameter(order.to(self._device), requires_grad=False)
        holder.register_parameter("order", kept)
        return kept

    def _runs(self, sources: Sequence[CodeSource | None], *, alternating: bool) -> list[list[int]]:
        """Return the indices of matrices that can be packed together, in order.

        Matrices whose tiles alternate begin wherever they like; else only at a whole tile.
        """
        runs: list[list[int]] = []
        for index, matrix in enumerate(self._matrices):
            first = self._matrices[runs[-1][0]] if runs else matrix
            whole = alternating or not (matrix.part.start - first.part.start) % TILE
            if runs and whole and self._alike(runs[-1][0], index, sources):
                runs[-1].append(index)
            else:
                runs.append([index])
        return runs

    def _alike(self, one: int, other: int, sources: Sequence[CodeSource | None]) -> bool:
        first, second = self._matrices[one].form, self._matrices[other].form
        if first is None or second is None or first.packed != second.packed:
            return False
        left, right = sources[one], sources[other]
        assert left is not None and right is not None
        same_inputs = _equal(left.column_order, right.column_order)
        return same_inputs and left.rounding == right.rounding

    def _fill(self, packed: PackedMatrix, given: _Given, start: int) -> None:
        each = packed.out_features // packed.parts
        step = rows_at_a_time(packed.in_features)
        for matrix, source in given:
            assert source is not None
            first = matrix.part.start - start
            # A fused gate's part may be a matrix of its own or half of one.
            while first < matrix.part.stop - start:
                part, row = divmod(first, each)
                stop = min(matrix.part.stop - start, (part + 1) * each, first + step)
                offset = start - matrix.part.start
                begin = first + offset
                rows = source.rows(begin, stop + offset).checked(matrix.name, begin)
                self._fill_rows(packed, rows, row, part)
                first = stop

    def _fill_rows(self, packed: PackedMatrix, rows: RowCodes, first: int, part: int) -> None:
        kind = packed.format.offset
        fill(
            packed,
            rows.codes,
            rows.scales,
            mins=rows.offsets if kind == "min" else None,
            zeros=rows.offsets if kind == "zero" else None,
            first_row=first,
            part=part,
        )

    # ------------------------------------------------------------ use

    def apply(
        self,
        layer: nn.Module,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Multiply; bias and residual are added to the float32 sums, which are rounded once."""
        if len(self._pieces) == 1:
            piece = self._pieces[0]
            inputs = _gathered(x, piece.order)
            return piece.method.apply(layer, inputs, residual=residual, out_dtype=out_dtype)
        size, dtype = (x.shape[0], _shape(layer).out_features), out_dtype or x.dtype
        out = torch.empty(size, dtype=dtype, device=x.device) if residual is None else residual
        order, inputs = None, x
        for piece in self._pieces:
            if piece.order is not order:
                order, inputs = piece.order, _gathered(x, piece.order)
            columns = out[:, piece.start : piece.stop]
            if residual is None and isinstance(piece.method, PackedLayers):
                product = cast(Product, piece.holder.product)
                product.apply(inputs, _bias(piece.holder), out=columns)
            elif residual is None:
                piece.method.apply(piece.holder, inputs, residual=columns.zero_())
            else:
                piece.method.apply(piece.holder, inputs, residual=columns)
        return out

    def apply_gated(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Multiply and apply the gate, to the float32 sums where gate and up are packed together."""
        if len(self._pieces) == 1:
            piece = self._pieces[0]
            return piece.method.apply_gated(layer, _gathered(x, piece.order))
        gate = _shape(layer).gate
        assert gate is not None
        return ops.act_and_mul(self.apply(layer, x), ops.activation(gate))

    def gated_outputs(self, gate: str) -> int:
        """Count the format's own where gate and up are packed together; else all one by one."""
        if len(self._pieces) == 1:
            return self._pieces[0].method.gated_outputs(gate)
        return 2 + activation_outputs(gate)

    def extra_bytes_per_token(self, layer: nn.Module) -> int:
        """Return what gathered inputs take, and without native kernels the float32 sums."""
        shape, extra = _shape(layer), 0
        if any(piece.order is not None for piece in self._pieces):
            extra += shape.in_features * self._dtype.itemsize
        if native.extension() is None:
            extra += 4 * shape.in_features + 8 * (shape.out_features + TILE)
        return extra

    def rows(self, layer: nn.Module, ids: Tensor) -> Tensor:
        """Return dequantized rows in the model's dtype."""
        (piece,) = self._pieces
        assert isinstance(piece.method, PackedLayers), "schemes round no activations of lookups"
        found = piece.method.rows(layer, ids)
        if piece.order is None:
            return found
        return torch.empty_like(found).index_copy_(1, piece.order, found)


def _keep_rounded(
    holder: nn.Module, form: RoundedFormat, given: _Given, on_meta: bool
) -> Int8Layers:
    """Put int8 matrices on a module; their activations are rounded too."""
    shape, layers = _shape(holder), Int8Layers()
    how = Int8Rounding(row_zero_points=form.zero_points)
    if on_meta:
        codes = torch.empty(shape.out_features, shape.in_features, dtype=torch.int8, device="meta")
        scales = torch.empty(shape.out_features, dtype=torch.float32, device="meta")
    else:
        rows = [
            source.rows(0, matrix.rows).checked(matrix.name, 0)
            for matrix, source in given
            if source is not None
        ]
        codes = rows[0].codes if len(rows) == 1 else torch.cat([part.codes for part in rows])
        scales = torch.cat([part.scales[:, 0].float() for part in rows])
        first = given[0][1]
        how = how if first is None else first.rounding or how
    layers.attach(holder, codes, scales, how)
    return layers


def _gathered(x: Tensor, order: Tensor | None) -> Tensor:
    if order is None:
        return x
    if native.extension() is None:
        return x.index_select(1, order)
    from pagemill.ops.cpu_layers import gather_columns

    return gather_columns(x, order)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _shape(layer: nn.Module) -> LinearShape:
    return cast(LinearShape, layer.shape)


def _bias(layer: nn.Module) -> Tensor | None:
    return cast("Tensor | None", layer.bias)
