"""The seam between linear layers and weight formats.

A linear layer knows its sizes and which rows belong to which projection; how the numbers are stored
and multiplied is the format's. The format keeps its tensors as parameters of the layer, so that they
move and count like any other. Also here: what every loadable layer offers the loader, `Target`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from pagemill.checkpoint.base import RowSource, Stored
from pagemill.errors import CheckpointError


class NotFiniteError(CheckpointError):
    """A matrix that is to be rounded holds NaN or infinity; the loader says which."""

    def __init__(self, shape: Sequence[int], form: str) -> None:
        super().__init__(
            f"a weight matrix of {tuple(shape)} holds NaN or infinity, which {form} cannot: load it without "
            "quantization, or mend the checkpoint"
        )


# The types of numbers that are no weights by themselves; cast, they would load and mean nothing.
_NO_WEIGHTS = re.compile(r"BOOL|[UI]\d+|C64|F8_.*|F6_.*|F4")
# Elements that a source of rows makes at a time on their way into a parameter.
_SLICE_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """Where one tensor of a checkpoint goes: a view of a parameter, filled in place."""

    view: Tensor  # part of a parameter, in the order of the file's elements
    shape: tuple[int, ...]  # that the file must have; expands or reshapes to the view's
    owner: Loadable | None = None  # whose parameter it is, set by the weight map

    @property
    def optional(self) -> bool:
        """Return whether files may lack the tensor."""
        return False

    @staticmethod
    def of(view: Tensor) -> Target:
        """Return the target of a file tensor that has the view's own shape."""
        return Target(view, tuple(view.shape))

    def transposed(self) -> Target:
        """Return the target of a file that holds the matrix as [in, out]; others stay."""
        view = self.view.t() if self.view.dim() == 2 else self.view
        return Target(view, tuple(view.shape))

    def by_head(self, parts: int, num_heads: int) -> Target:
        """Return the target of a file whose rows lie head by head, each head's parts together."""
        split = self.view.view(parts, num_heads, -1, *self.shape[1:])
        return Target(split.transpose(0, 1), self.shape)

    def wrong_shape(self, shape: tuple[int, ...]) -> str | None:
        """Return what the file's shape should be, or None when it is."""
        return None if shape == self.shape else f"needed {list(self.shape)}"

    def wrong_type(self, dtype: str) -> str | None:
        """Return why tensors of a type cannot be taken, or None when they can."""
        return "it holds no plain weights" if _NO_WEIGHTS.fullmatch(dtype) else None

    def fill(self, stored: Stored) -> None:
        """Cast and copy what is stored, whose shape was checked, into the parameter."""
        if not isinstance(stored, Tensor):
            self._fill_rows(stored)
        elif stored.numel() == self.view.numel():
            self.view.copy_(stored.reshape(self.view.shape))
        else:
            self.view.copy_(stored.expand(self.view.shape))

    def _fill_rows(self, source: RowSource) -> None:
        """Copy some rows at a time, so that the source never stands there whole."""
        view = self.view.t() if source.transposed else self.view
        rows = source.rows // view.shape[0]  # of the file, for one along the view's first dimension
        step = max(1, _SLICE_ELEMENTS // max(1, view[0].numel()))
        for start in range(0, view.shape[0], step):
            part = view[start : start + step]
            part.copy_(source.values(start * rows, (start + len(part)) * rows).view(part.shape))


@dataclass(frozen=True, slots=True)
class RawTarget:
    """Where one tensor of a quantized matrix waits, as the file has it, until its layer is packed."""

    name: str  # under which it waits
    waiting: dict[str, Stored]
    shapes: tuple[tuple[int, ...], ...]  # that the file may have
    dtypes: tuple[str, ...]  # types, as the file calls them
    optional: bool = False
    owner: Loadable | None = None

    def transposed(self) -> RawTarget:
        """Return itself: the format of the matrix knows how its tensors lie."""
        return self

    def by_head(self, parts: int, num_heads: int) -> RawTarget:
        """Return itself: the format of the matrix knows the order of its rows."""
        return self

    def wrong_shape(self, shape: tuple[int, ...]) -> str | None:
        """Return what the file's shape should be, or None when it is."""
        needed = " or ".join(str(list(one)) for one in self.shapes)
        return None if shape in self.shapes else f"needed {needed}"

    def wrong_type(self, dtype: str) -> str | None:
        """Return which types can be taken, or None when this one can."""
        return None if dtype in self.dtypes else f"needed {' or '.join(self.dtypes)}"

    def fill(self, stored: Stored) -> None:
        """Keep the tensor; a large one is still in the file."""
        self.waiting[self.name] = stored


AnyTarget = Target | RawTarget


class RandomWeights:
    """Made-up weights for benchmarks: one buffer of random numbers, laid over every parameter."""

    # A prime, so that rows of the usual sizes do not repeat each other.
    _LENGTH = 1_048_573

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator(device="cpu").manual_seed(seed)
        numbers = torch.rand(self._LENGTH, generator=generator).mul_(2).sub_(1)
        self._numbers = numbers.to(device=device, dtype=dtype)
        self._next = 0

    def fill(self, parameter: Tensor, bound: float) -> None:
        """Fill a contiguous parameter with numbers from [-bound, bound]."""
        flat = parameter.view(-1)
        done = 0
        while done < flat.numel():
            count = min(flat.numel() - done, self._LENGTH - self._next)
            source = self._numbers[self._next : self._next + count]
            torch.mul(source, bound, out=flat[done : done + count])
            done += count
            self._next = (self._next + count) % self._LENGTH


class Loadable(Protocol):
    """A module with parameters of its own."""

    def targets(self, part: str) -> Mapping[str, AnyTarget]:
        """Return where the tensors of `part` go, by the last word of their checkpoint names.

        A part is what one module of the checkpoint fills: "" is all of this module, other names are
        the module's own ("q", "gate", ...).
        """
        ...  # fmt: skip

    def randomize(self, weights: RandomWeights) -> None:
        """Fill the parameters with made-up values of a plausible size."""
        ...


@dataclass(frozen=True, slots=True)
class LinearShape:
    """The sizes of a linear layer."""

    in_features: int
    out_features: int
    bias: bool
    # Of a gated layer, whose rows are a gate's and as many of an up projection: the activation's name.
    gate: str | None = None


@dataclass(frozen=True, slots=True)
class ModuleName:
    """How checkpoints call one module."""

    plain: str  # without the family's prefix: "layers.0.self_attn.q_proj"
    spellings: tuple[str, ...]  # the plain one, and it behind each prefix of the family

    def ends_in(self, word: str) -> bool:
        """Return whether the module's own name, the last word, is `word`."""
        return self.plain.rpartition(".")[2] == word


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Output rows of a layer that are one module of the checkpoint."""

    name: ModuleName
    start: int
    stop: int
    transposed: bool = False  # whether the family's plain checkpoints hold the matrix as [in, out]
    row_order: Tensor | None = None  # row i of the part is row row_order[i] of the module's matrix
    lookup: bool = False  # whether it is an embedding


class QuantMethod(Protocol):
    """How the weights of linear layers are kept and used. One object serves all layers of a model.

    A layer is a module with its `LinearShape` as `shape`: a linear layer, an output head, or an
    embedding, which is one where a head is tied to it.
    """

    def create_weights(
        self, layer: nn.Module, shape: LinearShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Register the format's parameters on `layer`; `dtype` is what activations have."""
        ...

    def for_layer(self, shape: LinearShape, parts: Sequence[LayerPart]) -> QuantMethod:
        """Return the format of one layer, by what the checkpoint calls its parts.

        Asked once a layer, after the model is built; what is another object than this one gets a
        `create_weights` of its own.
        """
        ...

    def targets(self, layer: nn.Module, start: int, stop: int) -> Mapping[str, AnyTarget]:
        """Return where the checkpoint tensors of output rows start:stop go, by suffix."""
        ...

    def randomize(self, layer: nn.Module, weights: RandomWeights) -> None:
        """Fill the layer with made-up weights."""
        ...

    def finish(self, layer: nn.Module) -> None:
        """Bring the layer, all of whose tensors are filled, into the form that it is used in.

        On the meta device too, so that sizes agree.
        """
        ...

    def finish_lookup(self, layer: nn.Module) -> None:
        """Do what `finish` does for a layer of which only `rows` are wanted."""
        ...

    def apply(
        self,
        layer: nn.Module,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the layer's output [num_tokens, out_features] of x [num_tokens, in_features].

        It is added to `residual` in place where one is given; else it has `out_dtype`, or x's.
        """
        ...

    def apply_gated(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Return act(gate) * up [num_tokens, out_features / 2] of a layer whose shape has a gate."""
        ...

    def gated_outputs(self, gate: str) -> int:
        """Return the most temporary memory of `apply_gated`, its result included, in results."""
        ...

    def extra_bytes_per_token(self, layer: nn.Module) -> int:
        """Return the temporary memory of `apply` and `apply_gated` beside what comes out of them."""
        ...

    def rows(self, layer: nn.Module, ids: Tensor) -> Tensor:
        """Return rows ids [count] int64 of the layer's matrix, [count, in_features]: a fresh tensor."""
        ...
